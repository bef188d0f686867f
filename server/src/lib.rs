//! The Dormouse inference server: front ends, the tasks that drive `dormouse_core`'s decisions,
//! and the engine. `app` builds it all; `service` is what both protocols serve.

pub mod alarm;
pub mod app;
pub mod assets;
pub mod cli;
pub mod clock;
pub mod config;
pub mod engine;
pub mod error;
pub mod frontend;
pub mod host;
pub mod memory;
pub mod metrics;
pub mod process;
pub mod registry;
pub mod request;
pub mod runtime_library;
pub mod service;
pub mod shutdown;
pub mod stats;
pub mod telemetry;
pub mod timeline;
pub mod unit;
pub mod validate;
