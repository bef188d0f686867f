//! Follows an HTTP/2 client's frames, without their contents.

/// Length, kind, flags and stream.
const HEAD: usize = 9;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

/// How far a client is in its frames and in a request's headers, which may take several.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Frames {
    head: [u8; HEAD],
    head_length: usize,
    payload_left: usize,
    /// Headers have begun and not ended.
    within_headers: bool,
    /// The frame being read is the last of its request's headers.
    ends_headers: bool,
}

/// What some bytes have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Followed {
    /// Some headers came to their end.
    pub headers_ended: bool,
    /// The bytes end within headers.
    pub within_headers: bool,
}

impl Frames {
    /// Takes the next bytes that come after the connection's preface.
    pub(super) fn follow(&mut self, mut bytes: &[u8]) -> Followed {
        let mut headers_ended = false;
        while !bytes.is_empty() {
            if self.head_length < HEAD {
                let length = bytes.len().min(HEAD - self.head_length);
                self.head[self.head_length..][..length].copy_from_slice(&bytes[..length]);
                self.head_length += length;
                bytes = &bytes[length..];
                if self.head_length < HEAD {
                    break;
                }
                self.begin();
            }
            let length = bytes.len().min(self.payload_left);
            self.payload_left -= length;
            bytes = &bytes[length..];
            if self.payload_left == 0 {
                self.head_length = 0;
                if self.ends_headers {
                    headers_ended = true;
                    self.within_headers = false;
                }
            }
        }
        Followed {
            headers_ended,
            within_headers: self.within_headers,
        }
    }

    fn begin(&mut self) {
        let [long, middle, short, kind, flags, ..] = self.head;
        self.payload_left = usize::from(long) << 16 | usize::from(middle) << 8 | usize::from(short);
        let has_headers = matches!(kind, HEADERS | CONTINUATION);
        self.within_headers |= has_headers;
        self.ends_headers = has_headers && flags & END_HEADERS != 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let [.., long, middle, short] = payload.to_be_bytes();
        let mut bytes = vec![long, middle, short, kind, flags, 0, 0, 0, 1];
        bytes.resize(HEAD + payload, 0xff);
        bytes
    }

    #[test]
    fn headers_are_seen_however_the_bytes_are_cut() {
        let client = [
            frame(4, 0, 0),
            frame(HEADERS, 0, 300),
            frame(CONTINUATION, 0, 0),
            frame(CONTINUATION, END_HEADERS, 20),
            frame(0, END_HEADERS, 70_000),
            frame(HEADERS, END_HEADERS, 0),
            frame(6, 0, 8),
        ];
        let lengths: Vec<usize> = client.iter().map(Vec::len).collect();
        let bytes = client.concat();
        // From the head of the first HEADERS frame to the end of its last continuation.
        let begins = lengths[0] + HEAD;
        let ends = lengths[..4].iter().sum::<usize>();
        for step in [1, 2, 7, 9, 10, 100, 1000] {
            let mut frames = Frames::default();
            let mut ended = 0;
            for (index, part) in bytes.chunks(step).enumerate() {
                let seen = index * step + part.len();
                let followed = frames.follow(part);
                ended += u32::from(followed.headers_ended);
                assert_eq!(
                    followed.within_headers,
                    (begins..ends).contains(&seen),
                    "{seen} bytes, {step} at a time"
                );
            }
            assert_eq!(ended, 2, "{step} bytes at a time");
        }
        let mut frames = Frames::default();
        let all = frames.follow(&bytes);
        assert!(all.headers_ended && !all.within_headers);
    }
}
