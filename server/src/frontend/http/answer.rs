//! What goes back: bodies in pieces, their compression, and errors.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dormouse_core::code::ErrorCode;
use http::header::{self, HeaderName, HeaderValue};
use http::{HeaderMap, StatusCode};
use http_body::{Frame, SizeHint};

use super::coding::{self, Coding};
use super::infer::{HEADER_LENGTH, OutputPlan};
use super::tensor_data::{self, put};
use crate::error::ServeError;
use crate::frontend::status::{grpc_code_name, http_status};
use crate::request::InferResponse;
use crate::timeline::ColdRequest;

/// Tensors smaller than this are copied behind the JSON instead of being a piece of their own.
const SMALL: usize = 8 << 10;

/// The header that says what an error is called over gRPC.
const ERROR_CODE: &str = "dormouse-error-code";

/// A body in pieces that are sent as they are.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    pieces: VecDeque<Bytes>,
    length: u64,
}

impl Pieces {
    fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.length += piece.len() as u64;
            self.pieces.push_back(piece);
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.length
    }

    #[cfg(test)]
    pub(super) fn concat(&self) -> Vec<u8> {
        self.pieces.iter().flatten().copied().collect()
    }
}

impl From<Vec<u8>> for Pieces {
    fn from(bytes: Vec<u8>) -> Self {
        let mut pieces = Self::default();
        pieces.push(bytes.into());
        pieces
    }
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = self.pieces.pop_front();
        if let Some(piece) = &piece {
            self.length -= piece.len() as u64;
        }
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.length)
    }
}

/// A successful answer before it is compressed.
#[derive(Debug)]
pub(super) struct Answer {
    pub body: Pieces,
    pub content_type: &'static str,
    /// The length of the JSON when binary tensors follow it.
    pub header_length: Option<usize>,
    pub cold_start: Option<Box<ColdRequest>>,
}

impl Answer {
    pub(super) fn json(body: Vec<u8>) -> Self {
        Self {
            body: body.into(),
            content_type: "application/json",
            header_length: None,
            cold_start: None,
        }
    }

    /// Encodes an inference's outputs: JSON ones into the header, binary ones behind it.
    pub(super) fn infer(response: InferResponse, plan: &OutputPlan) -> Result<Self, ServeError> {
        let mut json = b"{".to_vec();
        if !response.id.is_empty() {
            json.extend_from_slice(b"\"id\":");
            put(&mut json, &response.id);
            json.push(b',');
        }
        json.extend_from_slice(b"\"model_name\":");
        put(&mut json, &*response.model_name);
        json.extend_from_slice(
            format!(
                ",\"model_version\":\"{}\",\"outputs\":[",
                response.model_version
            )
            .as_bytes(),
        );
        let mut binary = Vec::new();
        let placed = response.placed;
        for (index, (name, tensor)) in response.outputs.into_iter().enumerate() {
            json.extend_from_slice(if index > 0 {
                b",{\"name\":"
            } else {
                b"{\"name\":"
            });
            put(&mut json, &*name);
            json.extend_from_slice(
                format!(",\"datatype\":\"{}\",\"shape\":", tensor.datatype).as_bytes(),
            );
            put(&mut json, tensor.shape.as_slice());
            let place = placed
                .as_ref()
                .and_then(|placed| placed.get(index)?.as_ref());
            if place.is_some() {
                // As Triton: clients know where they asked for it, and take any parameters to
                // tell of a binary tail.
                json.push(b'}');
            } else if plan.is_binary(&name) {
                json.extend_from_slice(
                    format!(
                        ",\"parameters\":{{\"binary_data_size\":{}}}}}",
                        tensor.data.len()
                    )
                    .as_bytes(),
                );
                binary.push(tensor.data);
            } else {
                json.extend_from_slice(b",\"data\":");
                tensor_data::write(&mut json, &name, &tensor)?;
                json.push(b'}');
            }
        }
        json.extend_from_slice(b"]}");

        let has_binary = binary.iter().any(|tensor| !tensor.is_empty());
        let header_length = has_binary.then_some(json.len());
        let mut body = Pieces::default();
        let mut buffer = json;
        for tensor in binary {
            if tensor.len() < SMALL {
                buffer.extend_from_slice(&tensor);
            } else {
                body.push(std::mem::take(&mut buffer).into());
                body.push(tensor);
            }
        }
        body.push(buffer.into());
        Ok(Self {
            body,
            content_type: if has_binary {
                "application/octet-stream"
            } else {
                "application/json"
            },
            header_length,
            cold_start: response.cold_start,
        })
    }

