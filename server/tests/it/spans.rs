//! Spans, as a collector of OpenTelemetry's own making receives them.

use std::collections::HashMap;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use crate::foreign::{prepare, script};
use crate::http;
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, patiently};
use crate::wire::{self, add_sub};

const OTLP: (&str, &[&str]) = (
    "opentelemetry",
    &["opentelemetry-proto==1.45.2", "grpcio==1.85.1"],
);

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

struct Collector {
    _child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    ports: Value,
}

impl Collector {
    async fn start(arguments: &[&str]) -> Result<Self> {
        let environment = prepare(OTLP).await?;
        let mut child = Command::new(environment.python())
            .arg(script("collector.py"))
            .args(arguments)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let output = child.stdout.take().context("a pipe")?;
        let mut lines = BufReader::new(output).lines();
        let ports = patiently("the collector listens", lines.next_line()).await??;
        Ok(Self {
            _child: child,
            lines,
            ports: serde_json::from_str(&ports.context("the collector ended")?)?,
        })
    }

    fn url(&self, way: &str) -> String {
        format!("http://127.0.0.1:{}", self.ports[way])
    }

    /// Waits for spans until `enough`.
    async fn spans(&mut self, enough: impl Fn(&[Value]) -> bool) -> Result<Vec<Value>> {
        let mut spans = Vec::new();
        patiently("the spans arrive", async {
            while !enough(&spans) {
                let line = self.lines.next_line().await?;
                spans.push(serde_json::from_str(&line.context("the collector ended")?)?);
            }
            Ok(spans)
        })
        .await?
    }
}

fn repository() -> Result<TestRepository> {
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    repository.add("broken", Model::new("poison"))?;
    Ok(repository)
}

fn named<'a>(spans: &'a [Value], name: &str) -> Result<&'a Value> {
    let found = spans.iter().find(|span| span["name"] == name);
    found.with_context(|| format!("no span {name:?} in {spans:#?}"))
}

#[tokio::test]
async fn a_callers_trace_goes_on_in_the_request_its_load_and_its_stages() -> Result<()> {
    let repository = repository()?;
    let mut collector = Collector::start(&["--refuse=1"]).await?;
    let server = TestServer::over(&repository)
        .arg(format!("--otlp-endpoint={}", collector.url("grpc")))
        .arg("--otlp-protocol=grpc")
        .arg("--otlp-headers=api-key=t0ps3cret")
        .arg("--otel-service-name=night shift")
        .start()
        .await?;
    let mut client = server.grpc().await?;
    let mut call = tonic::Request::new(add_sub("simple", 2, 1).id("seven").0);
    let parent = format!("00-{TRACE}-{CALLER}-01");
    call.metadata_mut().insert("traceparent", parent.parse()?);
    call.metadata_mut()
        .insert("tracestate", "vendor=1".parse()?);
    client.model_infer(call).await?;
    // Not to be recorded, says its caller.
    let mut silent = tonic::Request::new(add_sub("simple", 2, 1).id("silent").0);
    let parent = format!("00-{TRACE}-{CALLER}-00");
    silent.metadata_mut().insert("traceparent", parent.parse()?);
    client.model_infer(silent).await?;
    let mut server = server;
    server.terminate()?;
    server.exited().await?;

    let complete = |spans: &[Value]| {
        let has = |name: &str| spans.iter().any(|span| span["name"] == name);
        has("infer simple") && has("load simple") && has("session") && has("first-run")
    };
    let spans = collector.spans(complete).await?;
    let request = named(&spans, "infer simple")?;
    ensure!(request["trace"] == TRACE, "{request}");
    ensure!(request["parent"] == CALLER, "{request}");
    ensure!(request["state"] == "vendor=1", "{request}");
    ensure!(request["kind"] == 2, "a server's span: {request}");
    ensure!(request["status"] == 0, "{request}");
    ensure!(request["api_key"] == "t0ps3cret", "{request}");
    ensure!(request["resource"]["service.name"] == "night shift");
    let attributes = &request["attributes"];
    ensure!(attributes["dormouse.model"] == "simple", "{attributes}");
    ensure!(attributes["dormouse.version"] == "1", "{attributes}");
    ensure!(attributes["dormouse.request_id"] == "seven", "{attributes}");
    ensure!(attributes["dormouse.rows"] == 1, "{attributes}");
    ensure!(attributes["dormouse.batch_rows"] == 1, "{attributes}");
    ensure!(attributes["dormouse.cold"] == true, "{attributes}");
    ensure!(
        attributes["network.protocol.name"] == "grpc",
        "{attributes}"
    );
    for time in ["queue", "compute_input", "compute_infer", "compute_output"] {
        let seconds = attributes[format!("dormouse.{time}_seconds")].as_f64();
        ensure!(
            seconds.is_some_and(|seconds| seconds >= 0.0),
            "{attributes}"
        );
    }
    let load = named(&spans, "load simple")?;
    ensure!(
        load["trace"] == TRACE && load["parent"] == request["span"],
        "{load}"
    );
    let within = |span: &Value, outer: &Value| {
        span["start"].as_u64() >= outer["start"].as_u64()
            && span["end"].as_u64() <= outer["end"].as_u64()
    };
    ensure!(within(load, request), "{load} is not within {request}");
    let stages: Vec<_> = spans
        .iter()
        .filter(|span| span["parent"] == load["span"])
        .collect();
    ensure!(stages.len() >= 3, "{spans:#?}");
    for stage in stages {
        ensure!(
            stage["attributes"]["dormouse.stage"] == stage["name"],
            "{stage}"
        );
        ensure!(stage["start"].as_u64() >= load["start"].as_u64(), "{stage}");
    }
    let ids: HashMap<_, _> = spans
        .iter()
        .map(|span| (span["span"].to_string(), ()))
        .collect();
    ensure!(ids.len() == spans.len(), "spans share an id");
    let silent = spans
        .iter()
        .any(|span| span["attributes"]["dormouse.request_id"] == "silent");
    ensure!(!silent, "an unsampled request was recorded");
    let log = server.log.lines().join("\n");
    ensure!(!log.contains("t0ps3cret"), "a secret is in the log");
    Ok(())
}

