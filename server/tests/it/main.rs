//! The whole server, from outside: a real process, real sockets, tiny checked-in models.
//!
//! `server` starts and watches the process, `repository` lays out models and `generated` makes
//! larger ones, `wire` and `http` speak the protocols without any client library of ours in
//! between, `python` prepares foreign clients. Every other file is one behaviour.

mod activation;
mod batching;
mod cold_start;
mod counters;
mod deadlines;
mod demo;
mod faults;
mod faults_files;
mod faults_source;
mod flags;
mod foreign;
mod generated;
mod http;
mod keda;
mod manifests;
mod overload;
mod policies;
mod python;
mod race;
mod reload;
mod repository;
mod rust_client;
mod scale_to_zero;
mod server;
mod shutdown;
mod storm;
mod traversal;
mod wake;
mod wake_budget;
mod webhooks;
mod weights;
mod wire;
