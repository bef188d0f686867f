//! The descriptors of `inference.ModelConfig`, decoded once.

use std::sync::LazyLock;

use dormouse_proto::inference as pb;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};

static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
    DescriptorPool::decode(dormouse_proto::FILE_DESCRIPTOR_SET)
        .expect("the descriptors were written by the build of this very crate")
});

/// The descriptor of `inference.ModelConfig`.
pub(super) fn model_config() -> MessageDescriptor {
    POOL.get_message_by_name("inference.ModelConfig")
        .expect("the schema has this message")
}

/// The names of every field of every message in the schema.
pub(super) fn all_field_names() -> Vec<String> {
    POOL.all_messages()
        .flat_map(|message| message.fields().collect::<Vec<_>>())
        .map(|field| field.name().to_owned())
        .collect()
}

/// The reflected form of a configuration.
pub(super) fn to_dynamic(config: &pb::ModelConfig) -> DynamicMessage {
    let mut message = DynamicMessage::new(model_config());
    message
        .transcode_from(config)
        .expect("generated type and descriptor come from the same schema");
    message
}

/// The generated form of a reflected configuration.
pub(super) fn from_dynamic(message: &DynamicMessage) -> pb::ModelConfig {
    message
        .transcode_to()
        .expect("generated type and descriptor come from the same schema")
}
