//! Every route and call of every port, from the tables that requests are served by.

use super::{grpc, http};
use crate::guard::{Listener, Need};

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    pub listener: Listener,
    /// With braces around what may be anything.
    pub path: String,
    pub method: &'static str,
    pub need: Need,
}

/// All of them. The management listener serves those of HTTP and gRPC.
pub fn every_route() -> Vec<Listed> {
    let plain = http::routes::listed().map(|(path, method, need)| Listed {
        listener: Listener::Http,
        path,
        method,
        need,
    });
    let calls = grpc::methods::TABLE.iter().map(|(path, need)| Listed {
        listener: Listener::Grpc,
        path: (*path).to_owned(),
        method: "POST",
        need: *need,
    });
    let metrics = Listed {
        listener: Listener::Metrics,
        path: http::METRICS.to_owned(),
        method: "GET",
        need: Need::Metrics,
    };
    plain.chain(calls).chain([metrics]).collect()
}