    /// The response, compressed by `coding`. Blocks for as long as compressing takes.
    pub(super) fn into_response(self, coding: Coding) -> Response {
        let body = match coding {
            Coding::Identity => self.body,
            _ => coding::compress(coding, self.body.pieces.iter()).into(),
        };
        let mut response = Response::new(Body::new(body));
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static(self.content_type),
        );
        if let Some(name) = coding.name() {
            headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static(name));
        }
        if let Some(length) = self.header_length {
            headers.insert(
                HeaderName::from_static(HEADER_LENGTH),
                HeaderValue::from(length),
            );
        }
        if let Some(value) = self
            .cold_start
            .and_then(|timeline| HeaderValue::try_from(timeline.server_timing()).ok())
        {
            headers.insert(HeaderName::from_static("server-timing"), value);
        }
        response
    }
}

/// An error as HTTP says it.
#[derive(Debug)]
pub(super) struct Failure {
    pub status: StatusCode,
    /// What the service said, not what HTTP itself found wrong.
    pub code: Option<ErrorCode>,
    pub message: String,
    pub retry_after: Option<Duration>,
    /// The methods that would have been right.
    pub allow: Option<&'static str>,
}

impl Failure {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            code: None,
            message: message.into(),
            retry_after: None,
            allow: None,
        }
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Self {
        if error.code() == ErrorCode::Internal {
            tracing::error!(error = error.message(), "request failed");
        }
        Self {
            status: http_status(error.code()),
            code: Some(error.code()),
            message: error.message().to_owned(),
            retry_after: error.retry_hint(),
            allow: None,
        }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut json = b"{\"error\":".to_vec();
        put(&mut json, &self.message);
        json.push(b'}');
        let mut response = Answer::json(json).into_response(Coding::Identity);
        *response.status_mut() = self.status;
        let headers: &mut HeaderMap = response.headers_mut();
        if let Some(code) = self.code {
            headers.insert(
                HeaderName::from_static(ERROR_CODE),
                HeaderValue::from_static(grpc_code_name(code)),
            );
        }
        if let Some(wait) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(whole_seconds(wait)));
        }
        if let Some(methods) = self.allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(methods));
        }
        response
    }
}

/// `wait` in seconds, rounded up and at least one: a client told 0 comes back at once.
fn whole_seconds(wait: Duration) -> u64 {
    let partial = u64::from(wait.subsec_nanos() > 0);
    wait.as_secs().saturating_add(partial).max(1)
}

#[cfg(test)]
mod tests {
    use dormouse_core::datatype::DataType;
    use dormouse_core::shape::Shape;
    use dormouse_core::time::Timestamp;
    use expect_test::expect;

    use super::super::infer;
    use super::*;
    use crate::limits::RequestLimits;
    use crate::request::Tensor;

    fn tensor(datatype: DataType, shape: &[i64], data: impl Into<Bytes>) -> Tensor {
        Tensor {
            datatype,
            shape: Shape::from_slice(shape),
            data: data.into(),
        }
    }

    fn response(outputs: Vec<(&str, Tensor)>) -> InferResponse {
        InferResponse {
            model_name: "add \"sub\"".into(),
            model_version: 3,
            id: "a\n1".to_owned(),
            outputs: outputs
                .into_iter()
                .map(|(name, tensor)| (name.into(), tensor))
                .collect(),
            cold_start: None,
            placed: None,
        }
    }

    fn plan(outputs: &str) -> OutputPlan {
        let body = format!("{{\"inputs\":[],{outputs}}}");
        infer::parse(
            &body.into(),
            None,
            Timestamp::ZERO,
            &RequestLimits::default(),
        )
        .unwrap()
        .plan
    }

