//! Triton's flags that have no meaning here: known ones are dropped with one warning each, those
//! that promise protection are refused, because dropping them would leave something open.

/// A command line without the flags that do not apply.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Filtered {
    pub args: Vec<String>,
    /// Flags that were dropped, each once.
    pub ignored: Vec<String>,
}

/// Flags that take a value and change nothing here.
const IGNORED: &[&str] = &[
    "allow-cpu-metrics",
    "allow-gpu-metrics",
    "allow-sagemaker",
    "allow-vertex-ai",
    "backend-directory",
    "buffer-manager-thread-count",
    "cache-directory",
    "cuda-memory-pool-byte-size",
    "cuda-virtual-address-size",
    "enable-peer-access",
    "grpc-arg",
    "grpc-http2-max-ping-strikes",
    "grpc-http2-max-pings-without-data",
    "grpc-http2-min-recv-ping-interval-without-data",
    "grpc-infer-allocation-pool-size",
    "grpc-infer-thread-count",
    "grpc-keepalive-permit-without-calls",
    "grpc-keepalive-time",
    "grpc-keepalive-timeout",
    "grpc-max-connection-age",
    "grpc-max-connection-age-grace",
    "grpc-max-response-pool-size",
    "host-policy",
    "http-thread-count",
    "metrics-config",
    "metrics-interval-ms",
    "min-supported-compute-capability",
    "model-load-gpu-limit",
    "pinned-memory-pool-byte-size",
    "rate-limit",
    "rate-limit-resource",
    "repoagent-directory",
    "reuse-grpc-port",
    "reuse-http-port",
    "sagemaker-port",
    "sagemaker-safe-port-range",
    "sagemaker-thread-count",
    "tf-allow-soft-placement",
    "tf-gpu-memory-fraction",
    "trace-config",
    "trace-count",
    "trace-file",
    "trace-level",
    "trace-log-frequency",
    "trace-rate",
    "vertex-ai-default-model",
    "vertex-ai-port",
    "vertex-ai-thread-count",
];

/// Flags that promise something this server cannot keep yet, and what.
const REFUSED: &[(&str, &str)] = &[
    ("grpc-restricted-protocol", "it would not restrict anything"),
    ("http-restricted-api", "it would not restrict anything"),
    (
        "http-header-forward-pattern",
        "headers would not reach the model",
    ),
    (
        "grpc-header-forward-pattern",
        "metadata would not reach the model",
    ),
    ("model-namespacing", "models of the same name would collide"),
];

/// Takes Triton's flags without meaning out of a `serve` command line.
pub fn filter(args: impl IntoIterator<Item = String>) -> Result<Filtered, String> {
    let mut filtered = Filtered::default();
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        let flag = arg.strip_prefix("--").map(|flag| {
            flag.split_once('=')
                .map_or((flag, None), |(name, value)| (name, Some(value)))
        });
        let Some((name, value)) = flag else {
            filtered.args.push(arg);
            continue;
        };
        let refused = REFUSED.iter().find(|(known, _)| *known == name);
        if refused.is_none() && !IGNORED.contains(&name) {
            filtered.args.push(arg);
            continue;
        }
        let name = name.to_owned();
        let value = match value {
            Some(value) => Some(value.to_owned()),
            None => args.next_if(|next| !next.starts_with("--")),
        };
        let is_off = matches!(value.as_deref(), Some("false" | "0" | "False"));
        if let Some((_, consequence)) = refused
            && !is_off
        {
            return Err(format!(
                "--{name} is not supported by this server, and ignoring it would be wrong: {consequence}"
            ));
        }
        let flag = format!("--{name}");
        if !filtered.ignored.contains(&flag) {
            filtered.ignored.push(flag);
        }
    }
    Ok(filtered)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(args: &[&str]) -> Result<(Vec<String>, Vec<String>), String> {
        filter(args.iter().map(|arg| (*arg).to_owned()))
            .map(|filtered| (filtered.args, filtered.ignored))
    }

    #[test]
    fn flags_without_meaning_are_dropped_with_their_values_and_named_once() {
        let (args, ignored) = check(&[
            "--model-store=/mnt/models",
            "--allow-sagemaker=false",
            "--http-thread-count",
            "8",
            "--http-thread-count=4",
            "--grpc-port=9000",
        ])
        .unwrap();
        assert_eq!(args, ["--model-store=/mnt/models", "--grpc-port=9000"]);
        assert_eq!(ignored, ["--allow-sagemaker", "--http-thread-count"]);
    }

    #[test]
    fn flags_that_promise_protection_are_refused_unless_switched_off() {
        assert!(
            check(&["--grpc-restricted-protocol=health:a=b"])
                .unwrap_err()
                .contains("--grpc-restricted-protocol")
        );
        assert!(check(&["--http-restricted-api=inference:key=value"]).is_err());
        assert_eq!(
            check(&["--model-namespacing=false"]).unwrap().1,
            ["--model-namespacing"]
        );
    }
}
