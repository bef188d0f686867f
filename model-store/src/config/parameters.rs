//! `parameters`: the engine's settings under Triton's names, and our own under `dormouse.*`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use dormouse_proto::inference as pb;

use super::error::ConfigError;
use super::resolve::ConfigDefaults;
use super::suggest;
use crate::spec::{GraphLevel, KeepAliveSpec, LifecycleSpec, SessionSpec};

const MAX_THREADS: u32 = 1024;
const ARENA_SHRINKAGE: &str = "memory.enable_memory_arena_shrinkage";
/// The one arena that a session on the CPU has.
const CPU_ARENA: &str = "cpu:0";

const KEEP_ALIVE: &str = "dormouse.keep_alive";
const PARK_AFTER: &str = "dormouse.park_after";
const LOAD: &str = "dormouse.load";
const BATCHING: &str = "dormouse.batching";
const OWN_PREFIX: &str = "dormouse.";
const WEIGHTS: &str = "dormouse.weights";
const ISOLATION: &str = "dormouse.isolation";
const OWN: [&str; 6] = [
    "keep_alive",
    "park_after",
    "load",
    "batching",
    "weights",
    "isolation",
];

const ENGINE: [&str; 6] = [
    "intra_op_thread_count",
    "inter_op_thread_count",
    "execution_mode",
    "enable_mem_arena",
    "enable_mem_pattern",
    ARENA_SHRINKAGE,
];
/// One session serves every run here, whatever this says.
const WITHOUT_EFFECT: &str = "share_session_between_instances";
const GPU_ONLY: [&str; 4] = [
    "cudnn_conv_algo_search",
    "gpu_mem_limit",
    "arena_extend_strategy",
    "do_copy_in_default_stream",
];

/// What a model's parameters say.
#[derive(Debug, Default)]
pub(super) struct Parameters {
    pub(super) session: SessionSpec,
    pub(super) lifecycle: LifecycleSpec,
    /// Batch the model even though its rows influence each other.
    pub(super) force_batching: bool,
    pub(super) warnings: Vec<String>,
}

/// Whether a model asks to be loaded at once, as far as that can be told without its graph.
pub fn is_eager(config: &pb::ModelConfig) -> bool {
    let load = config.parameters.get(LOAD);
    load.is_some_and(|load| load.string_value == "eager")
}

/// The safetensors file that a configuration names as its graph's weights (`dormouse.weights`).
pub fn weights_file(config: &pb::ModelConfig) -> Option<&str> {
    let parameter = config.parameters.get(WEIGHTS)?;
    Some(&parameter.string_value)
}

/// Reads `parameters` and `optimization.graph`.
pub(super) fn read(
    model: &Arc<str>,
    config: &pb::ModelConfig,
    defaults: &ConfigDefaults,
) -> Result<Parameters, ConfigError> {
    let mut read = Parameters::default();
    read.session.intra_op_threads = defaults.intra_op_threads;
    read.session.inter_op_threads = defaults.inter_op_threads;
    read.session.graph_level = graph_level(model, config)?;
    // In the order of their names, so that the first error is always the same.
    let sorted: BTreeMap<_, _> = config.parameters.iter().collect();
    for (key, value) in sorted {
        Parameter {
            model,
            key,
            value: &value.string_value,
        }
        .apply(&mut read)?;
    }
    let session = &mut read.session;
    if session.shrinks_arena && session.memory_arena == Some(false) {
        session.shrinks_arena = false;
        read.warnings.push(format!(
            "parameters.{ARENA_SHRINKAGE} has no effect: enable_mem_arena is off"
        ));
    }
    Ok(read)
}

fn graph_level(model: &Arc<str>, config: &pb::ModelConfig) -> Result<GraphLevel, ConfigError> {
    let optimization = config.optimization.as_ref();
    let graph = optimization.and_then(|optimization| optimization.graph.as_ref());
    match graph.map_or(0, |graph| graph.level) {
        0 => Ok(GraphLevel::All),
        -1 => Ok(GraphLevel::Basic),
        1 => Ok(GraphLevel::Extended),
        2 => Ok(GraphLevel::Disabled),
        level => Err(ConfigError::Invalid {
            model: model.clone(),
            field: "optimization.graph.level".to_owned(),
            expected: "-1 (basic), 0 (all), 1 (extended) or 2 (none)".to_owned(),
            found: level.to_string(),
        }),
    }
}

struct Parameter<'a> {
    model: &'a Arc<str>,
    key: &'a str,
    value: &'a str,
}

