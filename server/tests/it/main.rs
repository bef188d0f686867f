//! The whole server, from outside: a real process, real sockets, tiny checked-in models.
//!
//! `server` starts and watches the process, `repository` lays out models and `generated` makes
//! larger ones, `wire` and `http` speak the protocols without any client library of ours in
//! between, `python` prepares foreign clients. Every other file is one behaviour.

mod activation;
mod authority;
mod batching;
mod cold_start;
mod counters;
mod deadlines;
mod demo;
mod extensions;
mod faults;
mod faults_files;
mod faults_source;
mod flags;
mod foreign;
mod generated;
mod guide;
mod http;
mod isolation;
mod keda;
mod limits;
mod manifests;
mod observed;
mod openapi;
mod overload;
mod packaging;
mod page;
mod policies;
mod python;
mod python_client;
mod quotas;
mod race;
mod reload;
mod remote;
mod repository;
mod rust_client;
mod scale_to_zero;
mod security;
mod sequences;
mod server;
mod shutdown;
mod spans;
mod storm;
mod traversal;
mod wake;
mod wake_budget;
mod wake_read_only;
mod web_tokens;
mod webhooks;
mod weights;
mod wire;
