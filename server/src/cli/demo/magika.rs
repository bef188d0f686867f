//! Magika's own preparation of files and reading of scores, after its `config.min.json`, and its
//! knowledge of which labels are text, in `content_types_kb.min.json`.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use anyhow::{Context, ensure};

/// More than any model of this family asks for.
const MAX_BLOCK: usize = 1 << 20;

/// The model's `config.min.json`, as far as it is used here.
#[derive(Debug, serde::Deserialize)]
struct Config {
    beg_size: usize,
    mid_size: usize,
    end_size: usize,
    use_inputs_at_offsets: bool,
    medium_confidence_threshold: f64,
    min_file_size_for_dl: usize,
    padding_token: i32,
    block_size: usize,
    target_labels_space: Vec<String>,
    thresholds: HashMap<String, f64>,
    overwrite_map: HashMap<String, String>,
}

/// What a label means, as far as it is used here.
#[derive(Clone, Copy, Debug, serde::Deserialize)]
struct ContentType {
    is_text: bool,
}

/// How files become tensors and scores become labels.
#[derive(Debug)]
pub(super) struct Magika {
    config: Config,
    content_types: HashMap<String, ContentType>,
}

/// A file, ready for the model, or known without it.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Prepared {
    Features(Vec<i32>),
    Answer(Answer),
}

/// What kind a file is.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answer {
    pub(super) label: String,
    /// None when the model was not needed.
    pub(super) score: Option<f32>,
}

impl Answer {
    fn known(label: &str) -> Self {
        Self {
            label: label.to_owned(),
            score: None,
        }
    }
}

impl Magika {
    /// Reads the model's configuration and the meaning of its labels.
    pub(super) fn open(config: &Path, content_types: &Path) -> anyhow::Result<Self> {
        let read = |path: &Path| {
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
        };
        Self::parse(&read(config)?, &read(content_types)?).with_context(|| {
            let (config, types) = (config.display(), content_types.display());
            format!("{config} and {types} cannot be used")
        })
    }

    pub(super) fn parse(config: &str, content_types: &str) -> anyhow::Result<Self> {
        let config: Config = serde_json::from_str(config)?;
        let content_types = serde_json::from_str(content_types)?;
        ensure!(
            config.mid_size == 0 && !config.use_inputs_at_offsets,
            "the model wants bytes from the middle of files or at offsets, which is not done here"
        );
        ensure!(
            (1..=MAX_BLOCK).contains(&config.block_size)
                && (1..=config.block_size).contains(&config.beg_size)
                && config.end_size <= config.block_size,
            "beg_size {} and end_size {} must fit block_size {}, and that {MAX_BLOCK}",
            config.beg_size,
            config.end_size,
            config.block_size,
        );
        ensure!(
            (1..=config.beg_size).contains(&config.min_file_size_for_dl),
            "min_file_size_for_dl {} must be within beg_size {}",
            config.min_file_size_for_dl,
            config.beg_size,
        );
        Ok(Self {
            config,
            content_types,
        })
    }

    /// How many elements a file has for the model.
    pub(super) fn feature_count(&self) -> usize {
        self.config.beg_size + self.config.end_size
    }

    /// How many scores the model answers with.
    pub(super) fn label_count(&self) -> usize {
        self.config.target_labels_space.len()
    }

    /// Reads the beginning and the end of a file.
    pub(super) fn prepare(&self, path: &Path) -> io::Result<Prepared> {
        let mut file = File::open(path)?;
        let kind = file.metadata()?;
        if kind.is_dir() {
            return Ok(Prepared::Answer(Answer::known("directory")));
        }
        if !kind.is_file() {
            return Ok(Prepared::Answer(Answer::known("unknown")));
        }
        let block = kind.len().min(self.config.block_size as u64);
        let mut beginning = vec![0; block as usize];
        file.read_exact(&mut beginning)?;
        let mut end = vec![0; block as usize];
        file.seek(SeekFrom::Start(kind.len() - block))?;
        file.read_exact(&mut end)?;
        Ok(self.features(&beginning, &end))
    }

    /// Prepares the first and the last block of a file.
    fn features(&self, beginning: &[u8], end: &[u8]) -> Prepared {
        if beginning.is_empty() {
            return Prepared::Answer(Answer::known("empty"));
        }
        let leading = beginning.iter().take_while(|byte| is_space(**byte)).count();
        let stripped = &beginning[leading..];
        // Too few bytes for the model to say anything, before or after stripping.
        let least = self.config.min_file_size_for_dl;
        if beginning.len() < least || stripped.len() < least {
            let is_text = str::from_utf8(beginning).is_ok();
            return Prepared::Answer(Answer::known(if is_text { "txt" } else { "unknown" }));
        }
        let trailing = end.iter().rev().take_while(|byte| is_space(**byte)).count();
        let ending = &end[..end.len() - trailing];
        let ending = &ending[ending.len().saturating_sub(self.config.end_size)..];
        let stripped = &stripped[..stripped.len().min(self.config.beg_size)];

        let mut features = vec![self.config.padding_token; self.feature_count()];
        for (feature, byte) in features.iter_mut().zip(stripped) {
            *feature = i32::from(*byte);
        }
        // The end is aligned to the end.
        let at = features.len() - ending.len();
        for (feature, byte) in features[at..].iter_mut().zip(ending) {
            *feature = i32::from(*byte);
        }
        Prepared::Features(features)
    }

