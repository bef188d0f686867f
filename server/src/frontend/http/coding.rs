//! Content codings: gzip and deflate, in both directions.

use std::io::{self, Write};

use bytes::Bytes;
use flate2::write::{GzEncoder, MultiGzDecoder, ZlibEncoder};
use flate2::{Compression, Decompress, FlushDecompress, Status};

/// How a body is encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Coding {
    #[default]
    Identity,
    Gzip,
    Deflate,
}

impl Coding {
    /// The value of `Content-Encoding`, none where that header is left out.
    pub(super) fn name(self) -> Option<&'static str> {
        match self {
            Self::Identity => None,
            Self::Gzip => Some("gzip"),
            Self::Deflate => Some("deflate"),
        }
    }

    /// Reads `Content-Encoding`; none for a coding (or a stack of them) that is not supported.
    pub(super) fn from_content_encoding(value: &[u8]) -> Option<Self> {
        let value = value.trim_ascii();
        [
            (&b""[..], Self::Identity),
            (b"identity", Self::Identity),
            (b"gzip", Self::Gzip),
            (b"x-gzip", Self::Gzip),
            (b"deflate", Self::Deflate),
        ]
        .into_iter()
        .find_map(|(name, coding)| value.eq_ignore_ascii_case(name).then_some(coding))
    }

    /// The coding that `Accept-Encoding` weighs highest, the first of equals.
    pub(super) fn from_accept_encoding(value: &str) -> Self {
        let mut best = (Self::Identity, 0.0);
        for item in value.split(',') {
            let mut parts = item.split(';').map(str::trim);
            let name = parts.next().unwrap_or_default();
            let weight = parts
                .find_map(|part| part.strip_prefix("q="))
                .map_or(Some(1.0), |weight| weight.parse::<f32>().ok());
            let Some(weight) = weight else { continue };
            let coding = if name.eq_ignore_ascii_case("gzip") {
                Self::Gzip
            } else if name.eq_ignore_ascii_case("deflate") {
                Self::Deflate
            } else if name.eq_ignore_ascii_case("identity") {
                Self::Identity
            } else {
                continue;
            };
            if weight > best.1 {
                best = (coding, weight);
            }
        }
        best.0
    }
}

/// Compresses `pieces`, favouring speed: tensors gain little from more effort.
pub(super) fn compress<'a>(coding: Coding, pieces: impl Iterator<Item = &'a Bytes>) -> Vec<u8> {
    const IN_MEMORY: &str = "writing to memory does not fail";
    match coding {
        Coding::Gzip => {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            for piece in pieces {
                encoder.write_all(piece).expect(IN_MEMORY);
            }
            encoder.finish().expect(IN_MEMORY)
        }
        Coding::Deflate => {
            let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
            for piece in pieces {
                encoder.write_all(piece).expect(IN_MEMORY);
            }
            encoder.finish().expect(IN_MEMORY)
        }
        Coding::Identity => pieces.flatten().copied().collect(),
    }
}

/// Why a body was refused while it was decoded.
#[derive(Debug, PartialEq)]
pub(super) enum DecodeError {
    /// It decodes to more than the limit.
    TooLarge,
    Damaged(String),
}

/// Decodes a body as it arrives and never holds more than the limit.
pub(super) struct Decoder {
    kind: Kind,
}

enum Kind {
    Plain(Capped),
    Gzip(Box<MultiGzDecoder<Capped>>),
    Deflate(Box<Inflate>),
}

impl Decoder {
    /// A decoder into a buffer that already holds `padding` bytes, which do not count.
    pub(super) fn new(coding: Coding, limit: u64, padding: usize) -> Self {
        let capped = Capped {
            bytes: vec![0; padding],
            left: limit,
            exceeded: false,
        };
        let kind = match coding {
            Coding::Identity => Kind::Plain(capped),
            Coding::Gzip => Kind::Gzip(Box::new(MultiGzDecoder::new(capped))),
            Coding::Deflate => Kind::Deflate(Box::new(Inflate {
                stream: None,
                ended: false,
                scratch: [0; 16 << 10],
                capped,
            })),
        };
        Self { kind }
    }

