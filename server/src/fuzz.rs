//! Entry points for fuzzing: bytes that come from outside go in, and what must hold for all of
//! them is checked on the way.
//!
//! `server/fuzz` drives them with libFuzzer. The tests below go through the corpus that is kept
//! there and then through a seeded run of mutations of it.

mod allocations;
mod bytes_tensor;
mod config;
mod grpc;
mod http;
mod onnx;
mod requests;
mod safetensors;
mod worker;

#[cfg(test)]
mod tests;

pub use self::allocations::Counting;

/// Something that is fed bytes; tells whether they were what it takes.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Of its binary, its corpus and its dictionary in `server/fuzz`.
    pub name: &'static str,
    /// Panics when something does not hold.
    pub run: fn(&[u8]) -> bool,
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target {
        name: "grpc_infer",
        run: grpc::infer,
    },
    Target {
        name: "http_json",
        run: http::json,
    },
    Target {
        name: "http_binary",
        run: http::binary,
    },
    Target {
        name: "bytes_tensor",
        run: bytes_tensor::tensor,
    },
    Target {
        name: "config_pbtxt",
        run: config::text,
    },
    Target {
        name: "safetensors",
        run: safetensors::header,
    },
    Target {
        name: "onnx",
        run: onnx::preflight,
    },
    Target {
        name: "worker",
        run: worker::reply,
    },
];

/// Runs the target of this name.
pub fn run(name: &str, data: &[u8]) -> bool {
    let target = TARGETS.iter().find(|target| target.name == name);
    (target.expect("the target is in the list").run)(data)
}

/// Messages about what came from outside are short, however long that was.
fn assert_presentable(message: &str) {
    assert!(!message.is_empty(), "an empty message");
    assert!(
        message.len() <= 4 << 10,
        "a message of {} bytes: {}…",
        message.len(),
        message.chars().take(200).collect::<String>()
    );
}
