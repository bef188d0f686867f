//! What the server offers beyond the protocol's core, as its operator allows it.

use crate::config::ExtensionsConfig;
use crate::response_cache::ResponseCache;
use crate::shared_memory::SharedMemory;
use crate::trace_settings::TraceSettings;

/// The state behind the protocol's extensions.
#[derive(Debug, Default)]
pub struct Extensions {
    pub shared_memory: SharedMemory,
    /// None: answers are not kept.
    pub cache: Option<ResponseCache>,
    pub trace: TraceSettings,
}

impl Extensions {
    pub fn new(config: &ExtensionsConfig) -> Self {
        Self {
            shared_memory: SharedMemory::new(config.shared_memory.clone()),
            cache: config.cache_size.map(ResponseCache::new),
            trace: TraceSettings::default(),
        }
    }

    /// The protocol's extensions that really work, in Triton's order.
    pub fn names(&self) -> Vec<&'static str> {
        let shared_memory = self.shared_memory.is_allowed();
        [
            ("classification", true),
            ("sequence", true),
            ("model_repository", true),
            ("model_repository(unload_dependents)", true),
            ("schedule_policy", true),
            ("model_configuration", true),
            ("system_shared_memory", shared_memory),
            ("binary_tensor_data", true),
            ("parameters", true),
            ("statistics", true),
            ("trace", true),
            ("logging", true),
        ]
        .into_iter()
        .filter_map(|(name, works)| works.then_some(name))
        .collect()
    }
}
