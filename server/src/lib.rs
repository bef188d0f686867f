//! The Dormouse inference server: front ends, the tasks that drive `dormouse_core`'s decisions,
//! and the engine. `app` builds it all; `service` is what both protocols serve.

pub mod activation;
pub mod activity;
pub mod alarm;
pub mod app;
pub mod assets;
pub mod classification;
pub mod cli;
pub mod clock;
pub mod config;
pub mod engine;
pub mod error;
pub mod events;
pub mod extensions;
pub mod frontend;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzz;
pub mod guard;
pub mod host;
pub mod isolation;
pub mod limits;
pub mod log_settings;
pub mod memory;
pub mod metrics;
pub mod overview;
pub mod preparation;
pub mod priority;
pub mod process;
pub mod registry;
pub mod remote;
pub mod request;
pub mod residency;
pub mod response_cache;
pub mod runtime_library;
pub mod sample;
pub mod service;
pub mod shared_memory;
pub mod shutdown;
#[cfg(any(test, feature = "fuzzing"))]
mod signature;
pub mod spans;
pub mod stats;
pub mod telemetry;
mod thread_timer;
pub mod timeline;
pub mod trace_settings;
pub mod unit;
pub mod validate;
pub mod wake;
pub mod webhook;
