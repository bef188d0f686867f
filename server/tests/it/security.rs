//! Who may do what, from outside: every route on every port, TLS, certificates that change.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use dormouse_client::{Client, ClientError, Code, RetryPolicy};
use dormouse_server::frontend::listed::{Listed, every_route};
use dormouse_server::guard::{Listener, Need};
use http_body_util::Full;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::net::TcpStream;

use crate::authority::{Authority, Files};
use crate::foreign::{TRITON, prepare, script};
use crate::http;
use crate::python::succeed;
use crate::repository::{Model, TestRepository};
use crate::rust_client;
use crate::server::{TestServer, dormouse, eventually, patiently};

const TOKENS: &str = r#"
[[token]]
name = "all"
token = "all-0123456789abcdef"
scopes = ["inference", "management", "metrics"]

[[token]]
name = "none"
token = "none-0123456789abcdef"
scopes = []

[[token]]
name = "no-inference"
token = "no-inference-0123456789"
scopes = ["management", "metrics"]

[[token]]
name = "no-management"
token = "no-management-0123456789"
scopes = ["inference", "metrics"]

[[token]]
name = "no-metrics"
token = "no-metrics-0123456789"
scopes = ["inference", "management"]
"#;

/// A token that is good for everything but this; none where no token is needed.
fn wrong_token(need: Need) -> Option<&'static str> {
    match need {
        Need::Probe | Need::Page | Need::Unknown => None,
        Need::Metadata => Some("none-0123456789abcdef"),
        Need::Inference | Need::InferenceStream | Need::SharedMemory => {
            Some("no-inference-0123456789")
        }
        Need::Management | Need::Load => Some("no-management-0123456789"),
        Need::Metrics => Some("no-metrics-0123456789"),
    }
}

/// The status of an HTTP request, and whether a refusal was well formed.
async fn plain(address: SocketAddr, route: &Listed, token: Option<&str>) -> Result<u16> {
    let path: String = route.path.replace(['{', '}'], "");
    let value = token.map(http::bearer);
    let headers: Vec<_> = value.iter().map(|it| ("authorization", &**it)).collect();
    let answer = http::call(address, route.method, &path, &headers, b"{}").await?;
    if answer.status == 401 {
        let challenge = answer.header("www-authenticate").context("no challenge")?;
        ensure!(challenge.starts_with("Bearer "), "{challenge}");
    }
    if matches!(answer.status, 401 | 403) {
        answer.error()?;
    }
    Ok(answer.status)
}

/// The status of a gRPC call with an empty message; 0 when it is answered without one.
async fn call(address: SocketAddr, path: &str, token: Option<&str>) -> Result<i32> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let mut request = ::http::Request::post(format!("http://{address}{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    if let Some(token) = token {
        request = request.header("authorization", http::bearer(token));
    }
    let request = request.body(Full::new(Bytes::from_static(&[0; 5])))?;
    let response = patiently("headers of an answer", sender.send_request(request)).await??;
    let status = response.headers().get("grpc-status");
    let status = status.map_or(Ok(0), |status| {
        status.to_str()?.parse().map_err(anyhow::Error::from)
    });
    drop(response);
    connection.abort();
    status
}

fn management_address(server: &TestServer) -> Result<SocketAddr> {
    let records = server.log.records();
    let listening = records
        .iter()
        .find(|record| record["protocol"] == "management");
    let address = listening.and_then(|record| record["address"].as_str());
    Ok(address
        .context("no management listener in the log")?
        .parse()?)
}

