//! The dashboard and the alerts ask for what a server really exports.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use dormouse_client::{Client, RetryPolicy};
use serde_json::Value;

use crate::authority::{Authority, Files};
use crate::foreign::script;
use crate::http;
use crate::python::succeed;
use crate::repository::{Model, TestRepository};
use crate::rust_client;
use crate::server::{TestServer, eventually};

/// What Prometheus itself adds to every series, and what functions make.
const OUTSIDE: [&str; 2] = ["instance", "job"];
const NOT_OURS: [&str; 1] = ["up"];

const WORDS: [&str; 11] = [
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "and",
    "or",
    "unless",
    "bool",
    "offset",
];

/// The metrics of a query and the labels that are asked of each. Labels in a grouping are asked of
/// every metric of the query that could have them.
#[derive(Debug, Default)]
struct Asked {
    metrics: BTreeMap<String, BTreeSet<String>>,
    grouped: BTreeSet<String>,
}

/// Whether what follows a word makes it a function: its arguments, or how they are grouped.
fn is_call(next: &str) -> bool {
    next.starts_with(['(']) || next.starts_with("by ") || next.starts_with("without ")
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

/// Reads as much of PromQL as queries here are made of.
fn read(query: &str) -> Result<Asked> {
    let mut asked = Asked::default();
    let mut rest = query;
    let mut latest = String::new();
    while let Some(first) = rest.chars().next() {
        if first == '[' {
            rest = rest.split_once(']').context("a range without an end")?.1;
        } else if first == '{' {
            let (labels, after) = rest[1..]
                .split_once('}')
                .context("a selector without an end")?;
            for label in labels.split(',').filter(|label| !label.trim().is_empty()) {
                let name: String = label.trim().chars().take_while(|&c| is_word(c)).collect();
                asked
                    .metrics
                    .entry(latest.clone())
                    .or_default()
                    .insert(name);
            }
            rest = after;
        } else if first.is_ascii_alphabetic() || first == '_' {
            let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            let (word, after) = rest.split_at(end);
            let next = after.trim_start();
            rest = after;
            if matches!(word, "by" | "without" | "on" | "ignoring") {
                let list = next
                    .strip_prefix('(')
                    .context("a grouping without labels")?;
                let (labels, after) = list.split_once(')').context("a grouping without an end")?;
                asked
                    .grouped
                    .extend(labels.split(',').map(|label| label.trim().to_owned()));
                rest = after;
            } else if !is_call(next) && !WORDS.contains(&word) {
                latest = word.to_owned();
                asked.metrics.entry(latest.clone()).or_default();
                // By its selector only.
                if !next.starts_with('{') {
                    latest.clear();
                }
            }
        } else {
            let number = first.is_ascii_digit();
            let skip = |c: char| number && (c.is_ascii_alphanumeric() || matches!(c, '.' | '-'));
            let end = rest[1..]
                .find(|c| !skip(c))
                .map_or(rest.len(), |end| end + 1);
            rest = &rest[end.max(first.len_utf8())..];
        }
    }
    Ok(asked)
}

fn configs() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs")
}

