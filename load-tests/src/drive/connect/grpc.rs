//! A server over gRPC.

use anyhow::{Context, Result};
use dormouse_client::{Client, ClientError, Code, InferRequest, InferResponse, RetryPolicy};

use super::{Call, Failure, IndexLine, InputSpec};
use crate::drive::outcome::ServerIdentity;
use crate::drive::target::Target;

/// A few connections to one server.
#[derive(Debug)]
pub(super) struct GrpcServer {
    clients: Vec<Client>,
}

impl GrpcServer {
    pub(super) async fn connect(
        target: &Target,
        connections: usize,
    ) -> Result<(Self, ServerIdentity)> {
        let mut clients = Vec::with_capacity(connections);
        for _ in 0..connections {
            let scheme = if target.is_encrypted() {
                "https"
            } else {
                "http"
            };
            let mut builder = Client::builder(format!("{scheme}://{}", target.authority()?))
                // An error has to be seen, and a call that is sent twice would be measured as one.
                .retry(RetryPolicy::NEVER)
                .no_default_deadline();
            for (name, value) in &target.headers {
                builder = builder.metadata(name, value);
            }
            if let Some(token) = &target.token {
                builder = builder.token(token.expose());
            }
            if let Some(path) = &target.tls_ca {
                let pem = std::fs::read(path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                builder = builder.tls_ca(pem);
            }
            clients.push(builder.connect().await?);
        }
        let server = Self { clients };
        let told = server.client(0).server_metadata().await?;
        let identity = ServerIdentity {
            name: told.name,
            version: told.version,
            extensions: told.extensions,
            data: "binary".to_owned(),
        };
        Ok((server, identity))
    }

    fn client(&self, slot: usize) -> &Client {
        &self.clients[slot % self.clients.len()]
    }

    pub(super) async fn inputs(&self, model: &str, version: &str) -> Result<Vec<InputSpec>> {
        let told = self.client(0).model_metadata(model, version).await?;
        let inputs = told.inputs.into_iter().map(|input| InputSpec {
            name: input.name,
            datatype: input.datatype,
            shape: input.shape,
        });
        Ok(inputs.collect())
    }

    pub(super) async fn infer(
        &self,
        request: &InferRequest,
        slot: usize,
    ) -> Result<InferResponse, Failure> {
        let answer = self.client(slot).infer(request.clone()).await;
        answer.map_err(|error| failure(&error))
    }

    pub(super) async fn index(&self) -> Result<Vec<IndexLine>> {
        let lines = self.client(0).repository_index(false).await?;
        let lines = lines.into_iter().map(|entry| IndexLine {
            model: entry.name,
            state: entry.state.to_string(),
            reason: entry.reason,
        });
        Ok(lines.collect())
    }

    pub(super) async fn is_ready(&self, model: &str) -> Result<bool> {
        match self.client(0).model_ready(model, "").await {
            Ok(ready) => Ok(ready),
            // Some servers do not know a model any more once it is unloaded.
            Err(error) if error.code() == Some(Code::NotFound) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) async fn load(&self, model: &str) -> Result<()> {
        Ok(self.client(0).load(model).await?)
    }

    pub(super) async fn unload(&self, model: &str) -> Result<()> {
        Ok(self.client(0).unload(model).await?)
    }
}

pub(super) fn prepare(call: &Call) -> InferRequest {
    let mut request = InferRequest::new(&call.model).version(&call.version);
    for (name, tensor) in &call.inputs {
        request = request.input(name, tensor.clone());
    }
    match call.deadline {
        Some(deadline) => request.deadline(deadline),
        None => request,
    }
}

fn failure(error: &ClientError) -> Failure {
    let kind = match error {
        ClientError::Connect { .. } => "connection".to_owned(),
        other => other.code().map_or_else(|| "protocol".to_owned(), name),
    };
    Failure::new(kind, error.to_string())
}

/// A code as the protocol writes it.
fn name(code: Code) -> String {
    let mut name = String::new();
    for character in format!("{code:?}").chars() {
        if character.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(character.to_ascii_uppercase());
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_named_as_the_protocol_names_them() {
        assert_eq!(name(Code::DeadlineExceeded), "DEADLINE_EXCEEDED");
        assert_eq!(name(Code::Internal), "INTERNAL");
    }
}