#[tokio::test]
async fn every_route_of_every_port_is_closed_without_a_token_of_the_right_scope() -> Result<()> {
    let files = Files::new()?;
    files.put("tokens.toml", TOKENS)?;
    let repository = TestRepository::new()?;
    let mut server = TestServer::over(&repository)
        .arg(files.flag("auth-tokens", "tokens.toml"))
        .arg("--management-port=0")
        .start()
        .await?;
    let own = management_address(&server)?;
    const UNAUTHENTICATED: i32 = Code::Unauthenticated as i32;
    const DENIED: i32 = Code::PermissionDenied as i32;
    let mut asked = BTreeMap::new();
    for route in every_route() {
        let ports = match route.listener {
            Listener::Http => vec![server.http, own],
            Listener::Grpc => vec![server.grpc, own],
            Listener::Metrics => vec![server.metrics],
            Listener::Management => vec![own],
        };
        for port in ports {
            *asked.entry(port).or_insert(0) += 1;
            let wrong = wrong_token(route.need);
            let seen = if route.listener == Listener::Grpc {
                let without = call(port, &route.path, None).await?;
                let unknown = call(port, &route.path, Some("unknown-0123456789")).await?;
                match wrong {
                    None => ensure!(without == 0, "{port} {route:?}: {without}"),
                    Some(wrong) => {
                        let denied = call(port, &route.path, Some(wrong)).await?;
                        ensure!(
                            (without, unknown, denied)
                                == (UNAUTHENTICATED, UNAUTHENTICATED, DENIED),
                            "{port} {route:?}: {without} {unknown} {denied}"
                        );
                    }
                }
                without
            } else {
                let without = plain(port, &route, None).await?;
                let unknown = plain(port, &route, Some("unknown-0123456789")).await?;
                match wrong {
                    // The page has no file of that name.
                    None if route.path.starts_with("/page/") => ensure!(without == 404),
                    None => ensure!(without == 200, "{port} {route:?}: {without}"),
                    Some(wrong) => {
                        let denied = plain(port, &route, Some(wrong)).await?;
                        ensure!(
                            (without, unknown, denied) == (401, 401, 403),
                            "{port} {route:?}: {without} {unknown} {denied}"
                        );
                    }
                }
                // Other methods are no way around.
                for method in ["DELETE", "PUT", "PATCH", "OPTIONS", "TRACE"] {
                    let other = Listed {
                        method,
                        ..route.clone()
                    };
                    let status = plain(port, &other, None).await?;
                    let expected = if wrong.is_none() { 405 } else { 401 };
                    ensure!(status == expected, "{port} {other:?}: {status}");
                }
                i32::from(without)
            };
            ensure!(wrong.is_some() || seen != UNAUTHENTICATED, "{route:?}");
        }
    }
    ensure!(
        asked.len() == 4 && asked.values().sum::<i32>() > 100,
        "{asked:?}"
    );
    server.assert_healthy().await
}

#[tokio::test]
async fn other_spellings_are_no_way_around() -> Result<()> {
    let files = Files::new()?;
    files.put("tokens.toml", TOKENS)?;
    let repository = TestRepository::new()?;
    let server = TestServer::over(&repository)
        .arg(files.flag("auth-tokens", "tokens.toml"))
        .start()
        .await?;
    for path in [
        "//v2",
        "/V2",
        "/v2/",
        "/v2//models/m/infer",
        "/v2/health/live/",
        "/v2/health/live/../../repository/models/m/load",
        "/v2/health/%6cive",
        "/v2/health/live%2f..%2f..%2frepository%2findex",
        "/v2/repository/models/m/load/",
        "/v2/models/m/versions/x/infer",
        "/metrics",
        "*",
    ] {
        let answer = http::call(server.http, "POST", path, &[], b"{}").await?;
        ensure!(answer.status == 401, "{path}: {}", answer.status);
    }
    for path in ["/", "/v2", "/metrics/", "/v2/health/live"] {
        let answer = http::call(server.metrics, "GET", path, &[], b"").await?;
        ensure!(answer.status == 401, "{path}: {}", answer.status);
    }
    for path in [
        "/a.B/C",
        "/inference.GRPCInferenceService/",
        "/inference.grpcinferenceservice/ModelInfer",
        "/inference.GRPCInferenceService/x/RepositoryModelUnload",
        "/inference.GRPCInferenceService//RepositoryModelLoad",
        "/inference.GRPCInferenceService/ServerLive/RepositoryModelUnload",
        "/inference.GRPCInferenceService/x/ModelMetadata",
        "/inference.GRPCInferenceService/LogSettings/",
        "/grpc.health.v1.Health/x/Check",
        "/externalscaler.ExternalScaler/x/GetMetrics",
    ] {
        let status = call(server.grpc, path, None).await?;
        ensure!(status == Code::Unauthenticated as i32, "{path}: {status}");
        let status = call(server.grpc, path, Some("none-0123456789abcdef")).await?;
        ensure!(status == Code::Unimplemented as i32, "{path}: {status}");
    }
    Ok(())
}

