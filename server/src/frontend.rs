//! What speaks to clients: one file per protocol, no decisions.

pub mod grpc;
pub mod health;
pub mod http;
pub mod listen;
pub mod scaler;
pub mod status;
