//! What a prepared model depends on, as one digest.

use std::fmt;
use std::str::FromStr;

use super::digest::{Digest, InvalidDigest};

/// Everything that a prepared model depends on: with any of it changed, another one is needed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyParts {
    /// The source's files by the names the graph gives them; their order does not matter.
    pub sources: Vec<(String, Digest)>,
    /// The engine and its build.
    pub engine: String,
    /// The execution provider.
    pub provider: String,
    /// The features of the processor that the engine's choices depend on.
    pub cpu: String,
    /// The session options that the engine's choices depend on.
    pub options: String,
}

impl KeyParts {
    pub fn key(&self) -> EntryKey {
        let mut hasher = blake3::Hasher::new_derive_key("dormouse prepared model 1");
        let mut field = |bytes: &[u8]| {
            // With its length ahead no two lists of fields read the same.
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        for text in [&self.engine, &self.provider, &self.cpu, &self.options] {
            field(text.as_bytes());
        }
        let mut sources: Vec<_> = self.sources.iter().collect();
        sources.sort_unstable();
        for (name, digest) in sources {
            field(name.as_bytes());
            field(digest.as_bytes());
        }
        EntryKey(Digest::from_bytes(hasher.finalize().into()))
    }
}

/// Names a prepared model in the store.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct EntryKey(Digest);

impl EntryKey {
    /// Enough of it for a person to tell it from others.
    pub fn short(&self) -> String {
        let mut text = self.0.to_string();
        text.truncate(12);
        text
    }
}

impl fmt::Display for EntryKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for EntryKey {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        text.parse().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> KeyParts {
        let source = |name: &str| (name.to_owned(), Digest::of(name.as_bytes()));
        KeyParts {
            sources: vec![source("model.onnx"), source("weights.bin")],
            engine: "onnxruntime 1.31".to_owned(),
            provider: "cpu".to_owned(),
            cpu: "avx2".to_owned(),
            options: "level=all".to_owned(),
        }
    }

    #[test]
    fn every_part_of_a_key_matters() {
        let changes: [fn(&mut KeyParts); 7] = [
            |parts| parts.sources[0].0.push('x'),
            |parts| parts.sources[0].1 = Digest::of(b"other"),
            |parts| drop(parts.sources.pop()),
            |parts| parts.engine.push('x'),
            |parts| parts.provider.push('x'),
            |parts| parts.cpu.push('x'),
            |parts| parts.options.push('x'),
        ];
        let mut keys = vec![parts().key()];
        for change in changes {
            let mut changed = parts();
            change(&mut changed);
            keys.push(changed.key());
        }
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 8);
    }

    #[test]
    fn text_moved_from_one_part_to_the_next_is_another_key() {
        let moved = KeyParts {
            engine: "onnxruntime 1.31c".to_owned(),
            provider: "pu".to_owned(),
            ..parts()
        };
        assert_ne!(moved.key(), parts().key());
    }

    #[test]
    fn the_order_of_sources_does_not_matter() {
        let mut turned = parts();
        turned.sources.reverse();
        assert_eq!(turned.key(), parts().key());
    }
}
