//! Who may do what, from outside: every route on every port, TLS, certificates that change, quotas.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::SystemTime;

use anyhow::{Context, Result, anyhow, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use dormouse_client::{Client, ClientError, Code, RetryPolicy};
use dormouse_server::frontend::listed::{Listed, every_route};
use dormouse_server::guard::{Listener, Need};
use http_body_util::Full;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::authority::{Authority, Files};
use crate::deadlines::{ENDLESS, ONE_AT_A_TIME};
use crate::foreign::{TRITON, prepare, script};
use crate::http;
use crate::python::succeed;
use crate::repository::{Model, TestRepository};
use crate::server::{TestServer, dormouse, eventually, patiently};
use crate::wire::{self, add_sub};

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

fn bearer(token: &str) -> String {
    format!("Bearer {token}")
}

/// The status of an HTTP request, and whether a refusal was well formed.
async fn plain(address: SocketAddr, route: &Listed, token: Option<&str>) -> Result<u16> {
    let path: String = route.path.replace(['{', '}'], "");
    let value = token.map(bearer);
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
        request = request.header("authorization", bearer(token));
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
    let request = || {
        let tensor = dormouse_client::Tensor::from_slice([1, 16], &[1i32; 16])?;
        let request = dormouse_client::InferRequest::new("simple");
        anyhow::Ok(
            request
                .input("INPUT0", tensor.clone())
                .input("INPUT1", tensor),
        )
    };
    let only = "no-management-0123456789";
    client(server.grpc, only)?.infer(request()?).await?;
    let refused = client(own, all)?.infer(request()?).await.err();
    let refused = refused.and_then(|error| error.code());
    ensure!(refused == Some(Code::PermissionDenied), "{refused:?}");
    // A token that is taken out of the file is refused soon after.
    files.put(
        "tokens.toml",
        &TOKENS.replace(only, "other-0123456789abcdef"),
    )?;
    eventually("the token is gone", || async {
        let refused = client(server.grpc, only)?.infer(request()?).await.err();
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
async fn a_client_over_its_quota_is_told_when_to_come_again() -> Result<()> {
    let files = Files::new()?;
    let text = "[quotas]\nconcurrency = 1\nbytes_in_flight = \"1KiB\"\nloads_per_minute = 1\n";
    files.put("server.toml", text)?;
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    let server = TestServer::over(&repository)
        .arg(files.flag("config", "server.toml"))
        .arg("--model-control-mode=explicit")
        .start()
        .await?;
    let load = "/v2/repository/models/simple/load";
    let loaded = server.post(load, b"{}").await?;
    ensure!(loaded.status == 200, "{}", loaded.text());
    let refused = server.post(load, b"{}").await?;
    ensure!(refused.status == 429, "{}", refused.text());
    let wait: u64 = refused.header("retry-after").context("no hint")?.parse()?;
    ensure!((1..=60).contains(&wait), "{wait}");

    let client = server.grpc().await?;
    wire::infer(&client, add_sub("simple", 1, 2)).await?;
    let large = wire::Request::new("simple").input("INPUT0", &[64, 16], &[0i32; 1024]);
    let refused = wire::infer(&client, large)
        .await
        .err()
        .context("was served")?;
    ensure!(refused.code() == Code::ResourceExhausted, "{refused:?}");
    ensure!(refused.metadata().contains_key("grpc-retry-pushback-ms"));
    let large = server
        .post("/v2/models/simple/infer", &[b' '; 2048])
        .await?;
    ensure!(large.status == 429, "{}", large.text());
    wire::infer(&client, add_sub("simple", 1, 2)).await?;
    for (quota, count) in [("loads_per_minute", 1.0), ("bytes_in_flight", 2.0)] {
        let label = format!("quota=\"{quota}\"");
        let labels = [label.as_str(), "client=\"address\""];
        let counted = server
            .metric("dormouse_quota_refusals_total", &labels)
            .await?;
        ensure!(counted == count, "{quota}: {counted}");
    }
    // Probes and metrics are never turned away.
    ensure!(server.get("/v2/health/ready").await?.status == 200);
    Ok(())
}

/// Who makes JSON web tokens, by a key of each kind.
struct TokenIssuer {
    secret: [u8; 32],
    elliptic: EcdsaKeyPair,
    edwards: Ed25519KeyPair,
    random: SystemRandom,
}

const ALGORITHMS: [&str; 3] = ["HS256", "ES256", "EdDSA"];

fn base64url(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

impl TokenIssuer {
    fn new() -> Result<Self> {
        let random = SystemRandom::new();
        let lost = |_| anyhow!("no key could be made");
        let kind = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let elliptic = EcdsaKeyPair::generate_pkcs8(kind, &random).map_err(lost)?;
        let edwards = Ed25519KeyPair::generate_pkcs8(&random).map_err(lost)?;
        let secret: ring::rand::Random<[u8; 32]> = ring::rand::generate(&random).map_err(lost)?;
        Ok(Self {
            secret: secret.expose(),
            elliptic: EcdsaKeyPair::from_pkcs8(kind, elliptic.as_ref(), &random)?,
            edwards: Ed25519KeyPair::from_pkcs8(edwards.as_ref())?,
            random,
        })
    }

    /// The file that the server is given.
    fn keys(&self) -> String {
        let point = self.elliptic.public_key().as_ref();
        let (x, y) = (base64url(&point[1..33]), base64url(&point[33..]));
        json!({"keys": [
            {"kty": "oct", "kid": "HS256", "k": base64url(self.secret)},
            {"kty": "EC", "kid": "ES256", "crv": "P-256", "x": x, "y": y},
            {"kty": "OKP", "kid": "EdDSA", "crv": "Ed25519", "x": base64url(self.edwards.public_key())},
        ]})
        .to_string()
    }

    /// A token with this header, signed by the key of `algorithm` whatever the header says.
    fn sign(&self, algorithm: &str, header: &Value, claims: &Value) -> Result<String> {
        let header = base64url(header.to_string());
        let text = format!("{header}.{}", base64url(claims.to_string()));
        let signature = match algorithm {
            "HS256" => {
                let key = hmac::Key::new(hmac::HMAC_SHA256, &self.secret);
                hmac::sign(&key, text.as_bytes()).as_ref().to_vec()
            }
            "ES256" => {
                let signed = self.elliptic.sign(&self.random, text.as_bytes());
                signed.map_err(|_| anyhow!("not signed"))?.as_ref().to_vec()
            }
            "EdDSA" => self.edwards.sign(text.as_bytes()).as_ref().to_vec(),
            _ => Vec::new(),
        };
        Ok(format!("{text}.{}", base64url(signature)))
    }

    /// A token as it should be, but for what `change` does to its claims.
    fn token(&self, algorithm: &str, change: impl FnOnce(&mut Value)) -> Result<String> {
        let mut claims = json!({
            "sub": "alice", "aud": "dormouse", "iss": "https://issuer.example",
            "exp": unix_now()? + 3600, "scope": "openid inference",
        });
        change(&mut claims);
        let header = json!({"alg": algorithm, "kid": algorithm});
        self.sign(algorithm, &header, &claims)
    }
}

fn unix_now() -> Result<u64> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(since.as_secs())
}

fn sums() -> Result<dormouse_client::InferRequest> {
    let tensor = dormouse_client::Tensor::from_slice([1, 16], &[1i32; 16])?;
    let request = dormouse_client::InferRequest::new("simple");
    Ok(request
        .input("INPUT0", tensor.clone())
        .input("INPUT1", tensor))
}

/// An answer over HTTP to who shows this token.
async fn ask(
    address: SocketAddr,
    method: &str,
    path: &str,
    token: &str,
    body: &[u8],
) -> Result<http::Answer> {
    let value = bearer(token);
    http::call(address, method, path, &[("authorization", &value)], body).await
}

/// How both protocols answer one who runs a model and one who loads it: 200 or `Ok` when they do.
#[derive(Debug, PartialEq, Eq)]
struct Served {
    infer: (u16, Code),
    load: (u16, Code),
}

const LOAD: &str = "/v2/repository/models/simple/load";
const INFER: &str = "/v2/models/simple/infer";

async fn served(server: &TestServer, token: &str) -> Result<Served> {
    let tensor =
        |name| json!({"name": name, "datatype": "INT32", "shape": [1, 16], "data": vec![1; 16]});
    let body = json!({"inputs": [tensor("INPUT0"), tensor("INPUT1")]}).to_string();
    let infer = ask(server.http, "POST", INFER, token, body.as_bytes()).await?;
    let load = ask(server.http, "POST", LOAD, token, b"{}").await?;
    let client = Client::builder(server.grpc.to_string()).token(token);
    let client = client.retry(RetryPolicy::NEVER).connect_lazy()?;
    let code = |error: Option<ClientError>| match error {
        None => Ok(Code::Ok),
        Some(error) => error.code().with_context(|| error.to_string()),
    };
    Ok(Served {
        infer: (infer.status, code(client.infer(sums()?).await.err())?),
        load: (load.status, code(client.load("simple").await.err())?),
    })
}

const REFUSED: (u16, Code) = (401, Code::Unauthenticated);
const DENIED: (u16, Code) = (403, Code::PermissionDenied);
const GRANTED: (u16, Code) = (200, Code::Ok);

/// The sum of a metric that is told to who shows a token only.
async fn counted(server: &TestServer, token: &str, series: &str) -> Result<f64> {
    let answer = ask(server.metrics, "GET", "/metrics", token, b"").await?;
    ensure!(answer.status == 200, "{}", answer.text());
    let text = answer.text();
    let lines = text.lines().filter_map(|line| line.strip_prefix(series));
    let values = lines.filter_map(|rest| rest.rsplit_once(' ')?.1.parse::<f64>().ok());
    Ok(values.sum())
}

async fn start_with_web_tokens(
    files: &Files,
    repository: &TestRepository,
    issuer: &TokenIssuer,
) -> Result<TestServer> {
    files.put("jwks.json", &issuer.keys())?;
    repository.add("simple", Model::new("add_sub"))?;
    TestServer::over(repository)
        .arg(files.flag("auth-jwt-keys", "jwks.json"))
        .arg("--auth-jwt-audience=dormouse")
        .arg("--auth-jwt-issuer=https://issuer.example")
        .arg("--model-control-mode=explicit")
        .arg("--load-model=simple")
        .start()
        .await
}

#[tokio::test]
async fn web_tokens_open_what_their_scopes_say_and_nothing_else() -> Result<()> {
    let issuer = TokenIssuer::new()?;
    let (files, repository) = (Files::new()?, TestRepository::new()?);
    let mut server = start_with_web_tokens(&files, &repository, &issuer).await?;
    for algorithm in ALGORITHMS {
        let token = issuer.token(algorithm, |_| {})?;
        let found = served(&server, &token).await?;
        ensure!(
            (found.infer, found.load) == (GRANTED, DENIED),
            "{algorithm}: {found:?}"
        );
        let token = issuer.token(algorithm, |claims| {
            claims["scope"] = json!(["dormouse:management", "metrics"]);
            claims["aud"] = json!(["others", "dormouse"]);
        })?;
        let found = served(&server, &token).await?;
        ensure!(
            (found.infer, found.load) == (DENIED, GRANTED),
            "{algorithm}: {found:?}"
        );
        let token = issuer.token(algorithm, |claims| claims["scope"] = json!("openid"))?;
        let found = served(&server, &token).await?;
        ensure!(
            (found.infer, found.load) == (DENIED, DENIED),
            "{algorithm}: {found:?}"
        );
    }
    server.assert_healthy().await
}

#[tokio::test]
async fn web_tokens_that_are_not_good_are_refused_with_the_reason() -> Result<()> {
    let (issuer, stranger) = (TokenIssuer::new()?, TokenIssuer::new()?);
    let (files, repository) = (Files::new()?, TestRepository::new()?);
    let mut server = start_with_web_tokens(&files, &repository, &issuer).await?;
    let now = unix_now()?;
    let mut refused: Vec<(String, &str)> = Vec::new();
    for algorithm in ALGORITHMS {
        let with = |claim: &str, value: Value| {
            issuer.token(algorithm, |claims| claims[claim] = value.clone())
        };
        refused.push((with("exp", json!(now - 3600))?, "it has expired"));
        refused.push((with("exp", Value::Null)?, "not a signed JSON web token"));
        refused.push((with("nbf", json!(now + 3600))?, "it is not valid yet"));
        refused.push((with("aud", json!("others"))?, "another audience"));
        refused.push((
            with("iss", json!("https://else.example"))?,
            "another issuer",
        ));
        refused.push((stranger.token(algorithm, |_| {})?, "its signature is wrong"));
        // Nobody can change what was signed.
        let good = issuer.token(algorithm, |_| {})?;
        let more = issuer.token(algorithm, |claims| claims["scope"] = json!("management"))?;
        let mut parts: Vec<_> = good.split('.').collect();
        parts[1] = more.split('.').nth(1).context("claims")?;
        refused.push((parts.join("."), "its signature is wrong"));
    }
    let claims = json!({
        "aud": "dormouse", "iss": "https://issuer.example", "exp": now + 3600, "scope": "inference",
    });
    let no_key = "no key of this server's matches";
    for (signed_by, header, told) in [
        ("none", json!({"alg": "none"}), no_key),
        ("none", json!({"alg": "None", "kid": "HS256"}), no_key),
        ("none", json!({"alg": "HS256"}), "its signature is wrong"),
        ("HS256", json!({"alg": "HS256", "kid": "unknown"}), no_key),
        // The key says how a token is signed, not the token.
        ("HS256", json!({"alg": "HS256", "kid": "ES256"}), no_key),
        (
            "HS256",
            json!({"alg": "ES256", "kid": "ES256"}),
            "its signature is wrong",
        ),
        (
            "HS256",
            json!({"alg": "HS256", "crit": ["exp"]}),
            "not a signed JSON web token",
        ),
    ] {
        refused.push((issuer.sign(signed_by, &header, &claims)?, told));
    }
    // Signed with what everybody knows.
    let public = TokenIssuer {
        secret: issuer.edwards.public_key().as_ref().try_into()?,
        ..TokenIssuer::new()?
    };
    refused.push((public.token("HS256", |_| {})?, "its signature is wrong"));
    let tried = refused.len();
    for (token, told) in refused {
        let found = served(&server, &token).await?;
        ensure!(
            (found.infer, found.load) == (REFUSED, REFUSED),
            "{told}: {found:?}"
        );
        let answer = ask(server.http, "GET", "/v2", &token, b"").await?;
        let said = answer.error()?;
        ensure!(said.contains(told), "{said}, not {told}");
        let challenge = answer.header("www-authenticate").context("no challenge")?;
        ensure!(challenge.contains("invalid_token"), "{challenge}");
    }
    let metrics = issuer.token("EdDSA", |claims| claims["scope"] = json!("metrics"))?;
    let invalid = r#"dormouse_auth_refusals_total{reason="invalid"}"#;
    let invalid = counted(&server, &metrics, invalid).await?;
    ensure!(invalid == (tried * 5) as f64, "{invalid} of {tried}");
    server.assert_healthy().await
}

#[tokio::test]
async fn web_tokens_are_checked_with_the_keys_that_are_there_now() -> Result<()> {
    let (first, second) = (TokenIssuer::new()?, TokenIssuer::new()?);
    let (files, repository) = (Files::new()?, TestRepository::new()?);
    let mut server = start_with_web_tokens(&files, &repository, &first).await?;
    let status = async |token: &str| -> Result<u16> {
        let answer = ask(server.http, "GET", "/v2", token, b"").await?;
        Ok(answer.status)
    };
    let everything = |claims: &mut Value| claims["scope"] = json!("inference metrics");
    let (before, after) = (
        first.token("ES256", everything)?,
        second.token("ES256", everything)?,
    );
    ensure!((status(&before).await?, status(&after).await?) == (200, 401));
    files.put("jwks.json", &second.keys())?;
    eventually("the new keys are taken up", || async {
        Ok(status(&after).await? == 200)
    })
    .await?;
    ensure!(status(&before).await? == 401, "the old keys are still good");

    let reloads = async |result: &str| {
        let series = "dormouse_credential_reloads_total{what=\"jwt_keys\",result=";
        counted(&server, &after, &format!("{series}\"{result}\"")).await
    };
    files.put("jwks.json", "{\"keys\": []}")?;
    eventually("the useless file is noticed", || async {
        Ok(reloads("failed").await? >= 1.0)
    })
    .await?;
    ensure!(status(&after).await? == 200, "the keys in use were dropped");

    // The signal has files read that look the same.
    files.put("jwks.json", &second.keys())?;
    eventually("the good file is back", || async {
        Ok(reloads("ok").await? >= 2.0)
    })
    .await?;
    let pid = Pid::from_raw(server.pid().try_into()?).context("a process id is not zero")?;
    for times in 1..=2 {
        kill_process(pid, Signal::HUP)?;
        eventually("the keys are read again", || async {
            Ok(reloads("ok").await? >= 2.0 + f64::from(times))
        })
        .await?;
    }
    ensure!((status(&before).await?, status(&after).await?) == (401, 200));
    server.assert_healthy().await
}

#[tokio::test]
async fn a_client_with_all_its_requests_under_way_waits_and_others_do_not() -> Result<()> {
    let files = Files::new()?;
    let few = "[\"inference\", \"metrics\"]\nquota = { concurrency = 1 }\n";
    let entry = |name: &str| {
        format!("[[token]]\nname = \"{name}\"\ntoken = \"{name}-0123456789\"\nscopes = {few}")
    };
    files.put(
        "tokens.toml",
        &format!("{}{}", entry("team-a"), entry("team-b")),
    )?;
    let repository = TestRepository::new()?;
    repository.add("slow", Model::new("slow").config(ONE_AT_A_TIME))?;
    let mut server = TestServer::over(&repository)
        .arg(files.flag("auth-tokens", "tokens.toml"))
        .start()
        .await?;
    let (mine, others) = ("team-a-0123456789", "team-b-0123456789");
    let client = |token: &str| {
        Client::builder(server.grpc.to_string())
            .token(token)
            .retry(RetryPolicy::NEVER)
            .connect_lazy()
    };
    let run = |iterations: i64| {
        let tensor = dormouse_client::Tensor::from_slice([1], &[iterations])?;
        anyhow::Ok(dormouse_client::InferRequest::new("slow").input("ITERATIONS", tensor))
    };
    client(mine)?.infer(run(1)?).await?;
    let (busy, endless) = (client(mine)?, run(ENDLESS)?);
    let busy = tokio::spawn(async move { busy.infer(endless).await.is_ok() });
    eventually("the request is under way", || async {
        Ok(counted(&server, mine, "dormouse_request_bytes_in_flight").await? > 0.0)
    })
    .await?;
    let refused = ask(server.http, "GET", "/v2/models/slow", mine, b"").await?;
    ensure!(refused.status == 429, "{}", refused.text());
    ensure!(
        refused.error()?.contains("1 requests under way"),
        "{}",
        refused.text()
    );
    let wait: u64 = refused.header("retry-after").context("no hint")?.parse()?;
    ensure!(wait >= 1, "{wait}");
    let refused = client(mine)?.infer(run(1)?).await.err();
    let refused = refused.and_then(|error| error.code());
    ensure!(refused == Some(Code::ResourceExhausted), "{refused:?}");
    // Who has a quota of their own is not concerned, and neither are probes and metrics.
    let other = ask(server.http, "GET", "/v2/models/slow", others, b"").await?;
    ensure!(other.status == 200, "{}", other.text());
    ensure!(server.get("/v2/health/ready").await?.status == 200);
    let series = r#"dormouse_quota_refusals_total{quota="concurrency",client="team-a"}"#;
    let refusals = counted(&server, others, series).await?;
    ensure!(refusals == 2.0, "{refusals} refusals");
    busy.abort();
    eventually("what was given up counts no more", || async {
        let answer = ask(server.http, "GET", "/v2/models/slow", mine, b"").await?;
        Ok(answer.status == 200)
    })
    .await?;
    server.assert_healthy().await
}

/// An address of this machine by which others reach it, if it has one. Nothing is sent.
fn outside_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind(("0.0.0.0", 0)).ok()?;
    socket.connect(("192.0.2.1", 9)).ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

#[tokio::test]
async fn models_are_loaded_from_this_machine_only_unless_a_flag_says_otherwise() -> Result<()> {
    let Some(outside) = outside_address() else {
        eprintln!("SKIPPED: management from elsewhere: this machine has one address only");
        return Ok(());
    };
    let repository = TestRepository::new()?;
    repository.add("simple", Model::new("add_sub"))?;
    for is_allowed in [false, true] {
        let server = TestServer::over(&repository)
            .arg("--allow-unauthenticated")
            .arg(format!("--allow-remote-management={is_allowed}"))
            .arg("--model-control-mode=explicit")
            .under(["bash", "-c", "exec \"${@//127.0.0.1/0.0.0.0}\"", "bash"])
            .start()
            .await?;
        let from = |ip: IpAddr, listener: SocketAddr| SocketAddr::new(ip, listener.port());
        let home = IpAddr::from([127, 0, 0, 1]);
        for (ip, is_served) in [(home, true), (outside, is_allowed)] {
            let answer = http::call(from(ip, server.http), "POST", LOAD, &[], b"{}").await?;
            let client = Client::builder(from(ip, server.grpc).to_string());
            let client = client.retry(RetryPolicy::NEVER).connect_lazy()?;
            let told = client
                .load("simple")
                .await
                .err()
                .and_then(|error| error.code());
            if is_served {
                ensure!(
                    (answer.status, told) == (200, None),
                    "{told:?} {}",
                    answer.text()
                );
            } else {
                let denied = (answer.status, told) == (403, Some(Code::PermissionDenied));
                ensure!(denied, "{told:?} {}", answer.text());
                ensure!(answer.error()?.contains("--allow-remote-management"));
            }
            // Running models is for everybody here.
            client.infer(sums()?).await?;
        }
    }
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
