//! The whole server, from outside: a real process, real sockets, tiny checked-in models.
//!
//! `server` starts and watches the process, `repository` lays out models, `wire` and `http` speak
//! the protocols without any client library of ours in between, `python` prepares foreign
//! clients. Every other file is one behaviour.

mod batching;
mod cold_start;
mod counters;
mod deadlines;
mod demo;
mod flags;
mod foreign;
mod http;
mod overload;
mod policies;
mod python;
mod reload;
mod repository;
mod rust_client;
mod scale_to_zero;
mod server;
mod shutdown;
mod traversal;
mod wire;
