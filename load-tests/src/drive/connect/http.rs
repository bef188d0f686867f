//! A server over HTTP/1.1, on connections that are kept for the next request.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use dormouse_client::{ColdStart, Tensor};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use http::{HeaderMap, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::TcpStream;

use super::encrypted::{Stream, Tls};
use super::{Call, Failure, IndexLine, InputSpec, json};
use crate::drive::outcome::ServerIdentity;
use crate::drive::target::{DataForm, Target};

/// What the binary tensor extension is called in a server's metadata.
const BINARY: &str = "binary_tensor_data";
const HEADER_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// The longest answer that is read.
const LONGEST_ANSWER: usize = 1 << 30;
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);

type Sender = SendRequest<Full<Bytes>>;

/// One server and the connections to it that nobody uses now.
#[derive(Debug)]
pub(super) struct HttpServer {
    authority: String,
    headers: HeaderMap,
    binary: bool,
    idle: Mutex<Vec<Sender>>,
    tls: Option<Tls>,
}

/// A request whose body is written already.
#[derive(Clone, Debug)]
pub(crate) struct HttpRequest {
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
    deadline: Option<Duration>,
}

/// An answer whose body is not looked into yet.
#[derive(Debug)]
pub(crate) struct HttpAnswer {
    header_length: Option<usize>,
    body: Bytes,
    pub(super) cold: Option<ColdStart>,
}

/// An answer of any kind.
struct Raw {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

#[derive(Deserialize)]
struct ServerDocument {
    #[serde(default)]
    name: String,
    #[serde(default)]
    version: String,
    #[serde(default)]
    extensions: Vec<String>,
}

#[derive(Deserialize)]
struct ModelDocument {
    inputs: Option<Vec<TensorDocument>>,
}

#[derive(Deserialize)]
struct TensorDocument {
    name: String,
    datatype: String,
    #[serde(default)]
    shape: Vec<i64>,
}

#[derive(Deserialize)]
struct IndexDocument {
    name: String,
    state: Option<String>,
    reason: Option<String>,
}

impl HttpServer {
    pub(super) async fn connect(target: &Target) -> Result<(Self, ServerIdentity)> {
        let authority = target.authority()?.to_owned();
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_str(&authority)?);
        for (name, value) in &target.headers {
            let name = HeaderName::from_bytes(name.as_bytes())
                .with_context(|| format!("'{name}' is not the name of a header"))?;
            let value = HeaderValue::from_str(value)
                .with_context(|| format!("'{value}' is not the value of a header"))?;
            headers.append(name, value);
        }
        if let Some(token) = &target.token {
            let mut value = HeaderValue::from_str(&format!("Bearer {}", token.expose()))
                .context("the token is not the value of a header")?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let mut server = Self {
            tls: Tls::of(target)?,
            authority,
            headers,
            binary: false,
            idle: Mutex::default(),
        };
        let answer = server.get("/v2").await?;
        // The page is not needed to be driven, and some servers lack it.
        let document = match answer.status.is_success() {
            true => serde_json::from_slice(&answer.body).ok(),
            false => None,
        };
        let told = document.unwrap_or(ServerDocument {
            name: String::new(),
            version: String::new(),
            extensions: Vec::new(),
        });
        server.binary = match target.data {
            DataForm::Auto => told.extensions.iter().any(|extension| extension == BINARY),
            DataForm::Binary => true,
            DataForm::Json => false,
        };
        let identity = ServerIdentity {
            name: told.name,
            version: told.version,
            extensions: told.extensions,
            data: if server.binary { "binary" } else { "json" }.to_owned(),
        };
        Ok((server, identity))
    }

    pub(super) async fn inputs(&self, model: &str, version: &str) -> Result<Vec<InputSpec>> {
        let answer = self.get(&path(model, version)).await?;
        let document: ModelDocument = answer.document()?;
        let inputs = document.inputs.unwrap_or_default();
        let spec = |input: TensorDocument| {
            Ok(InputSpec {
                datatype: input.datatype.parse()?,
                name: input.name,
                shape: input.shape,
            })
        };
        inputs.into_iter().map(spec).collect()
    }

    pub(super) fn prepare(&self, call: &Call) -> Result<HttpRequest> {
        let uri = format!("{}/infer", path(&call.model, &call.version));
        let document = json::request(&call.inputs, call.deadline, self.binary)?;
        let mut headers = self.headers.clone();
        let kind = match document.header_length {
            Some(length) => {
                headers.insert(HEADER_LENGTH, HeaderValue::from(length));
                "application/octet-stream"
            }
            None => "application/json",
        };
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        Ok(HttpRequest {
            uri: uri
                .parse()
                .with_context(|| format!("'{}' does not fit into a URL", call.model))?,
            headers,
            body: document.body,
            deadline: call.deadline,
        })
    }

    pub(super) async fn infer(&self, request: &HttpRequest) -> Result<HttpAnswer, Failure> {
        let mut message = Request::new(Full::new(request.body.clone()));
        *message.method_mut() = Method::POST;
        *message.uri_mut() = request.uri.clone();
        *message.headers_mut() = request.headers.clone();
        let answer = match request.deadline {
            Some(deadline) => tokio::time::timeout(deadline, self.send(message))
                .await
                .map_err(|_| Failure::new("deadline", format!("no answer within {deadline:?}")))?,
            None => self.send(message).await,
        }?;
        if !answer.status.is_success() {
            return Err(Failure::new(
                answer.status.as_u16().to_string(),
                answer.words(),
            ));
        }
        let header_length = match answer.headers.get(HEADER_LENGTH) {
            None => None,
            Some(value) => {
                let length = value.to_str().ok().and_then(|text| text.parse().ok());
                Some(length.ok_or_else(|| {
                    Failure::new("protocol", "Inference-Header-Content-Length is no number")
                })?)
            }
        };
        let timings = answer.headers.get_all(SERVER_TIMING);
        let cold = timings
            .iter()
            .find_map(|value| ColdStart::parse(value.to_str().ok()?));
        Ok(HttpAnswer {
            header_length,
            body: answer.body,
            cold,
        })
    }

