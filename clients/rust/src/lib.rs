//! An async client of Dormouse, and of any other server of the KServe v2 / Triton gRPC protocol.
//!
//! Tensors are typed at the edges and stay in the wire's layout in between: what is received is
//! looked at in place where alignment allows it, what is sent is not copied again for a retry.
//!
//! ```no_run
//! use dormouse_client::{Client, InferRequest, Tensor};
//!
//! # async fn example() -> Result<(), dormouse_client::ClientError> {
//! let client = Client::connect("http://127.0.0.1:8001").await?;
//! let image = Tensor::from_vec([1, 3, 224, 224], vec![0.5f32; 3 * 224 * 224])?;
//! let response = client
//!     .infer(InferRequest::new("resnet50").input("image", image).output("scores"))
//!     .await?;
//! let scores = response.output("scores")?.to_vec::<f32>()?;
//! if let Some(cold) = response.timing() {
//!     eprintln!("the model was asleep and woke in {:?}", cold.total);
//! }
//! # drop(scores);
//! # Ok(())
//! # }
//! ```

#![warn(missing_docs)]

mod builder;
mod client;
mod datatype;
mod element;
mod error;
mod infer;
mod metadata;
mod repository;
mod retry;
mod stream;
mod tensor;
mod timing;

pub use builder::ClientBuilder;
pub use client::Client;
pub use datatype::DataType;
pub use dormouse_proto::inference as pb;
pub use element::Element;
pub use error::{ClientError, TensorError};
pub use infer::{InferRequest, InferResponse, Parameter};
pub use metadata::{ModelMetadata, ServerMetadata, TensorMetadata};
pub use repository::{IndexEntry, LoadRequest, ModelState};
pub use retry::RetryPolicy;
pub use stream::{InferReceiver, InferSender, InferStream, StreamOptions};
pub use tensor::Tensor;
pub use timing::{ColdStart, RequestTiming, Stage, VersionColdStarts};
pub use tonic::Code;
