//! What speaks to clients: one file per protocol, no decisions.

pub mod grpc;
pub mod health;
pub mod http;
pub mod listed;
pub mod listen;
pub(crate) mod management;
pub mod scaler;
pub mod status;
