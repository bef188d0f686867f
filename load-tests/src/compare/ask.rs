//! Single requests to a server that may not listen yet: what first answers are timed with.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use dormouse_client::{Client, RetryPolicy, Tensor};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::group::Group;
use super::workload::Asked;
use crate::drive::target::Protocol;

const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// What a server may take until it answers.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);
const ONE_REQUEST: Duration = Duration::from_secs(60);
const LONGEST_ANSWER: usize = 1 << 28;
const HEADER_LENGTH: &str = "inference-header-content-length";

/// Where a server on this machine listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) protocol: Protocol,
    pub(crate) port: u16,
}

#[derive(Deserialize)]
struct AnswerDocument {
    outputs: Vec<OutputDocument>,
}

#[derive(Deserialize)]
struct OutputDocument {
    name: String,
    datatype: String,
    shape: Vec<i64>,
    parameters: OutputParameters,
}

#[derive(Deserialize)]
struct OutputParameters {
    binary_data_size: usize,
}

impl Place {
    /// `grpc://127.0.0.1:PORT` or the like.
    pub(crate) fn url(self) -> String {
        let scheme = match self.protocol {
            Protocol::Grpc => "grpc",
            Protocol::Http => "http",
        };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    /// One request on a connection of its own, for the model under the name `model`.
    pub(crate) async fn ask(self, asked: &Asked, model: &str) -> Result<Vec<(String, Tensor)>> {
        let asking = async {
            match self.protocol {
                Protocol::Grpc => self.ask_grpc(asked, model).await,
                Protocol::Http => self.ask_http(asked, model).await,
            }
        };
        tokio::time::timeout(ONE_REQUEST, asking)
            .await
            .with_context(|| format!("no answer within {ONE_REQUEST:?}"))?
    }

    async fn ask_grpc(self, asked: &Asked, model: &str) -> Result<Vec<(String, Tensor)>> {
        let client = Client::builder(format!("http://127.0.0.1:{}", self.port))
            .retry(RetryPolicy::NEVER)
            .connect()
            .await?;
        let answer = client.infer(asked.model.request(model)).await?;
        let outputs = answer.outputs();
        Ok(outputs
            .map(|(name, tensor)| (name.to_owned(), tensor.clone()))
            .collect())
    }

    async fn ask_http(self, asked: &Asked, model: &str) -> Result<Vec<(String, Tensor)>> {
        let (header, body) = encode(&asked.model.inputs)?;
        let request = http::Request::post(format!("/v2/models/{model}/infer"))
            .header("host", format!("127.0.0.1:{}", self.port))
            .header("content-type", "application/octet-stream")
            .header(HEADER_LENGTH, header)
            .body(Full::new(body))?;
        let (length, body) = send(self.port, request).await?;
        decode(length.context("the answer holds no binary tensors")?, &body)
    }
}

/// Whether a path answers 200.
pub(crate) async fn is_ready(port: u16, path: &str) -> bool {
    let request = http::Request::get(path)
        .header("host", format!("127.0.0.1:{port}"))
        .body(Full::new(Bytes::new()));
    let Ok(request) = request else { return false };
    let asking = send(port, request);
    matches!(
        tokio::time::timeout(Duration::from_secs(5), asking).await,
        Ok(Ok(_))
    )
}

/// The time from the start of a server's process to its first answer.
pub(crate) async fn first_answer(
    group: &mut Group,
    place: Place,
    asked: &Asked,
) -> Result<Duration> {
    let mut last = None;
    while group.started.elapsed() < PATIENCE {
        // Cheaper than a client: most attempts come before anybody listens.
        if TcpStream::connect(("127.0.0.1", place.port)).await.is_ok() {
            match place.ask(asked, &asked.model.name).await {
                Ok(outputs) => {
                    let took = group.started.elapsed();
                    asked.check(&outputs)?;
                    return Ok(took);
                }
                Err(error) => last = Some(error),
            }
        }
        group.check_alive()?;
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    match last {
        Some(error) => Err(error.context(format!("no answer within {PATIENCE:?}"))),
        None => bail!("nobody listened within {PATIENCE:?}"),
    }
}

/// Waits until a server says that it is ready.
pub(crate) async fn until_ready(group: &mut Group, port: u16, path: &str) -> Result<()> {
    let asked = Instant::now();
    while !is_ready(port, path).await {
        group.check_alive()?;
        ensure!(
            asked.elapsed() < PATIENCE,
            "not ready within {PATIENCE:?}: {}",
            group.last_words()
        );
        tokio::time::sleep(LOOK_AGAIN * 10).await;
    }
    Ok(())
}

/// Sends a request on a new connection; what a binary answer's header takes, and the body.
async fn send(port: u16, request: http::Request<Full<Bytes>>) -> Result<(Option<usize>, Bytes)> {
    let stream = TcpStream::connect(("127.0.0.1", port)).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let asking = async {
        let answer = sender.send_request(request).await?;
        let (head, body) = answer.into_parts();
        let body = Limited::new(body, LONGEST_ANSWER).collect().await;
        let body = body
            .map_err(|error| anyhow::anyhow!("the answer broke off: {error}"))?
            .to_bytes();
        ensure!(
            head.status.is_success(),
            "{}: {}",
            head.status,
            String::from_utf8_lossy(&body[..body.len().min(500)])
        );
        let length = head.headers.get(HEADER_LENGTH);
        let length = length.and_then(|value| value.to_str().ok()?.parse().ok());
        Ok((length, body))
    };
    let connected = async {
        // Its error shows as one of the request.
        let _ = connection.await;
        std::future::pending().await
    };
    tokio::select! {
        answer = asking => answer,
        never = connected => never,
    }
}

/// The length of a request's JSON, and the JSON with its tensors behind it.
fn encode(inputs: &[(String, Tensor)]) -> Result<(usize, Bytes)> {
    let mut described = Vec::new();
    let mut data = Vec::new();
    for (name, tensor) in inputs {
        let bytes = tensor.data();
        described.push(json!({
            "name": name,
            "datatype": tensor.datatype().to_string(),
            "shape": tensor.shape(),
            "parameters": { "binary_data_size": bytes.len() },
        }));
        data.extend_from_slice(bytes);
    }
    let document = json!({
        "inputs": described,
        "parameters": { "binary_data_output": true },
    });
    let mut body = serde_json::to_vec(&document)?;
    let header = body.len();
    body.append(&mut data);
    Ok((header, body.into()))
}

fn decode(header: usize, body: &Bytes) -> Result<Vec<(String, Tensor)>> {
    ensure!(
        header <= body.len(),
        "the answer is shorter than its header"
    );
    let document: AnswerDocument = serde_json::from_slice(&body[..header])?;
    let mut rest = body.slice(header..);
    let mut outputs = Vec::new();
    for output in document.outputs {
        let size = output.parameters.binary_data_size;
        ensure!(size <= rest.len(), "output '{}' is cut off", output.name);
        let tensor = Tensor::raw(output.datatype.parse()?, output.shape, rest.split_to(size))?;
        outputs.push((output.name, tensor));
    }
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_follow_the_json_that_describes_them() {
        let x = Tensor::from_slice([1, 2], &[1.0f32, 2.0]).unwrap();
        let (header, body) = encode(&[("x".to_owned(), x)]).unwrap();
        assert_eq!(body.len(), header + 8);
        let text = String::from_utf8_lossy(&body[..header]).replace("inputs", "outputs");
        let answer: Bytes = [text.as_bytes(), &body[header..]].concat().into();
        let outputs = decode(text.len(), &answer).unwrap();
        assert_eq!(outputs[0].1.to_vec::<f32>().unwrap(), [1.0, 2.0]);
        assert!(decode(text.len(), &answer.slice(..text.len() + 4)).is_err());
        assert!(decode(answer.len() + 1, &answer).is_err());
    }
}
