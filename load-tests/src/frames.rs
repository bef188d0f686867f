//! HTTP/2 frames by hand, for bytes that no client library would send, or not this cheaply.

use anyhow::{Context, Result};
use prost::Message;

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RESET: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GO_AWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;

pub(crate) const END_STREAM: u8 = 1;
/// Of settings and pings.
pub(crate) const ACKNOWLEDGED: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;

/// Bytes of a frame before its payload.
pub(crate) const FRAME_HEAD: usize = 9;

pub(crate) fn frame(bytes: &mut Vec<u8>, (kind, flags): (u8, u8), stream: u32, payload: &[u8]) {
    let [_, length @ ..] = (payload.len() as u32).to_be_bytes();
    bytes.extend(length);
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
}

/// A gRPC call's headers, none of them in a table that both sides would have to keep.
pub(crate) fn head(authority: &str, method: &str) -> Vec<u8> {
    // POST and http, which every table has.
    let mut block = vec![0x83, 0x86];
    let path = format!("/inference.GRPCInferenceService/{method}");
    for (name, value) in [(4, &*path), (1, authority), (31, "application/grpc")] {
        literal(&mut block, name, value);
    }
    block
}

/// A value for a name of the static table; both are shorter than 127.
fn literal(block: &mut Vec<u8>, name: u8, value: &str) {
    match name < 15 {
        true => block.push(name),
        false => block.extend([15, name - 15]),
    }
    block.push(value.len() as u8);
    block.extend(value.bytes());
}

/// A header with a name of its own; both are shorter than 127.
pub(crate) fn field(block: &mut Vec<u8>, name: &str, value: &[u8]) {
    block.extend([0, name.len() as u8]);
    block.extend(name.bytes());
    block.push(value.len() as u8);
    block.extend(value);
}

/// A message as gRPC sends it: not compressed, then the length.
pub(crate) fn grpc_message(message: &impl Message) -> Result<Vec<u8>> {
    let length = u32::try_from(message.encoded_len()).context("a request of some megabytes")?;
    let mut bytes = vec![0];
    bytes.extend(length.to_be_bytes());
    message.encode(&mut bytes)?;
    Ok(bytes)
}
