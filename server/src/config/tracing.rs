//! Where spans go, in OpenTelemetry's own variables and as settings of ours.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use http::uri::PathAndQuery;
use http::{HeaderName, HeaderValue};
use serde::Deserialize;

use super::webhooks::{Endpoint, endpoint};
use super::{ConfigError, invalid};
use crate::spans::Sampler;

const SETTING: &str = "--otlp-endpoint";
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
/// Where collectors listen for gRPC.
const GRPC_PORT: u16 = 4317;
/// Below a collector's address, when only that is named.
const TRACES_PATH: &str = "/v1/traces";

/// How a collector is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
pub enum OtlpProtocol {
    #[value(name = "grpc")]
    #[serde(rename = "grpc")]
    Grpc,
    #[value(name = "http/protobuf")]
    #[serde(rename = "http/protobuf")]
    HttpProtobuf,
}

/// Where spans go and which are made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracingConfig {
    pub endpoint: Endpoint,
    pub protocol: OtlpProtocol,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub service_name: String,
    pub sampler: Sampler,
    /// For one attempt.
    pub timeout: Duration,
    /// Certificates to trust instead of the public ones.
    pub ca_file: Option<PathBuf>,
}

/// Flags of `dormouse serve` about spans.
#[derive(Args, Clone, Debug, Default)]
pub struct TracingArgs {
    /// Send spans to the OpenTelemetry collector at this address, such as http://localhost:4318
    #[arg(
        long,
        value_name = "URL",
        env = "OTEL_EXPORTER_OTLP_ENDPOINT",
        help_heading = "Tracing"
    )]
    pub otlp_endpoint: Option<String>,
    /// The same with its whole path, which is then used as it is
    #[arg(
        long,
        hide = true,
        value_name = "URL",
        env = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        help_heading = "Tracing"
    )]
    pub otlp_traces_endpoint: Option<String>,
    /// Protocol of the collector: grpc or http/protobuf [default: grpc on port 4317, else
    /// http/protobuf]
    #[arg(
        long,
        value_name = "PROTOCOL",
        env = "OTEL_EXPORTER_OTLP_PROTOCOL",
        help_heading = "Tracing"
    )]
    pub otlp_protocol: Option<OtlpProtocol>,
    /// Headers for the collector, as name=value,name=value; better given by the environment
    #[arg(
        long,
        hide_env_values = true,
        value_name = "HEADERS",
        env = "OTEL_EXPORTER_OTLP_HEADERS",
        help_heading = "Tracing"
    )]
    pub otlp_headers: Option<String>,
    /// Certificates (PEM) to trust a https:// collector by, instead of the public ones
    #[arg(
        long,
        value_name = "FILE",
        env = "OTEL_EXPORTER_OTLP_CERTIFICATE",
        help_heading = "Tracing"
    )]
    pub otlp_certificate: Option<PathBuf>,
    /// What the server calls itself in its spans [default: dormouse]
    #[arg(
        long,
        value_name = "NAME",
        env = "OTEL_SERVICE_NAME",
        help_heading = "Tracing"
    )]
    pub otel_service_name: Option<String>,
    /// Which traces are recorded: always_on, always_off, traceidratio or one of them behind
    /// parentbased_ [default: parentbased_always_on]
    #[arg(
        long,
        value_name = "SAMPLER",
        env = "OTEL_TRACES_SAMPLER",
        help_heading = "Tracing"
    )]
    pub traces_sampler: Option<String>,
    /// For traceidratio: the share of traces, from 0 to 1 [default: 1]
    #[arg(
        long,
        value_name = "SHARE",
        env = "OTEL_TRACES_SAMPLER_ARG",
        help_heading = "Tracing"
    )]
    pub traces_sampler_arg: Option<String>,
}

/// `[tracing]` of a configuration file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TracingSection {
    pub endpoint: Option<String>,
    pub protocol: Option<OtlpProtocol>,
    pub service_name: Option<String>,
    pub sampler: Option<String>,
    pub sampler_arg: Option<f64>,
    pub ca_file: Option<PathBuf>,
}

