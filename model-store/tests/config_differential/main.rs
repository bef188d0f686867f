//! Our reader of `config.pbtxt` against protobuf's own.
//!
//! Every text below `tests/configs` and some thousand random ones are read by both; they must
//! agree on which are configurations and on what those say. Where Python's reader is known to
//! differ from the C++ one that Triton uses, `tests/configs/differs` records what we do.

#![expect(
    clippy::unwrap_used,
    reason = "what a test's helper cannot do fails the test"
)]

mod generate;
mod python;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use dormouse_model_store::config::json::{from_json, to_json};
use dormouse_model_store::config::text::parse;
use dormouse_proto::FILE_DESCRIPTOR_SET;
use dormouse_proto::inference as pb;
use generate::Dice;
use prost::Message;
use prost_reflect::{DynamicMessage, Kind, MessageDescriptor, ReflectMessage, Value};

const PROTOBUF: &str = "protobuf==7.36.2";
const RANDOM_TEXTS: u64 = 500;

/// What protobuf's reader makes of each text.
fn python_parse(texts: &[String]) -> Vec<Result<pb::ModelConfig, String>> {
    let python = python::interpreter("protobuf", &[PROTOBUF]);
    let mut input = Vec::new();
    let mut frame = |bytes: &[u8]| {
        input.extend_from_slice(&u32::try_from(bytes.len()).unwrap().to_le_bytes());
        input.extend_from_slice(bytes);
    };
    frame(FILE_DESCRIPTOR_SET);
    texts.iter().for_each(|text| frame(text.as_bytes()));
    let mut child = Command::new(python)
        .args(["-c", include_str!("oracle.py")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "the Python reader failed");
    let mut rest = &output.stdout[..];
    let mut answers = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        let (answer, after) = after.split_at(u32::from_le_bytes(*length) as usize);
        rest = after;
        answers.push(match answer.split_first().unwrap() {
            (b'+', bytes) => Ok(pb::ModelConfig::decode(bytes).unwrap()),
            (_, error) => Err(String::from_utf8_lossy(error).into_owned()),
        });
    }
    assert_eq!(answers.len(), texts.len(), "one answer for each text");
    answers
}

/// The texts of one folder of the corpus, by file name.
fn corpus(folder: &str) -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/configs")
        .join(folder);
    let mut files: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "pbtxt")
        })
        .map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, fs::read_to_string(&path).unwrap())
        })
        .collect();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    files.sort();
    files
}

/// Fails unless both readers agree about every text.
fn assert_agreement(named: &[(String, String)]) -> usize {
    let texts: Vec<_> = named.iter().map(|(_, text)| text.clone()).collect();
    let mut read = 0;
    for ((name, text), theirs) in named.iter().zip(python_parse(&texts)) {
        match (parse(text), theirs) {
            (Ok(ours), Ok(theirs)) => {
                read += 1;
                // As JSON, since two NaN are not equal otherwise.
                assert_eq!(to_json(&ours), to_json(&theirs), "{name}:\n{text}");
            }
            (Err(_), Err(_)) => {}
            (Ok(_), Err(error)) => panic!("{name} is refused by protobuf: {error}\n{text}"),
            (Err(error), Ok(_)) => panic!("{name} is read by protobuf, not by us: {error}\n{text}"),
        }
    }
    read
}

#[test]
fn the_corpus_is_read_as_protobuf_reads_it() {
    let valid = corpus("valid");
    assert_eq!(
        assert_agreement(&valid),
        valid.len(),
        "every valid file is read"
    );
    assert_eq!(
        assert_agreement(&corpus("invalid")),
        0,
        "no invalid file is read"
    );
}

#[test]
fn known_differences_are_still_there() {
    let files = corpus("differs");
    let texts: Vec<_> = files.iter().map(|(_, text)| text.clone()).collect();
    for ((name, text), theirs) in files.iter().zip(python_parse(&texts)) {
        let ours = parse(text);
        // The first line says what we do and why.
        let accepted = text.starts_with("# accepted: ");
        assert!(
            accepted || text.starts_with("# refused: "),
            "{name} states no verdict"
        );
        assert_eq!(ours.is_ok(), accepted, "{name}: {ours:?}");
        let same = match (&ours, &theirs) {
            (Ok(ours), Ok(theirs)) => to_json(ours) == to_json(theirs),
            (ours, theirs) => ours.is_err() && theirs.is_err(),
        };
        assert!(
            !same,
            "{name} no longer differs: move it to the other folders"
        );
    }
}

#[test]
fn random_configurations_are_read_as_protobuf_reads_them() {
    let texts: Vec<_> = (0..RANDOM_TEXTS)
        .map(|seed| {
            let dice = &mut Dice(seed);
            let tokens = generate::tokens(dice);
            (format!("seed {seed}"), generate::spell(dice, &tokens))
        })
        .collect();
    assert_eq!(
        assert_agreement(&texts),
        texts.len(),
        "every generated text is valid"
    );
}

#[test]
fn damaged_configurations_are_judged_as_protobuf_judges_them() {
    let texts: Vec<_> = (0..RANDOM_TEXTS)
        .map(|seed| {
            let dice = &mut Dice(seed ^ 0xdead_beef);
            let mut tokens = generate::tokens(dice);
            generate::damage(dice, &mut tokens);
            (format!("damaged, seed {seed}"), tokens.join(" "))
        })
        .collect();
    let read = assert_agreement(&texts);
    assert!(
        read < texts.len() * 3 / 4,
        "most damage is noticed, {read} were read"
    );
}

#[test]
fn json_keeps_every_configuration() {
    for seed in 0..RANDOM_TEXTS {
        let dice = &mut Dice(seed);
        let tokens = generate::tokens(dice);
        let config = parse(&tokens.join(" ")).unwrap();
        let json = to_json(&config);
        let back = from_json(&json.to_string())
            .unwrap_or_else(|error| panic!("seed {seed}: {error}\n{json}"));
        assert_eq!(to_json(&back), json, "seed {seed}");
        if !json.to_string().contains("\"NaN\"") {
            assert_eq!(back, config, "seed {seed}");
        }
    }
}

#[test]
fn the_corpus_sets_every_field_of_the_schema() {
    let mut wanted = BTreeSet::new();
    collect_schema(&generate::model_config(), &mut wanted);
    for (_, text) in corpus("valid") {
        let mut message = DynamicMessage::new(generate::model_config());
        message.transcode_from(&parse(&text).unwrap()).unwrap();
        remove_set(&message, &mut wanted);
    }
    assert!(wanted.is_empty(), "no file sets {wanted:?}");
}

fn collect_schema(message: &MessageDescriptor, names: &mut BTreeSet<String>) {
    for field in message.fields() {
        if names.insert(field.full_name().to_owned())
            && let Kind::Message(inner) = field.kind()
        {
            collect_schema(&inner, names);
        }
    }
}

fn remove_set(message: &DynamicMessage, names: &mut BTreeSet<String>) {
    for (field, value) in message.fields() {
        names.remove(field.full_name());
        if field.is_map() {
            let Kind::Message(entry) = field.kind() else {
                continue;
            };
            for part in entry.fields() {
                names.remove(part.full_name());
            }
        }
        let inner: Vec<&Value> = match value {
            Value::List(values) => values.iter().collect(),
            Value::Map(values) => values.values().collect(),
            value => vec![value],
        };
        for message in inner.into_iter().filter_map(Value::as_message) {
            assert!(!message.descriptor().is_map_entry());
            remove_set(message, names);
        }
    }
}