impl Parameter<'_> {
    fn apply(&self, read: &mut Parameters) -> Result<(), ConfigError> {
        let session = &mut read.session;
        match self.key {
            "intra_op_thread_count" => session.intra_op_threads = self.threads()?,
            "inter_op_thread_count" => session.inter_op_threads = self.threads()?,
            "execution_mode" => session.parallel_execution = self.execution_mode()?,
            "enable_mem_arena" => session.memory_arena = Some(self.boolean()?),
            "enable_mem_pattern" => session.memory_pattern = Some(self.boolean()?),
            ARENA_SHRINKAGE => {
                let (cpu, others): (Vec<_>, _) =
                    self.devices()?.partition(|&device| device == CPU_ARENA);
                session.shrinks_arena = !cpu.is_empty();
                // The engine would fail every run for the sake of a device it does not have.
                read.warnings.extend(others.into_iter().map(|device| {
                    format!(
                        "parameters.{ARENA_SHRINKAGE} has no effect on {device}: the model runs \
                         on the CPU, {CPU_ARENA}"
                    )
                }));
            }
            KEEP_ALIVE => read.lifecycle.keep_alive = Some(self.keep_alive()?),
            PARK_AFTER => read.lifecycle.park_after = Some(self.park_after()?),
            LOAD => read.lifecycle.eager = self.choice(["on_demand", "eager"])?,
            ISOLATION => read.lifecycle.isolated = self.choice(["none", "process"])?,
            BATCHING => read.force_batching = self.choice(["auto", "force"])?,
            // Whoever opens the graph asks for it by `weights_file`, and checks it against the files.
            WEIGHTS => {}
            key if key.starts_with(OWN_PREFIX) => return Err(self.unknown()),
            key if key.starts_with("session.") => {
                session
                    .entries
                    .insert(key.to_owned(), self.value.to_owned());
            }
            key if GPU_ONLY.contains(&key) => read.warnings.push(format!(
                "parameters.{key} has no effect: the model runs on the CPU"
            )),
            WITHOUT_EFFECT => {}
            // Anyone may keep notes in `parameters`; only what looks like a slip is worth a word.
            key => read
                .warnings
                .extend(suggest::nearest(key, ENGINE).map(|near| {
                    format!("parameters.{key} has no meaning here (did you mean '{near}'?)")
                })),
        }
        Ok(())
    }

    fn unknown(&self) -> ConfigError {
        let name = self.key.strip_prefix(OWN_PREFIX).unwrap_or(self.key);
        let hint = match suggest::nearest(name, OWN) {
            Some(near) => format!(" (did you mean '{OWN_PREFIX}{near}'?)"),
            None => {
                let known = OWN.map(|name| format!("{OWN_PREFIX}{name}"));
                format!("; known are {}", known.join(", "))
            }
        };
        ConfigError::UnknownParameter {
            model: self.model.clone(),
            key: self.key.to_owned(),
            hint,
        }
    }

    fn invalid(&self, expected: &str) -> ConfigError {
        ConfigError::Invalid {
            model: self.model.clone(),
            field: format!("parameters.{}", self.key),
            expected: expected.to_owned(),
            found: format!("'{}'", self.value),
        }
    }

    fn threads(&self) -> Result<Option<u32>, ConfigError> {
        match self.value.trim().parse::<u32>() {
            Ok(0) => Ok(None),
            Ok(threads) if threads <= MAX_THREADS => Ok(Some(threads)),
            _ => Err(self.invalid(&format!(
                "a number of threads up to {MAX_THREADS}, or 0 for the default"
            ))),
        }
    }

    fn execution_mode(&self) -> Result<bool, ConfigError> {
        match self.value.trim() {
            "0" => Ok(false),
            "1" => Ok(true),
            _ => Err(self.invalid("0 (one operator at a time) or 1 (parallel)")),
        }
    }

    fn boolean(&self) -> Result<bool, ConfigError> {
        match self.value.trim().to_ascii_lowercase().as_str() {
            "true" | "1" => Ok(true),
            "false" | "0" => Ok(false),
            _ => Err(self.invalid("true, false, 1 or 0")),
        }
    }

    /// `cpu:0;gpu:0`: the devices whose arena shrinks after a run.
    fn devices(&self) -> Result<impl Iterator<Item = &str>, ConfigError> {
        let is_device = |device: &str| {
            let id = device.strip_prefix("cpu:").or(device.strip_prefix("gpu:"));
            id.is_some_and(|id| id.parse::<u16>().is_ok())
        };
        if self.value.split(';').all(is_device) {
            return Ok(self.value.split(';'));
        }
        Err(self.invalid("devices such as 'cpu:0' or 'cpu:0;gpu:0'"))
    }

    fn choice(&self, [no, yes]: [&str; 2]) -> Result<bool, ConfigError> {
        match self.value {
            value if value == no => Ok(false),
            value if value == yes => Ok(true),
            _ => Err(self.invalid(&format!("'{no}' or '{yes}'"))),
        }
    }

    fn keep_alive(&self) -> Result<KeepAliveSpec, ConfigError> {
        Ok(match self.value {
            "forever" => KeepAliveSpec::Forever,
            "adaptive" => KeepAliveSpec::Adaptive,
            "off" => KeepAliveSpec::Off,
            value => KeepAliveSpec::For(duration(value).ok_or_else(|| {
                self.invalid(
                    "a duration such as '500ms', '30s', '5m', '2h', or 'adaptive', 'forever' or 'off'",
                )
            })?),
        })
    }

    fn park_after(&self) -> Result<Option<Duration>, ConfigError> {
        if self.value == "never" {
            return Ok(None);
        }
        duration(self.value).map(Some).ok_or_else(|| {
            self.invalid("a duration such as '500ms', '30s', '5m', '2h', or 'never'")
        })
    }
}

fn duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let number: u64 = text[..digits].parse().ok()?;
    let seconds = |each: u64| number.checked_mul(each).map(Duration::from_secs);
    match &text[digits..] {
        "ms" => Some(Duration::from_millis(number)),
        "s" => seconds(1),
        "m" => seconds(60),
        "h" => seconds(3600),
        "d" => seconds(86_400),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_a_number_and_a_unit() {
        assert_eq!(duration("30s"), Some(Duration::from_secs(30)));
        assert_eq!(duration("5m"), Some(Duration::from_secs(300)));
        assert_eq!(duration("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(duration("0s"), Some(Duration::ZERO));
        for wrong in [
            "",
            "s",
            "5",
            "-5s",
            "5 s",
            "5w",
            "99999999999999999999s",
            "18446744073709551615d",
        ] {
            assert_eq!(duration(wrong), None, "{wrong}");
        }
    }
}
