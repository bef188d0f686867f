//! How calls on tensors are read and written.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Code, Status};

use super::answer::{Answer, StreamAnswer};
use super::wire::Malformed;
use crate::limits::Limit;
use bytes::Buf;

/// Small messages fit; larger ones reserve what they need when their length is known.
const BUFFER: usize = 2 << 10;
const YIELD_THRESHOLD: usize = 32 << 10;

/// What a message will take in memory beyond its own bytes, see [`super::wire`].
type Cost = fn(&[u8]) -> Result<usize, Malformed>;

/// A message that knows how to write itself.
pub(super) trait Encode: Send + 'static {
    fn encoded_len(&self) -> usize;
    fn encode(&self, buf: &mut EncodeBuf<'_>);
}

impl Encode for Answer {
    fn encoded_len(&self) -> usize {
        Answer::encoded_len(self)
    }

    fn encode(&self, buf: &mut EncodeBuf<'_>) {
        Answer::encode(self, buf);
    }
}

impl Encode for StreamAnswer {
    fn encoded_len(&self) -> usize {
        StreamAnswer::encoded_len(self)
    }

    fn encode(&self, buf: &mut EncodeBuf<'_>) {
        StreamAnswer::encode(self, buf);
    }
}

impl Encode for dormouse_proto::inference::RepositoryModelLoadResponse {
    fn encoded_len(&self) -> usize {
        Message::encoded_len(self)
    }

    fn encode(&self, _: &mut EncodeBuf<'_>) {}
}

/// Decodes `R` only when that takes at most `limit` bytes of memory; encodes `A`.
#[derive(Debug)]
pub(super) struct BoundedCodec<R, A> {
    cost: Cost,
    limit: usize,
    kinds: PhantomData<fn(R) -> A>,
}

impl<R, A> BoundedCodec<R, A> {
    pub(super) fn new(cost: Cost, limit: usize) -> Self {
        Self {
            cost,
            limit,
            kinds: PhantomData,
        }
    }
}

/// A message with the bytes that it had on the wire, once decompressed.
#[derive(Debug, Default)]
pub(super) struct Received<R> {
    pub(super) message: R,
    pub(super) bytes: usize,
}

impl<R, A> Codec for BoundedCodec<R, A>
where
    R: Message + Default + 'static,
    A: Encode,
{
    type Encode = A;
    type Decode = Received<R>;
    type Encoder = AnswerEncoder<A>;
    type Decoder = BoundedDecoder<R>;

    fn encoder(&mut self) -> Self::Encoder {
        AnswerEncoder(PhantomData)
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder {
            cost: self.cost,
            limit: self.limit,
            kind: PhantomData,
        }
    }
}

/// See [`BoundedCodec`].
#[derive(Debug)]
pub(super) struct BoundedDecoder<R> {
    cost: Cost,
    limit: usize,
    kind: PhantomData<fn() -> R>,
}

impl<R: Message + Default> Decoder for BoundedDecoder<R> {
    type Item = Received<R>;
    type Error = Status;

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<Received<R>>, Status> {
        let bytes = buf.remaining();
        let message = decode_bounded(self.cost, self.limit, buf)?;
        Ok(Some(Received { message, bytes }))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER, YIELD_THRESHOLD)
    }
}

/// Decodes a message if that takes at most `limit` bytes of memory.
pub(super) fn decode_bounded<R: Message + Default>(
    cost: Cost,
    limit: usize,
    message: impl Buf,
) -> Result<R, Status> {
    // The message lies in one piece, so this sees all of it.
    check_cost(cost, limit, message.chunk())?;
    R::decode(message).map_err(|error| {
        // What the gRPC specification asks for.
        Status::internal(format!("the message cannot be decoded: {error}"))
    })
}

/// Counts a message that the library refused for its size, told by what it says then.
pub(super) fn note_refusal(code: Code, said: &[u8]) {
    match code {
        Code::OutOfRange => Limit::BodySize.refuse(),
        // Our own refusals have been counted and begin otherwise.
        Code::ResourceExhausted if said.starts_with(b"Error") => Limit::DecompressedSize.refuse(),
        _ => {}
    }
}

fn check_cost(cost: Cost, limit: usize, message: &[u8]) -> Result<(), Status> {
    match cost(message) {
        Ok(needed) if needed <= limit => Ok(()),
        Ok(needed) => {
            Limit::DecodedSize.refuse();
            Err(Status::resource_exhausted(format!(
                "a message of {} bytes would take {needed} bytes once decoded, the limit is: {limit} bytes",
                message.len()
            )))
        }
        Err(Malformed) => Err(Status::internal(
            "the message cannot be decoded: it is cut short or has an unknown kind of field",
        )),
    }
}

/// See [`BoundedCodec`].
#[derive(Debug)]
pub(super) struct AnswerEncoder<A>(PhantomData<fn(A)>);

impl<A: Encode> Encoder for AnswerEncoder<A> {
    type Item = A;
    type Error = Status;

    fn encode(&mut self, item: A, buf: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buf.reserve(item.encoded_len());
        item.encode(buf);
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER, YIELD_THRESHOLD)
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::infer_request_cost;
    use super::*;

    #[test]
    fn a_message_that_would_swell_is_refused_before_it_is_decoded() {
        let message = [0x2a, 0].repeat(1_000_000);
        let status = check_cost(infer_request_cost, 64 << 20, &message).unwrap_err();
        assert_eq!(status.code(), tonic::Code::ResourceExhausted);
        assert!(status.message().contains("2000000 bytes"), "{status}");
        assert!(status.message().contains("67108864"), "{status}");
    }
}
