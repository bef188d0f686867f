//! From a model's name to what is needed to load it: where it lives, how it is configured, what
//! its graph says. Builds and tests without the engine.

pub mod config;
mod cost;
pub mod coupling;
pub mod graph;
pub mod manifest;
pub mod names;
pub mod onnx;
pub mod repository;
pub mod safetensors;
pub mod spec;
pub mod store;