#[tokio::test]
async fn failures_over_http_are_spans_with_a_reason() -> Result<()> {
    let repository = repository()?;
    let mut collector = Collector::start(&[]).await?;
    let server = TestServer::over(&repository)
        .arg(format!("--otlp-endpoint={}", collector.url("http")))
        .start()
        .await?;
    let parent = format!("00-{TRACE}-{CALLER}-01");
    let headers = [("traceparent", parent.as_str())];
    let path = "/v2/models/simple/infer";
    let answer = http::call(server.http, "POST", path, &headers, b"{\"inputs\":[]}").await?;
    ensure!(answer.status == 400, "{}", answer.text());
    // One that nobody can read is not one that was given up.
    let path = "/v2/models/broken/infer";
    let answer = http::call(server.http, "POST", path, &headers, b"{").await?;
    ensure!(answer.status == 400, "{}", answer.text());
    let mut server = server;
    server.terminate()?;
    server.exited().await?;
    let spans = collector
        .spans(|spans| spans.iter().any(|span| span["name"] == "infer broken"))
        .await?;
    let broken = named(&spans, "infer broken")?;
    ensure!(
        broken["attributes"]["error.type"] == "invalid_request",
        "{broken}"
    );
    let request = named(&spans, "infer simple")?;
    ensure!(request["way"] == "http", "{request}");
    ensure!(
        request["trace"] == TRACE && request["parent"] == CALLER,
        "{request}"
    );
    ensure!(request["status"] == 2, "{request}");
    ensure!(
        request["attributes"]["error.type"] == "invalid_request",
        "{request}"
    );
    ensure!(
        request["message"]
            .as_str()
            .is_some_and(|text| text.contains("INPUT0")),
        "{request}"
    );
    Ok(())
}

#[tokio::test]
async fn a_collector_that_is_gone_costs_spans_and_nothing_else() -> Result<()> {
    let repository = repository()?;
    let server = TestServer::over(&repository)
        // The port that nobody is ever given.
        .arg("--otlp-endpoint=http://127.0.0.1:1")
        .arg("--otlp-protocol=grpc")
        .start()
        .await?;
    let client = server.grpc().await?;
    for _ in 0..3 {
        wire::infer(&client, add_sub("simple", 2, 1)).await?;
    }
    crate::server::eventually("the lost spans are counted", || async {
        Ok(server.metric("dormouse_spans_dropped_total", &[]).await? >= 3.0)
    })
    .await?;
    ensure!(server.metric("dormouse_spans_sent_total", &[]).await? == 0.0);
    Ok(())
}
