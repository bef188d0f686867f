//! Every method on the gRPC port, with what it needs.

use http::Method;

use crate::guard::Need;

/// By path. A method that is not here is nobody's.
#[rustfmt::skip]
pub(crate) static TABLE: &[(&str, Need)] = &[
    ("/inference.GRPCInferenceService/ModelInfer", Need::Inference),
    ("/inference.GRPCInferenceService/ModelStreamInfer", Need::InferenceStream),
    ("/inference.GRPCInferenceService/ServerLive", Need::Probe),
    ("/inference.GRPCInferenceService/ServerReady", Need::Probe),
    ("/inference.GRPCInferenceService/ModelReady", Need::Metadata),
    ("/inference.GRPCInferenceService/ServerMetadata", Need::Metadata),
    ("/inference.GRPCInferenceService/ModelMetadata", Need::Metadata),
    ("/inference.GRPCInferenceService/ModelConfig", Need::Metadata),
    ("/inference.GRPCInferenceService/ModelStatistics", Need::Metadata),
    ("/inference.GRPCInferenceService/RepositoryIndex", Need::Metadata),
    ("/inference.GRPCInferenceService/RepositoryModelLoad", Need::Load),
    ("/inference.GRPCInferenceService/RepositoryModelUnload", Need::Management),
    ("/inference.GRPCInferenceService/SystemSharedMemoryStatus", Need::SharedMemory),
    ("/inference.GRPCInferenceService/SystemSharedMemoryRegister", Need::SharedMemory),
    ("/inference.GRPCInferenceService/SystemSharedMemoryUnregister", Need::SharedMemory),
    ("/inference.GRPCInferenceService/CudaSharedMemoryStatus", Need::SharedMemory),
    ("/inference.GRPCInferenceService/CudaSharedMemoryRegister", Need::SharedMemory),
    ("/inference.GRPCInferenceService/CudaSharedMemoryUnregister", Need::SharedMemory),
    ("/inference.GRPCInferenceService/TraceSetting", Need::Management),
    ("/inference.GRPCInferenceService/LogSettings", Need::Management),
    ("/grpc.health.v1.Health/Check", Need::Probe),
    ("/grpc.health.v1.Health/Watch", Need::Probe),
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Need::Metadata),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Need::Metadata),
    ("/externalscaler.ExternalScaler/IsActive", Need::Metrics),
    ("/externalscaler.ExternalScaler/StreamIsActive", Need::Metrics),
    ("/externalscaler.ExternalScaler/GetMetricSpec", Need::Metrics),
    ("/externalscaler.ExternalScaler/GetMetrics", Need::Metrics),
    ("/externalscaler.ExternalScaler/StreamMetricSpec", Need::Metrics),
];

/// What a call needs.
pub(crate) fn need(_: &Method, path: &str) -> Need {
    let known = TABLE.iter().find(|(method, _)| *method == path);
    known.map_or(Need::Unknown, |(_, need)| *need)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prost::Message;
    use prost_reflect::prost_types::FileDescriptorSet;

    use super::*;

    #[test]
    fn every_method_of_every_service_says_what_it_needs() {
        let sets = [
            dormouse_proto::FILE_DESCRIPTOR_SET,
            tonic_health::pb::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
        ];
        let mut served = BTreeSet::new();
        for set in sets {
            let set = FileDescriptorSet::decode(set).unwrap();
            for file in set.file {
                for service in &file.service {
                    let methods = service.method.iter().map(|method| {
                        format!("/{}.{}/{}", file.package(), service.name(), method.name())
                    });
                    served.extend(methods);
                }
            }
        }
        let listed: BTreeSet<String> = TABLE.iter().map(|(path, _)| path.to_string()).collect();
        assert_eq!(listed.len(), TABLE.len());
        assert_eq!(listed, served);
    }
}
