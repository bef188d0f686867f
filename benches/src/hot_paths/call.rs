//! A whole call below the socket, on a model that returns its input.

use std::hint::black_box;

use bytes::{BufMut, Bytes, BytesMut};
use dormouse_core::datatype::DataType;
use dormouse_server::frontend::grpc::GrpcOptions;
use dormouse_server::frontend::grpc::pieces::Calls;
use dormouse_server::frontend::http::{HttpLimits, router};
use dormouse_server::request::{RawInput, RawRequest};
use dormouse_server::service::Service;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use tokio::runtime::Runtime;
use tower::Service as _;

use super::{Step, Workload};
use crate::{echo, requests};

pub const WORKLOADS: &[Workload] = &[
    Workload {
        name: "call: the service, without a protocol",
        prepare: service,
    },
    Workload {
        name: "call: gRPC",
        prepare: grpc,
    },
    Workload {
        name: "call: HTTP binary",
        prepare: || {
            let (body, header_length) = requests::http_binary();
            http(body, Some(header_length))
        },
    },
    Workload {
        name: "call: HTTP JSON",
        prepare: || http(requests::http_json(), None),
    },
];

/// Calls before a step counts: the model's runs become known to be short.
const WARM_UP: usize = 20;

/// A server with its model awake, and the one thread that everything happens on.
struct Server {
    runtime: Runtime,
    service: Service,
}

impl Server {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime can be made");
        let service = runtime
            .block_on(echo::service())
            .expect("nothing can go wrong in a model that does nothing");
        let server = Self { runtime, service };
        for _ in 0..WARM_UP {
            server.infer();
        }
        server
    }

    fn infer(&self) {
        let request = RawRequest {
            inputs: vec![RawInput {
                name: "INPUT".to_owned(),
                datatype: DataType::Fp32,
                shape: [1, requests::ELEMENTS as i64].into_iter().collect(),
                data: requests::numbers(),
            }],
            received: self.service.now(),
            ..RawRequest::default()
        };
        let answer = self.service.infer(requests::MODEL, "", request);
        black_box(self.runtime.block_on(answer).expect("the model answers"));
    }
}

fn service() -> Step {
    let server = Server::start();
    Box::new(move || server.infer())
}

fn grpc() -> Step {
    let server = Server::start();
    let calls = Calls::new(server.service.clone(), GrpcOptions::default())
        .expect("the default options are allowed");
    let message = requests::grpc_message(DataType::Fp32, requests::numbers());
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(message.len() as u32);
    framed.put(message);
    let framed = framed.freeze();
    Box::new(move || {
        let request = Request::builder()
            .method(Method::POST)
            .uri("/inference.GRPCInferenceService/ModelInfer")
            .header(header::CONTENT_TYPE, "application/grpc")
            .header(header::TE, "trailers")
            .body(Full::new(framed.clone()))
            .expect("the request is well-formed");
        server.runtime.block_on(async {
            let response = calls.answer(request).await;
            let body = response.into_body().collect().await;
            let body = body.expect("the call is answered");
            let status = body.trailers().and_then(|all| all.get("grpc-status"));
            assert_eq!(status.map(|status| status.as_bytes()), Some(&b"0"[..]));
            black_box(body);
        });
    })
}

fn http(body: Bytes, header_length: Option<usize>) -> Step {
    let server = Server::start();
    let mut router = router(server.service.clone(), HttpLimits::default());
    Box::new(move || {
        let mut request = Request::builder()
            .method(Method::POST)
            .uri("/v2/models/identity/infer")
            .header(header::CONTENT_LENGTH, body.len());
        if let Some(length) = header_length {
            request = request.header("Inference-Header-Content-Length", length);
        }
        let request = request
            .body(Full::new(body.clone()))
            .expect("the request is well-formed");
        server.runtime.block_on(async {
            let response = router.call(request).await;
            let response = response.unwrap_or_else(|never| match never {});
            assert_eq!(response.status(), StatusCode::OK);
            black_box(response.into_body().collect().await).expect("the call is answered");
        });
    })
}
