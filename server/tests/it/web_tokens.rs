//! JSON web tokens, from outside: what they open, which are refused, and keys that change.

use std::time::SystemTime;

use anyhow::{Context, Result, anyhow, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use dormouse_client::{Client, ClientError, Code, RetryPolicy};
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::authority::Files;
use crate::http;
use crate::repository::{Model, TestRepository};
use crate::rust_client::add_sub;
use crate::server::{TestServer, eventually};

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
    let infer = http::call_as(server.http, "POST", INFER, token, body.as_bytes()).await?;
    let load = http::call_as(server.http, "POST", LOAD, token, b"{}").await?;
    let client = Client::builder(server.grpc.to_string()).token(token);
    let client = client.retry(RetryPolicy::NEVER).connect_lazy()?;
    let code = |error: Option<ClientError>| match error {
        None => Ok(Code::Ok),
        Some(error) => error.code().with_context(|| error.to_string()),
    };
    Ok(Served {
        infer: (
            infer.status,
            code(client.infer(add_sub(1, 1)?).await.err())?,
        ),
        load: (load.status, code(client.load("simple").await.err())?),
    })
}

const REFUSED: (u16, Code) = (401, Code::Unauthenticated);
const DENIED: (u16, Code) = (403, Code::PermissionDenied);
const GRANTED: (u16, Code) = (200, Code::Ok);

async fn start(
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
    let mut server = start(&files, &repository, &issuer).await?;
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
    let mut server = start(&files, &repository, &issuer).await?;
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
        let answer = http::call_as(server.http, "GET", "/v2", &token, b"").await?;
        let said = answer.error()?;
        ensure!(said.contains(told), "{said}, not {told}");
        let challenge = answer.header("www-authenticate").context("no challenge")?;
        ensure!(challenge.contains("invalid_token"), "{challenge}");
    }
    let metrics = issuer.token("EdDSA", |claims| claims["scope"] = json!("metrics"))?;
    let labels = [r#"reason="invalid""#];
    let invalid = server
        .metric_as(&metrics, "dormouse_auth_refusals_total", &labels)
        .await?;
    ensure!(invalid == (tried * 5) as f64, "{invalid} of {tried}");
    server.assert_healthy().await
}

#[tokio::test]
async fn web_tokens_are_checked_with_the_keys_that_are_there_now() -> Result<()> {
    let (first, second) = (TokenIssuer::new()?, TokenIssuer::new()?);
    let (files, repository) = (Files::new()?, TestRepository::new()?);
    let mut server = start(&files, &repository, &first).await?;
    let status = async |token: &str| -> Result<u16> {
        let answer = http::call_as(server.http, "GET", "/v2", token, b"").await?;
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
        let labels = [r#"what="jwt_keys""#, &format!("result=\"{result}\"")];
        server
            .metric_as(&after, "dormouse_credential_reloads_total", &labels)
            .await
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