    pub(super) fn push(&mut self, chunk: &[u8]) -> Result<(), DecodeError> {
        match &mut self.kind {
            Kind::Plain(capped) => match capped.write_all(chunk) {
                Ok(()) => Ok(()),
                Err(_) => Err(DecodeError::TooLarge),
            },
            Kind::Gzip(decoder) => decoder.write_all(chunk).map_err(|error| {
                if decoder.get_ref().exceeded {
                    DecodeError::TooLarge
                } else {
                    damaged("gzip", error)
                }
            }),
            Kind::Deflate(inflate) => inflate.push(chunk),
        }
    }

    /// Bytes that are held in memory.
    pub(super) fn held(&self) -> usize {
        match &self.kind {
            Kind::Plain(capped) => capped.bytes.len(),
            Kind::Gzip(decoder) => decoder.get_ref().bytes.len(),
            Kind::Deflate(inflate) => inflate.capped.bytes.len(),
        }
    }

    /// The decoded bytes behind the padding; an error when the stream is not complete.
    pub(super) fn finish(self) -> Result<Vec<u8>, DecodeError> {
        match self.kind {
            Kind::Plain(capped) => Ok(capped.bytes),
            Kind::Gzip(mut decoder) => match decoder.try_finish() {
                Ok(()) => Ok(std::mem::take(&mut decoder.get_mut().bytes)),
                Err(_) if decoder.get_ref().exceeded => Err(DecodeError::TooLarge),
                Err(error) => Err(damaged("gzip", error)),
            },
            Kind::Deflate(inflate) if inflate.ended => Ok(inflate.capped.bytes),
            Kind::Deflate(_) => Err(damaged("deflate", "the stream is not complete")),
        }
    }
}

fn damaged(coding: &str, error: impl std::fmt::Display) -> DecodeError {
    DecodeError::Damaged(format!("the {coding} body cannot be decompressed: {error}"))
}

/// A buffer that refuses to grow past its limit.
struct Capped {
    bytes: Vec<u8>,
    left: u64,
    exceeded: bool,
}