    #[test]
    fn answers_have_tritons_form() {
        let outputs = vec![
            ("X", tensor(DataType::Fp32, &[1, 2], [0u8; 8].to_vec())),
            ("Y", tensor(DataType::Uint8, &[2], vec![7, 8])),
        ];
        let answer = Answer::infer(response(outputs.clone()), &OutputPlan::default()).unwrap();
        assert_eq!(answer.header_length, None);
        expect![[r#"{"id":"a\n1","model_name":"add \"sub\"","model_version":"3","outputs":[{"name":"X","datatype":"FP32","shape":[1,2],"data":[0.0,0.0]},{"name":"Y","datatype":"UINT8","shape":[2],"data":[7,8]}]}"#]]
            .assert_eq(&String::from_utf8(answer.body.concat()).unwrap());

        let mixed =
            plan(r#""outputs":[{"name":"X"},{"name":"Y","parameters":{"binary_data":true}}]"#);
        let answer = Answer::infer(response(outputs), &mixed).unwrap();
        let body = answer.body.concat();
        let (json, tail) = body.split_at(answer.header_length.unwrap());
        assert_eq!(tail, [7, 8]);
        expect![[r#"{"id":"a\n1","model_name":"add \"sub\"","model_version":"3","outputs":[{"name":"X","datatype":"FP32","shape":[1,2],"data":[0.0,0.0]},{"name":"Y","datatype":"UINT8","shape":[2],"parameters":{"binary_data_size":2}}]}"#]]
            .assert_eq(std::str::from_utf8(json).unwrap());
        let sent = answer.into_response(Coding::Identity);
        assert_eq!(sent.headers()[HEADER_LENGTH], json.len().to_string());
        assert_eq!(sent.headers()["content-type"], "application/octet-stream");
    }

    #[test]
    fn large_tensors_are_sent_from_their_own_buffer() {
        let big = Bytes::from(vec![5u8; 100_000]);
        let outputs = vec![
            ("A", tensor(DataType::Uint8, &[1], vec![1])),
            ("B", tensor(DataType::Uint8, &[100_000], big.clone())),
            ("C", tensor(DataType::Uint8, &[1], vec![2])),
            ("D", tensor(DataType::Uint8, &[0], vec![])),
        ];
        let all_binary = plan(r#""parameters":{"binary_data_output":true}"#);
        let answer = Answer::infer(response(outputs), &all_binary).unwrap();
        assert!(
            answer
                .body
                .pieces
                .iter()
                .any(|piece| piece.as_ptr() == big.as_ptr())
        );
        let body = answer.body.concat();
        assert_eq!(body.len() as u64, answer.body.len());
        let tail = &body[answer.header_length.unwrap()..];
        assert_eq!(tail.len(), 100_002);
        assert_eq!((tail[0], tail[1], tail[100_001]), (1, 5, 2));
    }

    #[test]
    fn empty_binary_outputs_need_no_header() {
        let outputs = vec![("D", tensor(DataType::Uint8, &[0], vec![]))];
        let answer = Answer::infer(response(outputs), &OutputPlan::all_binary()).unwrap();
        assert_eq!(answer.header_length, None);
        assert_eq!(answer.content_type, "application/json");
    }

    #[test]
    fn retry_hints_round_up() {
        let error =
            ServeError::new(ErrorCode::Overloaded, "full").retry_after(Duration::from_millis(1200));
        let response = Failure::from(error).into_response();
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["retry-after"], "2");
        assert_eq!(response.headers()["content-type"], "application/json");
        assert_eq!(whole_seconds(Duration::ZERO), 1);
    }

    #[test]
    fn errors_carry_the_code_that_they_have_over_grpc() {
        let error = ServeError::new(ErrorCode::DeadlineExceeded, "too late");
        let response = Failure::from(error).into_response();
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()[ERROR_CODE], "DEADLINE_EXCEEDED");
        let response = Failure::bad_request("not JSON").into_response();
        assert!(!response.headers().contains_key(ERROR_CODE));
    }

    #[test]
    fn cold_starts_are_told() {
        let mut response = response(vec![]);
        response.cold_start = Some(Box::new(ColdRequest {
            total: Duration::from_millis(12),
            ..ColdRequest::default()
        }));
        let answer = Answer::infer(response, &OutputPlan::default()).unwrap();
        let response = answer.into_response(Coding::Identity);
        let timing = response.headers()["server-timing"].to_str().unwrap();
        assert!(timing.ends_with("total;dur=12.000"), "{timing}");
    }
}
