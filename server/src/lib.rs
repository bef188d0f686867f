//! The Dormouse inference server: front ends, the tasks that drive `dormouse_core`'s decisions,
//! and the engine. `app` builds it all; `service` is what both protocols serve.

pub mod activation;
pub mod activity;
pub mod alarm;
pub mod app;
pub mod assets;
pub mod cli;
pub mod clock;
pub mod config;
pub mod engine;
pub mod error;
pub mod events;
pub mod frontend;
pub mod host;
pub mod memory;
pub mod metrics;
pub mod preparation;
pub mod priority;
pub mod process;
pub mod registry;
pub mod request;
pub mod residency;
pub mod runtime_library;
pub mod sample;
pub mod service;
pub mod shutdown;
pub mod stats;
pub mod telemetry;
pub mod timeline;
pub mod unit;
pub mod validate;
pub mod wake;
pub mod webhook;