#[tokio::test]
async fn who_has_the_right_token_is_served_on_the_right_port() -> Result<()> {
    let files = Files::new()?;
    files.put("tokens.toml", TOKENS)?;
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository)
        .arg(files.flag("auth-tokens", "tokens.toml"))
        .arg("--model-control-mode=explicit")
        .arg("--management-port=0")
        .start()
        .await?;
    let own = management_address(&server)?;
    let client = |address: SocketAddr, token: &str| {
        Client::builder(address.to_string())
            .token(token)
            .retry(RetryPolicy::NEVER)
            .connect_lazy()
    };
    let all = "all-0123456789abcdef";
    let code = |result: Result<(), ClientError>| result.err().and_then(|error| error.code());
    let refused = code(client(server.grpc, all)?.load("simple").await);
    ensure!(refused == Some(Code::PermissionDenied), "{refused:?}");
    client(own, all)?.load("simple").await?;
    let only = "no-management-0123456789";
    client(server.grpc, only)?
        .infer(rust_client::add_sub(1, 1)?)
        .await?;
    let refused = client(own, all)?
        .infer(rust_client::add_sub(1, 1)?)
        .await
        .err();
    let refused = refused.and_then(|error| error.code());
    ensure!(refused == Some(Code::PermissionDenied), "{refused:?}");
    // A token that is taken out of the file is refused soon after.
    files.put(
        "tokens.toml",
        &TOKENS.replace(only, "other-0123456789abcdef"),
    )?;
    eventually("the token is gone", || async {
        let refused = client(server.grpc, only)?
            .infer(rust_client::add_sub(1, 1)?)
            .await
            .err();
        Ok(refused.and_then(|error| error.code()) == Some(Code::Unauthenticated))
    })
    .await?;
    let log = server.log.lines().join("\n");
    ensure!(!log.contains("0123456789"), "a token is in the log: {log}");
    Ok(())
}

/// A client of a server that speaks TLS.
fn secured(address: SocketAddr, authority: &Authority) -> Result<Client> {
    let builder = Client::builder(format!("https://{address}"));
    let builder = builder.tls_ca(authority.pem.as_str());
    Ok(builder.retry(RetryPolicy::NEVER).connect_lazy()?)
}

#[tokio::test]
async fn certificates_are_replaced_while_serving_and_bad_ones_are_not_taken() -> Result<()> {
    let (first, second) = (Authority::new()?, Authority::new()?);
    let files = Files::new()?;
    files.put_pair(&first, "first", 2050)?;
    // The page of metrics stays plain, for the test to read.
    files.put("server.toml", "[tls]\nmetrics = false\n")?;
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository)
        .arg(files.flag("config", "server.toml"))
        .arg(files.flag("tls-cert", "tls.crt"))
        .arg(files.flag("tls-key", "tls.key"))
        .spawn()
        .await?;
    let open = secured(server.grpc, &first)?;
    eventually("the server answers over TLS", || async {
        Ok(open.ready().await.unwrap_or(false))
    })
    .await?;
    ensure!(secured(server.grpc, &second)?.live().await.is_err());
    let plain = Client::builder(server.grpc.to_string()).retry(RetryPolicy::NEVER);
    let plain = plain.connect_lazy()?;
    ensure!(plain.live().await.is_err(), "served without TLS");
    const EXPIRY: &str = "dormouse_tls_certificate_expiry_timestamp_seconds";
    let ends = server.metric(EXPIRY, &[]).await?;
    ensure!(ends == 2_556_057_600.0, "{ends}");

    files.put_pair(&second, "second", 2051)?;
    eventually("the new certificate is presented", || async {
        Ok(secured(server.grpc, &second)?.live().await.unwrap_or(false))
    })
    .await?;
    ensure!(server.metric(EXPIRY, &[]).await? > ends);
    ensure!(open.live().await?, "an open connection was cut");

    const RELOADS: &str = "dormouse_credential_reloads_total";
    let failed = ["what=\"certificate\"", "result=\"failed\""];
    // The pair is not replaced at once: it may have been looked at in between.
    let before = server.metric(RELOADS, &failed).await?;
    files.put("tls.crt", "-----BEGIN CERTIFICATE-----\n")?;
    eventually("the broken file is noticed", || async {
        Ok(server.metric(RELOADS, &failed).await? > before)
    })
    .await?;
    ensure!(secured(server.grpc, &second)?.live().await?);

    // Our own commands, by the environment.
    let mut command = tokio::process::Command::from(dormouse());
    command
        .args(["models", "--url", &format!("https://{}", server.grpc)])
        .env("DORMOUSE_TLS_CA", files.path("ca.crt"));
    let output = patiently("the command ends", command.output()).await??;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success() && said.contains("simple"),
        "{output:?}"
    );
    Ok(())
}