    pub(super) async fn index(&self) -> Result<Vec<IndexLine>> {
        let answer = self.post("/v2/repository/index").await?;
        let lines: Vec<IndexDocument> = answer.document()?;
        let lines = lines.into_iter().map(|line| IndexLine {
            model: line.name,
            state: line.state.unwrap_or_default(),
            reason: line.reason.unwrap_or_default(),
        });
        Ok(lines.collect())
    }

    pub(super) async fn is_ready(&self, model: &str) -> Result<bool> {
        let answer = self.get(&format!("{}/ready", path(model, ""))).await?;
        Ok(answer.status.is_success())
    }

    /// `load` or `unload`.
    pub(super) async fn control(&self, model: &str, verb: &str) -> Result<()> {
        let path = format!("/v2/repository/models/{model}/{verb}");
        let answer = self.post(&path).await?;
        ensure!(answer.status.is_success(), answer.complaint());
        Ok(())
    }

    async fn get(&self, path: &str) -> Result<Raw> {
        self.simple(Method::GET, path, Bytes::new()).await
    }

    async fn post(&self, path: &str) -> Result<Raw> {
        self.simple(Method::POST, path, Bytes::from_static(b"{}"))
            .await
    }

    async fn simple(&self, method: Method, path: &str, body: Bytes) -> Result<Raw> {
        let mut message = Request::new(Full::new(body));
        *message.method_mut() = method;
        *message.uri_mut() = path
            .parse()
            .with_context(|| format!("'{path}' does not fit into a URL"))?;
        *message.headers_mut() = self.headers.clone();
        message
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self.send(message).await {
            Ok(answer) => Ok(answer),
            Err(failure) => bail!("{path}: {}", failure.message),
        }
    }

    /// Sends on a connection that is there, else on a new one. Dropping the future closes it.
    async fn send(&self, message: Request<Full<Bytes>>) -> Result<Raw, Failure> {
        let broken = |error: &dyn std::error::Error| Failure::new("connection", chain(error));
        let mut sender = self.connection().await?;
        let response = match sender.try_send_request(message).await {
            Ok(response) => response,
            Err(mut error) => {
                // Closed by the server while it was idle: nothing of the request was sent.
                let Some(message) = error.take_message() else {
                    return Err(broken(&error.into_error()));
                };
                sender = self.fresh().await?;
                sender
                    .send_request(message)
                    .await
                    .map_err(|error| broken(&error))?
            }
        };
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, LONGEST_ANSWER)
            .collect()
            .await
            .map_err(|error| broken(&*error))?
            .to_bytes();
        if !sender.is_closed() {
            self.idle().push(sender);
        }
        Ok(Raw {
            status: parts.status,
            headers: parts.headers,
            body,
        })
    }

    async fn connection(&self) -> Result<Sender, Failure> {
        loop {
            let Some(mut sender) = self.idle().pop() else {
                return self.fresh().await;
            };
            if sender.ready().await.is_ok() {
                return Ok(sender);
            }
        }
    }

    async fn fresh(&self) -> Result<Sender, Failure> {
        let failed = |error: String| {
            Failure::new(
                "connection",
                format!("cannot connect to {}: {error}", self.authority),
            )
        };
        let connecting = async {
            let socket = TcpStream::connect(&*self.authority)
                .await
                .map_err(|error| failed(error.to_string()))?;
            let _ = socket.set_nodelay(true);
            let socket: Box<dyn Stream> = match &self.tls {
                None => Box::new(socket),
                Some(tls) => {
                    let encrypted = tls.connect(socket).await;
                    Box::new(encrypted.map_err(|error| failed(error.to_string()))?)
                }
            };
            handshake(TokioIo::new(socket))
                .await
                .map_err(|error| failed(chain(&error)))
        };
        let (sender, connection) = tokio::time::timeout(CONNECT_PATIENCE, connecting)
            .await
            .map_err(|_| failed("nobody answered within 10 s".to_owned()))??;
        // Ends with its sender.
        tokio::spawn(connection);
        Ok(sender)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Sender>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HttpAnswer {
    pub(super) fn outputs(&self) -> Result<Vec<(String, Tensor)>> {
        let length = self.header_length.unwrap_or(self.body.len());
        ensure!(
            length <= self.body.len(),
            "the answer ends within its JSON part"
        );
        json::decode(&self.body[..length], self.body.slice(length..), "outputs")
    }
}

impl Raw {
    fn document<T: serde::de::DeserializeOwned>(&self) -> Result<T> {
        ensure!(self.status.is_success(), self.complaint());
        serde_json::from_slice(&self.body).context("the answer is not what was expected")
    }

    /// The server's words.
    fn words(&self) -> String {
        #[derive(Deserialize)]
        struct Document {
            error: String,
        }
        match serde_json::from_slice::<Document>(&self.body) {
            Ok(document) => document.error,
            Err(_) => {
                let text = String::from_utf8_lossy(&self.body);
                text.chars().take(200).collect()
            }
        }
    }

    fn complaint(&self) -> anyhow::Error {
        anyhow::anyhow!("{}: {}", self.status, self.words())
    }
}

fn path(model: &str, version: &str) -> String {
    match version {
        "" => format!("/v2/models/{model}"),
        version => format!("/v2/models/{model}/versions/{version}"),
    }
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}