impl Write for Capped {
    fn write(&mut self, chunk: &[u8]) -> io::Result<usize> {
        match self.left.checked_sub(chunk.len() as u64) {
            Some(left) => {
                self.left = left;
                self.bytes.extend_from_slice(chunk);
                Ok(chunk.len())
            }
            None => {
                self.exceeded = true;
                // What was decoded so far is of no use to anybody.
                self.bytes = Vec::new();
                Err(io::Error::other("larger than the limit"))
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `deflate` as HTTP means it (zlib), and as some clients do (bare).
struct Inflate {
    stream: Option<Decompress>,
    ended: bool,
    scratch: [u8; 16 << 10],
    capped: Capped,
}

impl Inflate {
    fn push(&mut self, mut chunk: &[u8]) -> Result<(), DecodeError> {
        let Some(&first) = chunk.first() else {
            return Ok(());
        };
        if self.ended {
            return Err(damaged("deflate", "bytes follow its end"));
        }
        let stream = self.stream.get_or_insert_with(|| {
            // A zlib header begins with method 8; no sensible bare stream does.
            Decompress::new(first & 0x0f == 8)
        });
        loop {
            let before = (stream.total_in(), stream.total_out());
            let status = stream
                .decompress(chunk, &mut self.scratch, FlushDecompress::None)
                .map_err(|error| damaged("deflate", error))?;
            let consumed = (stream.total_in() - before.0) as usize;
            let produced = (stream.total_out() - before.1) as usize;
            self.capped
                .write_all(&self.scratch[..produced])
                .map_err(|_| DecodeError::TooLarge)?;
            chunk = &chunk[consumed..];
            if status == Status::StreamEnd {
                self.ended = true;
                return if chunk.is_empty() {
                    Ok(())
                } else {
                    Err(damaged("deflate", "bytes follow its end"))
                };
            }
            if consumed == 0 && produced == 0 {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(
        coding: Coding,
        body: &[u8],
        limit: u64,
        step: usize,
    ) -> Result<Vec<u8>, DecodeError> {
        let mut decoder = Decoder::new(coding, limit, 0);
        for chunk in body.chunks(step) {
            decoder.push(chunk)?;
        }
        decoder.finish()
    }

    fn compressed(coding: Coding, plain: &[u8]) -> Vec<u8> {
        compress(coding, [Bytes::copy_from_slice(plain)].iter())
    }

    #[test]
    fn limits_are_exact_to_the_byte_in_every_coding() {
        let plain: Vec<u8> = (0..100_000u32).flat_map(|n| n.to_le_bytes()).collect();
        let size = plain.len() as u64;
        for coding in [Coding::Identity, Coding::Gzip, Coding::Deflate] {
            let body = compressed(coding, &plain);
            for step in [1, 7, 1000, body.len()] {
                assert_eq!(decode(coding, &body, size, step).as_deref(), Ok(&plain[..]));
                assert_eq!(
                    decode(coding, &body, size - 1, step),
                    Err(DecodeError::TooLarge)
                );
            }
        }
    }

    #[test]
    fn a_bomb_is_stopped_at_the_limit() {
        let bomb = compressed(Coding::Gzip, &vec![0; 64 << 20]);
        assert!(bomb.len() < 1 << 20);
        assert_eq!(
            decode(Coding::Gzip, &bomb, 1 << 20, bomb.len()),
            Err(DecodeError::TooLarge)
        );
    }

    #[test]
    fn damaged_bodies_are_refused() {
        for coding in [Coding::Gzip, Coding::Deflate] {
            let body = compressed(coding, b"hello hello hello");
            let cut = &body[..body.len() - 1];
            assert!(matches!(
                decode(coding, cut, 100, 5),
                Err(DecodeError::Damaged(_))
            ));
            let mut flipped = body.clone();
            *flipped.last_mut().unwrap() ^= 1;
            assert!(decode(coding, &flipped, 100, 5).is_err());
            let trailing = [&body[..], b"x"].concat();
            assert!(decode(coding, &trailing, 100, 5).is_err());
            assert!(decode(coding, b"not compressed", 100, 5).is_err());
            assert!(decode(coding, b"", 100, 5).is_err());
        }
    }

    #[test]
    fn bare_deflate_and_joined_gzip_members_are_read() {
        let mut bare = flate2::write::DeflateEncoder::new(Vec::new(), Compression::fast());
        bare.write_all(b"hello hello").unwrap();
        let bare = bare.finish().unwrap();
        assert_eq!(
            decode(Coding::Deflate, &bare, 100, 3).as_deref(),
            Ok(&b"hello hello"[..])
        );
        let joined = [
            compressed(Coding::Gzip, b"hello "),
            compressed(Coding::Gzip, b"again"),
        ]
        .concat();
        assert_eq!(
            decode(Coding::Gzip, &joined, 100, 4).as_deref(),
            Ok(&b"hello again"[..])
        );
    }

    #[test]
    fn the_heaviest_accepted_coding_is_used() {
        for (value, coding) in [
            ("", Coding::Identity),
            ("gzip", Coding::Gzip),
            ("deflate", Coding::Deflate),
            ("gzip, deflate, br", Coding::Gzip),
            ("br;q=1.0, gzip;q=0.2, deflate;q=0.9", Coding::Deflate),
            ("identity;q=0.9, gzip;q=0.5", Coding::Identity),
            ("gzip;q=0", Coding::Identity),
            ("gzip;q=x, deflate", Coding::Deflate),
        ] {
            assert_eq!(Coding::from_accept_encoding(value), coding, "{value}");
        }
        assert_eq!(Coding::from_content_encoding(b"GZIP"), Some(Coding::Gzip));
        assert_eq!(Coding::from_content_encoding(b"br"), None);
        assert_eq!(Coding::from_content_encoding(b"gzip, gzip"), None);
    }
}