#[tokio::test]
async fn clients_without_a_certificate_are_not_let_in_where_one_is_required() -> Result<()> {
    let authority = Authority::new()?;
    let files = Files::new()?;
    files.put_pair(&authority, "server", 2050)?;
    files.put("server.toml", "[tls]\nhttp = false\nmetrics = false\n")?;
    let repository = TestRepository::new()?;
    let server = TestServer::over(&repository)
        .arg(files.flag("config", "server.toml"))
        .arg(files.flag("tls-cert", "tls.crt"))
        .arg(files.flag("tls-key", "tls.key"))
        .arg(files.flag("tls-client-ca", "ca.crt"))
        .arg("--model-control-mode=explicit")
        .start()
        .await?;
    let stranger = secured(server.grpc, &authority)?;
    ensure!(stranger.live().await.is_err());
    let (certificate, key) = authority.sign("somebody", 2050)?;
    let known = Client::builder(format!("https://{}", server.grpc))
        .tls_ca(authority.pem.as_str())
        .tls_identity(certificate, key)
        .retry(RetryPolicy::NEVER)
        .connect()
        .await?;
    known.server_metadata().await?;
    let refused = known.load("m").await.err().and_then(|error| error.code());
    ensure!(refused == Some(Code::PermissionDenied), "{refused:?}");
    // Without TLS nobody can show a certificate.
    ensure!(server.get("/v2").await?.status == 401);
    Ok(())
}

#[tokio::test]
async fn tritonclient_speaks_tls_and_sends_a_token() -> Result<()> {
    let authority = Authority::new()?;
    let files = Files::new()?;
    files.put_pair(&authority, "server", 2050)?;
    files.put("tokens.toml", TOKENS)?;
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository)
        .arg(files.flag("tls-cert", "tls.crt"))
        .arg(files.flag("tls-key", "tls.key"))
        .arg(files.flag("auth-tokens", "tokens.toml"))
        .spawn()
        .await?;
    let environment = prepare(TRITON).await?;
    let mut command = std::process::Command::new(environment.python());
    command
        .arg(script("triton_secure.py"))
        .arg(format!("--grpc={}", server.grpc))
        .arg(format!("--http={}", server.http))
        .arg(files.flag("ca", "ca.crt"))
        .arg("--token=no-management-0123456789")
        .env("PYTHONDONTWRITEBYTECODE", "1");
    let run = move || succeed(&mut command, "a check of the script failed");
    let output = tokio::task::spawn_blocking(run).await??;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        said.contains("ok grpc") && said.contains("ok http"),
        "{said}"
    );
    Ok(())
}