fn queries() -> Result<Vec<(String, String)>> {
    fn walk(value: &Value, found: &mut Vec<(String, String)>) {
        match value {
            Value::Object(fields) => {
                if let Some(query) = fields.get("expr").and_then(Value::as_str) {
                    found.push(("the dashboard".to_owned(), query.to_owned()));
                }
                fields.values().for_each(|value| walk(value, found));
            }
            Value::Array(values) => values.iter().for_each(|value| walk(value, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    let dashboard: Value =
        serde_json::from_slice(&fs::read(configs().join("grafana/dormouse.json"))?)?;
    walk(&dashboard, &mut found);
    let panels = found.len();
    ensure!(panels >= 30, "{panels} queries in the dashboard");
    for variable in dashboard["templating"]["list"]
        .as_array()
        .context("a list")?
    {
        if let Some(definition) = variable["definition"].as_str() {
            let inside = definition
                .strip_prefix("label_values(")
                .and_then(|rest| rest.strip_suffix(')'));
            let (metric, label) = inside
                .and_then(|inside| inside.split_once(", "))
                .with_context(|| format!("label_values(metric, label), not {definition}"))?;
            let query = format!("sum by ({label}) ({metric})");
            found.push(("a variable of the dashboard".to_owned(), query));
        }
    }
    let rules = fs::read_to_string(configs().join("prometheus/dormouse.rules.yml"))?;
    let mut alert = "";
    for line in rules.lines() {
        if let Some(name) = line.trim().strip_prefix("- alert: ") {
            alert = name;
        }
        if let Some(query) = line.trim().strip_prefix("expr: ") {
            found.push((format!("alert {alert}"), query.to_owned()));
        }
    }
    ensure!(found.len() >= panels + 10, "too few alerts");
    Ok(found)
}

/// The metrics on a page and the labels of each.
fn exported(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let end = line.find(|c| !is_word(c)).unwrap_or(line.len());
        let (name, rest) = line.split_at(end);
        let labels = found.entry(name.to_owned()).or_default();
        if let Some((inside, _)) = rest
            .strip_prefix('{')
            .and_then(|rest| rest.rsplit_once('}'))
        {
            let names = inside.split(',').filter_map(|label| label.split_once('='));
            labels.extend(names.map(|(name, _)| name.to_owned()));
        }
    }
    found
}

/// What the server below is configured with: only its gRPC port speaks TLS, for the test to read
/// the others.
const CONFIG: &str = "[tls]\nhttp = false\nmetrics = false\n\n[isolation]\ndefault = \"process\"\n";

const TOKENS: &str = r#"
[[token]]
name = "all"
token = "all-0123456789abcdef"
scopes = ["inference", "management", "metrics"]

[[token]]
name = "poor"
token = "poor-0123456789abcdef"
scopes = ["inference"]
quota = { bytes_in_flight = "1B" }
"#;

const ALL: &str = "all-0123456789abcdef";
const POOR: &str = "poor-0123456789abcdef";

/// The page of metrics of a server that uses whatever has metrics of its own: TLS, tokens, quotas,
/// processes for models and a remote repository.
async fn everything_exported() -> Result<String> {
    let authority = Authority::new()?;
    let files = Files::new()?;
    files.put_pair(&authority, "server", 2050)?;
    files.put("tokens.toml", TOKENS)?;
    files.put("server.toml", CONFIG)?;
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository)
        .arg(files.flag("config", "server.toml"))
        .arg(files.flag("tls-cert", "tls.crt"))
        .arg(files.flag("tls-key", "tls.key"))
        .arg(files.flag("auth-tokens", "tokens.toml"))
        // Nobody is there.
        .arg("--model-repository=http://127.0.0.1:1/models")
        .arg("--repository-retries=0")
        .arg(files.flag("repository-cache", "cache"))
        .arg("--exit-on-error=false")
        .spawn()
        .await?;
    let client = Client::builder(format!("https://{}", server.grpc))
        .tls_ca(authority.pem.as_str())
        .token(ALL)
        .retry(RetryPolicy::NEVER)
        .connect_lazy()?;
    eventually("the model is there", || async {
        Ok(client.model_ready("simple", "").await.unwrap_or(false))
    })
    .await?;
    client.infer(rust_client::add_sub(2, 1)?).await?;
    let path = "/v2/models/simple/infer";
    let refused = http::call_as(server.http, "POST", path, POOR, b"{}").await?;
    ensure!(refused.status == 429, "{}", refused.text());
    // Told once a second.
    eventually("the memory of models is told", || async {
        let name = "dormouse_models_memory_bytes";
        Ok(server.metric_as(ALL, name, &[]).await? > 0.0)
    })
    .await?;
    server.metrics_text_as(ALL).await
}

#[tokio::test]
async fn dashboard_and_alerts_ask_for_what_is_exported() -> Result<()> {
    let exported = exported(&everything_exported().await?);
    for (place, query) in queries()? {
        let asked = read(&query).with_context(|| format!("{place}: {query}"))?;
        ensure!(
            !asked.metrics.is_empty(),
            "{place} asks for nothing: {query}"
        );
        let mut known: BTreeSet<&str> = OUTSIDE.into_iter().collect();
        for (metric, labels) in &asked.metrics {
            if NOT_OURS.contains(&metric.as_str()) {
                continue;
            }
            let found = exported
                .get(metric)
                .with_context(|| format!("{place}: nothing exports {metric}: {query}"))?;
            known.extend(found.iter().map(String::as_str));
            for label in labels {
                let known = found.contains(label) || OUTSIDE.contains(&label.as_str());
                ensure!(known, "{place}: {metric} has no label {label}: {query}");
            }
        }
        for label in &asked.grouped {
            ensure!(
                known.contains(label.as_str()),
                "{place}: no {label} in {query}"
            );
        }
    }
    Ok(())
}

/// By Prometheus itself, where its tool is installed: `apt-get install prometheus`.
#[test]
fn alerts_are_rules_that_prometheus_takes_and_fire_when_they_should() -> Result<()> {
    let rules = configs().join("prometheus/dormouse.rules.yml");
    if Command::new("promtool").arg("--version").output().is_err() {
        eprintln!("SKIPPED: the alerts were not tried: promtool is missing");
        return Ok(());
    }
    let mut check = Command::new("promtool");
    succeed(
        check.args(["check", "rules"]).arg(&rules),
        "the alerts are wrong",
    )?;
    // The cases name the file of rules beside them.
    let folder = tempfile::tempdir()?;
    fs::copy(&rules, folder.path().join("dormouse.rules.yml"))?;
    let cases = folder.path().join("alerts.yml");
    fs::copy(script("alerts.yml"), &cases)?;
    let mut check = Command::new("promtool");
    succeed(
        check.args(["test", "rules"]).arg(&cases),
        "an alert is silent or cries wolf",
    )?;
    Ok(())
}

#[test]
fn queries_are_read_well_enough_to_find_what_is_wrong() -> Result<()> {
    let asked = read(
        r#"histogram_quantile(0.99, sum by (le, model) (rate(a_bucket{x=~"$y",phase="p"}[5m]))) / clamp_min(b, 1e-9) > 2"#,
    )?;
    let metrics: Vec<_> = asked.metrics.keys().map(String::as_str).collect();
    ensure!(metrics == ["a_bucket", "b"], "{metrics:?}");
    ensure!(asked.metrics["a_bucket"].contains("phase"));
    ensure!(asked.metrics["a_bucket"].contains("x"));
    ensure!(asked.grouped.contains("model"));
    Ok(())
}
