//! Speaking to a server: one surface over gRPC and HTTP.

mod encrypted;
mod grpc;
mod http;
mod json;

use std::time::Duration;

use anyhow::{Context, Result};
use dormouse_client::{ColdStart, DataType, InferRequest, InferResponse, Tensor};

use self::grpc::GrpcServer;
use self::http::{HttpAnswer, HttpRequest, HttpServer};
pub(crate) use self::json::{decode as tensors_from_json, header_tensors};
use super::outcome::ServerIdentity;
use super::target::{Protocol, Target};

/// How long anything but an inference may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a request says.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) model: String,
    pub(crate) version: String,
    pub(crate) inputs: Vec<(String, Tensor)>,
    /// What the server is told, and how long its client waits.
    pub(crate) deadline: Option<Duration>,
}

/// A request in the form it is sent in, made once and sent often.
#[derive(Clone, Debug)]
pub(crate) enum Prepared {
    Grpc(Box<InferRequest>),
    Http(Box<HttpRequest>),
}

/// What a server answered.
#[derive(Debug)]
pub(crate) enum Answer {
    Grpc(Box<InferResponse>),
    Http(HttpAnswer),
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// `UNAVAILABLE`, `503`, `connection`, `timeout`: what errors are counted by.
    pub(crate) kind: String,
    pub(crate) message: String,
}

/// One input or output as a server describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InputSpec {
    pub(crate) name: String,
    pub(crate) datatype: DataType,
    /// -1 where any size goes.
    pub(crate) shape: Vec<i64>,
}

/// What the repository says about a version of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IndexLine {
    pub(crate) model: String,
    pub(crate) state: String,
    pub(crate) reason: String,
}

/// A server that answers.
#[derive(Debug)]
pub(crate) struct Connected {
    server: Server,
    pub(crate) identity: ServerIdentity,
}

#[derive(Debug)]
enum Server {
    Grpc(GrpcServer),
    Http(HttpServer),
}

impl Failure {
    pub(crate) fn new(kind: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            kind: kind.into(),
            message: message.into(),
        }
    }
}

impl Connected {
    /// Connects and asks the server who it is.
    pub(crate) async fn open(target: &Target, connections: usize) -> Result<Self> {
        target.check_place().await?;
        let opening = async {
            match target.spoken()? {
                Protocol::Grpc => {
                    let (server, identity) = GrpcServer::connect(target, connections).await?;
                    Ok(Self {
                        server: Server::Grpc(server),
                        identity,
                    })
                }
                Protocol::Http => {
                    let (server, identity) = HttpServer::connect(target).await?;
                    Ok(Self {
                        server: Server::Http(server),
                        identity,
                    })
                }
            }
        };
        tokio::time::timeout(PATIENCE, opening)
            .await
            .with_context(|| format!("{} did not say who it is within 60 s", target.url))?
    }

    /// The inputs of a model, as the server describes them.
    pub(crate) async fn inputs(&self, model: &str, version: &str) -> Result<Vec<InputSpec>> {
        patiently(async {
            match &self.server {
                Server::Grpc(server) => server.inputs(model, version).await,
                Server::Http(server) => server.inputs(model, version).await,
            }
        })
        .await
        .with_context(|| format!("cannot read the signature of model '{model}'"))
    }

    /// Brings a request into the form it is sent in.
    pub(crate) fn prepare(&self, call: &Call) -> Result<Prepared> {
        match &self.server {
            Server::Grpc(_) => Ok(Prepared::Grpc(Box::new(grpc::prepare(call)))),
            Server::Http(server) => {
                let request = server.prepare(call)?;
                Ok(Prepared::Http(Box::new(request)))
            }
        }
    }

    /// Asks. `slot` chooses among gRPC connections. Dropping the future cancels the request.
    pub(crate) async fn infer(&self, request: &Prepared, slot: usize) -> Result<Answer, Failure> {
        match (&self.server, request) {
            (Server::Grpc(server), Prepared::Grpc(request)) => server
                .infer(request, slot)
                .await
                .map(|answer| Answer::Grpc(Box::new(answer))),
            (Server::Http(server), Prepared::Http(request)) => {
                server.infer(request).await.map(Answer::Http)
            }
            _ => Err(Failure::new(
                "protocol",
                "the request was prepared for the other protocol",
            )),
        }
    }

    /// The repository's index.
    pub(crate) async fn index(&self) -> Result<Vec<IndexLine>> {
        patiently(async {
            match &self.server {
                Server::Grpc(server) => server.index().await,
                Server::Http(server) => server.index().await,
            }
        })
        .await
        .context("cannot read the repository's index")
    }

    /// Whether a model says that it can answer.
    pub(crate) async fn is_ready(&self, model: &str) -> Result<bool> {
        patiently(async {
            match &self.server {
                Server::Grpc(server) => server.is_ready(model).await,
                Server::Http(server) => server.is_ready(model).await,
            }
        })
        .await
        .with_context(|| format!("cannot ask whether model '{model}' is ready"))
    }

    /// Loads a model through the repository's API. Large ones take their time.
    pub(crate) async fn load(&self, model: &str) -> Result<()> {
        match &self.server {
            Server::Grpc(server) => server.load(model).await,
            Server::Http(server) => server.control(model, "load").await,
        }
        .with_context(|| format!("cannot load model '{model}'"))
    }

    /// Unloads a model through the repository's API.
    pub(crate) async fn unload(&self, model: &str) -> Result<()> {
        patiently(async {
            match &self.server {
                Server::Grpc(server) => server.unload(model).await,
                Server::Http(server) => server.control(model, "unload").await,
            }
        })
        .await
        .with_context(|| format!("cannot unload model '{model}'"))
    }
}

impl Answer {
    /// What waking the model took, where the server tells.
    pub(crate) fn cold(&self) -> Option<&ColdStart> {
        match self {
            Self::Grpc(answer) => answer.timing(),
            Self::Http(answer) => answer.cold.as_ref(),
        }
    }

    /// The outputs by name.
    pub(crate) fn outputs(&self) -> Result<Vec<(String, Tensor)>> {
        match self {
            Self::Grpc(answer) => Ok(answer
                .outputs()
                .map(|(name, tensor)| (name.to_owned(), tensor.clone()))
                .collect()),
            Self::Http(answer) => answer.outputs(),
        }
    }
}

async fn patiently<T>(asking: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(PATIENCE, asking)
        .await
        .context("no answer within 60 s")?
}