#[tokio::test]
async fn errors_name_no_directory_of_the_server() -> Result<()> {
    let repository = TestRepository::new()?;
    for file in [
        "corrupt",
        "empty",
        "custom_op",
        "external",
        "external_parent",
        "external_absolute",
        "external_proc",
        "external_length",
    ] {
        repository.add(file, Model::new(file))?;
    }
    std::fs::remove_file(repository.model_dir("external").join("1/weights.bin")).ok();
    std::fs::create_dir_all(repository.model_dir("bare"))?;
    let server = TestServer::over(&repository)
        .arg("--model-control-mode=explicit")
        .start()
        .await?;
    let mut said = Vec::new();
    for name in [
        "corrupt",
        "empty",
        "custom_op",
        "external",
        "external_parent",
        "external_absolute",
        "external_proc",
        "external_length",
        "bare",
        "missing",
    ] {
        let path = format!("/v2/repository/models/{name}/load");
        let answer = server.post(&path, b"{}").await?;
        said.push(answer.text());
        let path = format!("/v2/models/{name}/config");
        said.push(server.get(&path).await?.text());
    }
    said.push(server.post("/v2/repository/index", b"{}").await?.text());
    said.push(server.get("/v2/models/stats").await?.text());
    let cache = crate::server::target_dir().display().to_string();
    for text in &said {
        for path in [&repository.path().display().to_string(), &cache] {
            ensure!(!text.contains(path.as_str()), "{path} is in: {text}");
        }
    }
    ensure!(said.iter().any(|text| text.contains("corrupt")));
    Ok(())
}

#[tokio::test]
async fn an_address_that_others_reach_needs_the_flag_that_the_error_names() -> Result<()> {
    let repository = TestRepository::new()?;
    let mut command = tokio::process::Command::from(dormouse());
    command
        .args(["serve", "--http-address=0.0.0.0", "--model-repository"])
        .arg(repository.path());
    let output = patiently("the command ends", command.output()).await??;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        !output.status.success() && said.contains("--allow-unauthenticated"),
        "{said}"
    );
    Ok(())
}

#[tokio::test]
async fn the_health_of_a_guarded_server_is_told_without_a_token() -> Result<()> {
    let files = Files::new()?;
    files.put("tokens.toml", TOKENS)?;
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository)
        .arg(files.flag("auth-tokens", "tokens.toml"))
        .start()
        .await?;
    // As the image's health check asks.
    for (model, is_good) in [(None, true), (Some("simple"), false)] {
        let mut command = tokio::process::Command::from(dormouse());
        command.args(["health", "--format=json", "--url"]);
        command.arg(server.grpc.to_string()).args(model);
        let output = patiently("the command ends", command.output()).await??;
        let said: Value = serde_json::from_slice(&output.stdout)?;
        ensure!(output.status.success() == is_good, "{said}");
        ensure!(said["ready"] == true && said["version"].is_null(), "{said}");
    }
    Ok(())
}

#[tokio::test]
async fn a_token_of_the_environment_is_not_shown_by_help() -> Result<()> {
    let mut command = tokio::process::Command::from(dormouse());
    command
        .args(["models", "--help"])
        .env("DORMOUSE_TOKEN", "t0ps3cret");
    let output = patiently("the command ends", command.output()).await??;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        said.contains("DORMOUSE_TOKEN") && !said.contains("t0ps3cret"),
        "{said}"
    );
    Ok(())
}

#[test]
fn the_documented_tables_are_those_that_requests_are_served_by() -> Result<()> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/security.md");
    let page = std::fs::read_to_string(path)?;
    for (listener, heading) in [
        (Listener::Http, "### HTTP\n\n"),
        (Listener::Grpc, "### gRPC\n\n"),
        (Listener::Metrics, "### Metrics\n\n"),
    ] {
        let (_, rest) = page.split_once(heading).context(heading)?;
        let shown = rest.split("\n\n").next().unwrap_or_default();
        let mut expected = "| | | needs |\n|---|---|---|".to_owned();
        for route in every_route() {
            if route.listener == listener {
                let line = format!(
                    "\n| {} | `{}` | {} |",
                    route.method,
                    route.path,
                    route.need.describe()
                );
                expected.push_str(&line);
            }
        }
        ensure!(
            shown == expected,
            "below {heading} there should be:\n{expected}\n"
        );
    }
    Ok(())
}
