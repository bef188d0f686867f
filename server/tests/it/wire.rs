//! gRPC through the generated stubs: what goes over the wire is what a test wrote down.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use dormouse_proto::inference as pb;
use dormouse_proto::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use pb::model_infer_request::InferInputTensor;
use tonic::transport::{Channel, Endpoint};

/// A connection's stub.
pub(crate) type GrpcClient = GrpcInferenceServiceClient<Channel>;

/// A new connection to a server, without tonic's limits on message sizes.
pub(crate) async fn connect(address: SocketAddr) -> Result<GrpcClient> {
    let channel = Endpoint::from_shared(format!("http://{address}"))?
        .connect()
        .await
        .with_context(|| format!("cannot connect to {address}"))?;
    Ok(GrpcInferenceServiceClient::new(channel)
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX))
}

/// An element type whose values are written as fixed-size little-endian words.
pub(crate) trait Element: Sized {
    const DATATYPE: &'static str;
    fn write(values: &[Self]) -> Bytes;
    fn read(data: &[u8]) -> Vec<Self>;
}

macro_rules! element {
    ($($kind:ty => $name:literal),*) => {$(
        impl Element for $kind {
            const DATATYPE: &'static str = $name;
            fn write(values: &[Self]) -> Bytes {
                values.iter().flat_map(|value| value.to_le_bytes()).collect()
            }
            fn read(data: &[u8]) -> Vec<Self> {
                let (words, rest) = data.as_chunks();
                assert!(rest.is_empty(), "{} bytes are not whole {}s", data.len(), $name);
                words.iter().map(|word| <$kind>::from_le_bytes(*word)).collect()
            }
        }
    )*};
}

element!(i32 => "INT32", i64 => "INT64", f32 => "FP32", f64 => "FP64", u8 => "UINT8");

/// Builds a request input by input.
#[derive(Clone, Debug)]
pub(crate) struct Request(pub(crate) pb::ModelInferRequest);

impl Request {
    pub(crate) fn new(model: &str) -> Self {
        Self(pb::ModelInferRequest {
            model_name: model.to_owned(),
            ..Default::default()
        })
    }

    pub(crate) fn version(mut self, version: &str) -> Self {
        self.0.model_version = version.to_owned();
        self
    }

    pub(crate) fn id(mut self, id: impl Into<String>) -> Self {
        self.0.id = id.into();
        self
    }

    /// Adds an input in the raw layout.
    pub(crate) fn input<E: Element>(self, name: &str, shape: &[i64], values: &[E]) -> Self {
        self.raw_input(name, E::DATATYPE, shape, E::write(values))
    }

    pub(crate) fn raw_input(
        mut self,
        name: &str,
        datatype: &str,
        shape: &[i64],
        data: Bytes,
    ) -> Self {
        self.0.inputs.push(InferInputTensor {
            name: name.to_owned(),
            datatype: datatype.to_owned(),
            shape: shape.to_vec(),
            ..Default::default()
        });
        self.0.raw_input_contents.push(data);
        self
    }
}

/// A request to the `slow` model, which counts `iterations`.
pub(crate) fn slow(model: &str, iterations: i64) -> Request {
    Request::new(model).input("ITERATIONS", &[1], &[iterations])
}

/// A request to an `add_sub` model with one row of each value sixteen times.
pub(crate) fn add_sub(model: &str, left: i32, right: i32) -> Request {
    Request::new(model)
        .input("INPUT0", &[1, 16], &[left; 16])
        .input("INPUT1", &[1, 16], &[right; 16])
}

/// The values of an output that must have this shape.
pub(crate) fn output<E: Element>(
    response: &pb::ModelInferResponse,
    name: &str,
    shape: &[i64],
) -> Result<Vec<E>> {
    let index = response
        .outputs
        .iter()
        .position(|output| output.name == name)
        .with_context(|| format!("no output {name:?} in {:?}", response.outputs))?;
    let tensor = &response.outputs[index];
    ensure!(
        tensor.datatype == E::DATATYPE && tensor.shape == shape,
        "output {name:?} is {} {:?}, expected {} {shape:?}",
        tensor.datatype,
        tensor.shape,
        E::DATATYPE
    );
    let data = response
        .raw_output_contents
        .get(index)
        .with_context(|| format!("output {name:?} has no raw contents"))?;
    Ok(E::read(data))
}

/// Sends a request and returns its answer's message.
pub(crate) async fn infer(
    client: &GrpcClient,
    request: Request,
) -> Result<pb::ModelInferResponse, tonic::Status> {
    let answer = client.clone().model_infer(request.0).await;
    answer.map(tonic::Response::into_inner)
}

/// The counters of one model, which must have one version.
pub(crate) async fn statistics(client: &GrpcClient, model: &str) -> Result<pb::ModelStatistics> {
    let answer = client
        .clone()
        .model_statistics(pb::ModelStatisticsRequest {
            name: model.to_owned(),
            version: String::new(),
        })
        .await?
        .into_inner();
    ensure!(
        answer.model_stats.len() == 1,
        "{} versions of {model}, expected one",
        answer.model_stats.len()
    );
    Ok(answer.model_stats.into_iter().next().expect("one entry"))
}

/// State and reason of a model's version in the repository index.
pub(crate) async fn index_state(
    client: &GrpcClient,
    model: &str,
    version: &str,
) -> Result<(String, String)> {
    let answer = client
        .clone()
        .repository_index(pb::RepositoryIndexRequest::default())
        .await?
        .into_inner();
    answer
        .models
        .iter()
        .find(|entry| entry.name == model && (entry.version == version || version.is_empty()))
        .map(|entry| (entry.state.clone(), entry.reason.clone()))
        .with_context(|| format!("{model} version {version:?} is not in {:?}", answer.models))
}