    /// The label that the model's scores stand for.
    pub(super) fn answer(&self, scores: &[f32]) -> anyhow::Result<Answer> {
        let labels = &self.config.target_labels_space;
        ensure!(
            scores.len() == labels.len() && !labels.is_empty(),
            "the model answered with {} scores for {} labels",
            scores.len(),
            labels.len(),
        );
        // The first of equals, as the reference has it.
        let mut best = 0;
        for (index, score) in scores.iter().enumerate() {
            if *score > scores[best] {
                best = index;
            }
        }
        let (guess, score) = (&labels[best], scores[best]);
        let label = self.config.overwrite_map.get(guess).unwrap_or(guess);
        let threshold = self.config.thresholds.get(guess);
        let threshold = threshold.unwrap_or(&self.config.medium_confidence_threshold);
        let label = if f64::from(score) >= *threshold {
            label
        } else if self
            .content_types
            .get(label)
            .is_some_and(|kind| kind.is_text)
        {
            "txt"
        } else {
            "unknown"
        };
        Ok(Answer {
            label: label.to_owned(),
            score: Some(score),
        })
    }
}

/// Whitespace as Python strips it from bytes, vertical tab included.
fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t'..=b'\r')
}

/// A model of 12 bytes from the beginning, 8 from the end, and six labels.
#[cfg(test)]
pub(super) const TEST_CONFIG: &str = r#"{
    "beg_size": 12, "mid_size": 0, "end_size": 8, "use_inputs_at_offsets": false,
    "medium_confidence_threshold": 0.5, "min_file_size_for_dl": 4, "padding_token": 256,
    "block_size": 16, "target_labels_space": ["elf", "markdown", "png", "randombytes", "randomtxt", "rust"],
    "thresholds": {"markdown": 0.75}, "overwrite_map": {"randombytes": "unknown", "randomtxt": "txt"},
    "protection": "none", "aes_key_hex": "", "version_major": 3
}"#;

/// Which of the six are text.
#[cfg(test)]
pub(super) const TEST_TYPES: &str = r#"{
    "elf": {"is_text": false}, "markdown": {"is_text": true, "group": "text"},
    "png": {"is_text": false}, "randombytes": {"is_text": false}, "randomtxt": {"is_text": true},
    "rust": {"is_text": true}, "txt": {"is_text": true}, "unknown": {"is_text": false}
}"#;

#[cfg(test)]
mod tests {
    use super::*;

    fn magika() -> Magika {
        Magika::parse(TEST_CONFIG, TEST_TYPES).unwrap()
    }

    fn prepared(content: &[u8]) -> Prepared {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, content).unwrap();
        magika().prepare(&path).unwrap()
    }

    fn features(content: &[u8]) -> Vec<i32> {
        match prepared(content) {
            Prepared::Features(features) => features,
            Prepared::Answer(answer) => panic!("{answer:?}"),
        }
    }

    #[test]
    fn short_files_are_padded_between_beginning_and_end() {
        let mut expected = vec![256; 20];
        expected[..5].copy_from_slice(&b"ab cd".map(i32::from));
        expected[15..].copy_from_slice(&b"ab cd".map(i32::from));
        // The end keeps its leading blanks, the beginning its trailing ones.
        expected[5] = i32::from(b'\n');
        expected[14] = 0x0b;
        assert_eq!(features(b"\x0bab cd\n"), expected);
    }

    #[test]
    fn long_files_are_cut_after_stripping() {
        let content: Vec<u8> = (b'A'..=b'Z').collect();
        let padded = [b"  ".as_slice(), &content, b" \t".as_slice()].concat();
        let expected: Vec<i32> = b"ABCDEFGHIJKLSTUVWXYZ"
            .iter()
            .map(|b| i32::from(*b))
            .collect();
        assert_eq!(features(&padded), expected);
        assert_eq!(features(&content), expected);
    }

    #[test]
    fn files_with_too_little_in_them_need_no_model() {
        let label = |content: &[u8]| match prepared(content) {
            Prepared::Answer(answer) => answer.label,
            Prepared::Features(_) => "model".to_owned(),
        };
        assert_eq!(label(b""), "empty");
        assert_eq!(label(b"abc"), "txt");
        assert_eq!(label(b"      abc"), "txt");
        assert_eq!(label(b"ab\xff"), "unknown");
        assert_eq!(label(b"abcd"), "model");
        let directory = magika().prepare(Path::new(".")).unwrap();
        assert_eq!(directory, Prepared::Answer(Answer::known("directory")));
    }

    #[test]
    fn guesses_that_are_not_trusted_become_general() {
        let label = |index: usize, score: f32| {
            let mut scores = [0.0; 6];
            scores[index] = score;
            magika().answer(&scores).unwrap().label
        };
        assert_eq!(label(5, 0.9), "rust");
        assert_eq!(label(5, 0.4), "txt");
        assert_eq!(label(0, 0.4), "unknown");
        assert_eq!(label(1, 0.7), "txt");
        assert_eq!(label(1, 0.75), "markdown");
        assert_eq!(label(3, 0.9), "unknown");
        assert_eq!(label(3, 0.1), "unknown");
        assert_eq!(label(4, 0.9), "txt");
        assert!(magika().answer(&[1.0]).is_err());
    }

    #[test]
    fn configurations_that_ask_for_more_are_refused() {
        let changed =
            |from: &str, to: &str| Magika::parse(&TEST_CONFIG.replace(from, to), TEST_TYPES);
        assert!(changed("aes", "aes").is_ok());
        assert!(changed("\"mid_size\": 0", "\"mid_size\": 4").is_err());
        assert!(changed("\"beg_size\": 12", "\"beg_size\": 17").is_err());
        assert!(changed("\"block_size\": 16", "\"block_size\": 99999999999").is_err());
        assert!(changed("\"min_file_size_for_dl\": 4", "\"min_file_size_for_dl\": 0").is_err());
    }
}