/// Joins flags with the file; none when no collector is named.
pub(super) fn resolve(
    args: &TracingArgs,
    file: TracingSection,
) -> Result<Option<TracingConfig>, ConfigError> {
    // An empty variable counts as none, as OpenTelemetry has it.
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let exact = given(&args.otlp_traces_endpoint);
    let base = given(&args.otlp_endpoint).or(file.endpoint);
    let Some(url) = exact.as_ref().or(base.as_ref()) else {
        return Ok(None);
    };
    let wrong = |why: String| invalid(SETTING, why);
    let mut endpoint = endpoint(url).map_err(wrong)?;
    let default = match endpoint.port {
        GRPC_PORT => OtlpProtocol::Grpc,
        _ => OtlpProtocol::HttpProtobuf,
    };
    let protocol = args.otlp_protocol.or(file.protocol).unwrap_or(default);
    if protocol == OtlpProtocol::Grpc && endpoint.is_https {
        return Err(invalid(
            SETTING,
            "https:// is possible with --otlp-protocol=http/protobuf only",
        ));
    }
    if exact.is_none() {
        let path = format!(
            "{}{TRACES_PATH}",
            endpoint.path.path().trim_end_matches('/')
        );
        endpoint.path = PathAndQuery::try_from(path)
            .map_err(|_| invalid(SETTING, "the path cannot be extended"))?;
    }
    let name = given(&args.traces_sampler).or(file.sampler);
    let argument = given(&args.traces_sampler_arg);
    let argument = argument.or(file.sampler_arg.map(|share| share.to_string()));
    let sampler = match name {
        None => Sampler::default(),
        Some(name) => Sampler::parse(&name, argument.as_deref())
            .map_err(|error| invalid("--traces-sampler", error.to_string()))?,
    };
    Ok(Some(TracingConfig {
        endpoint,
        protocol,
        headers: headers(given(&args.otlp_headers).as_deref().unwrap_or_default())?,
        service_name: given(&args.otel_service_name)
            .or(file.service_name)
            .unwrap_or_else(|| "dormouse".to_owned()),
        sampler,
        timeout: DEFAULT_TIMEOUT,
        ca_file: args.otlp_certificate.clone().or(file.ca_file),
    }))
}

/// Reads `name=value,name=value`; values are never shown.
fn headers(text: &str) -> Result<Vec<(HeaderName, HeaderValue)>, ConfigError> {
    const SETTING: &str = "--otlp-headers";
    let pairs = text.split(',').filter(|pair| !pair.trim().is_empty());
    let read = pairs.map(|pair| {
        let (name, value) = pair
            .split_once('=')
            .ok_or_else(|| invalid(SETTING, "expected name=value pairs with commas in between"))?;
        let name: HeaderName = name
            .trim()
            .parse()
            .map_err(|_| invalid(SETTING, "a header has a name that HTTP does not allow"))?;
        let mut value = HeaderValue::try_from(value.trim()).map_err(|_| {
            invalid(
                SETTING,
                format!("the value of {name} is none that HTTP allows"),
            )
        })?;
        value.set_sensitive(true);
        Ok((name, value))
    });
    read.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(endpoint: &str) -> TracingArgs {
        TracingArgs {
            otlp_endpoint: Some(endpoint.to_owned()),
            ..TracingArgs::default()
        }
    }

    fn resolved(args: &TracingArgs) -> TracingConfig {
        resolve(args, TracingSection::default()).unwrap().unwrap()
    }

    #[test]
    fn spans_are_off_unless_a_collector_is_named() {
        for args in [TracingArgs::default(), args("")] {
            assert_eq!(resolve(&args, TracingSection::default()).unwrap(), None);
        }
    }

    #[test]
    fn the_port_decides_on_the_protocol() {
        let grpc = resolved(&args("http://collector:4317"));
        assert_eq!(grpc.protocol, OtlpProtocol::Grpc);
        let http = resolved(&args("http://collector:4318"));
        assert_eq!(http.protocol, OtlpProtocol::HttpProtobuf);
        assert_eq!(http.endpoint.path, "/v1/traces");
        let exact = TracingArgs {
            otlp_traces_endpoint: Some("https://collector/in?x=1".to_owned()),
            ..args("http://other:4318/base/")
        };
        assert_eq!(resolved(&exact).endpoint.path, "/in?x=1");
        let below = resolved(&args("https://collector/base/"));
        assert_eq!(below.endpoint.path, "/base/v1/traces");
    }

    #[test]
    fn headers_are_read_and_never_shown() {
        let config = resolved(&TracingArgs {
            otlp_headers: Some("api-key=t0ps3cret, x = y".to_owned()),
            ..args("http://c:4318")
        });
        assert_eq!(config.headers.len(), 2);
        let shown = format!("{config:?}");
        assert!(!shown.contains("t0ps3cret"), "{shown}");
    }

    #[test]
    fn wrong_settings_say_what_is_wrong() {
        let sampler = |name: &str| TracingArgs {
            traces_sampler: Some(name.to_owned()),
            ..args("http://c:4318")
        };
        let with = |headers: &str| TracingArgs {
            otlp_headers: Some(headers.to_owned()),
            ..args("http://c:4318")
        };
        for (args, expected) in [
            (args("c:4317"), "expected http:// or https://"),
            (args("https://c:4317"), "http/protobuf only"),
            (sampler("some"), "unknown sampler 'some'"),
            (with("novalue"), "name=value"),
            (with("a b=c"), "a name that HTTP"),
        ] {
            let error = resolve(&args, TracingSection::default()).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
