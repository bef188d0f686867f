//! Requests that were recorded, with their answers: one, or a folder of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use dormouse_client::Tensor;

use super::MOST_BYTES;
use crate::drive::connect::{header_tensors, tensors_from_json};

/// Requests of one folder.
const MOST_PAIRS: usize = 10_000;

/// Tensors by name.
type Tensors = Vec<(String, Tensor)>;

/// A request and, if it is known, its answer.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) inputs: Tensors,
    pub(super) outputs: Option<Tensors>,
}

/// What is at `path`: a v2 JSON request, a folder with `request.json`, or a folder of pairs, each
/// `NAME_request.json` with `NAME_response.json` or a folder with `request.json` and
/// `response.json`. Pairs come in the order of their names.
pub(super) fn read(path: &Path, expected: Option<&Path>) -> Result<Vec<Pair>> {
    if !path.is_dir() || path.join("request.json").exists() {
        let outputs = expected.map(|path| tensors(path, "response", "outputs"));
        return Ok(vec![Pair {
            inputs: tensors(path, "request", "inputs")?,
            outputs: outputs.transpose()?,
        }]);
    }
    ensure!(
        expected.is_none(),
        "expected: {} is a folder of requests, which has the answers, too",
        path.display()
    );
    let files = files(path)?;
    let mut bytes = 0usize;
    let mut pairs = Vec::with_capacity(files.len());
    for (request, response) in files.values() {
        let inputs = tensors(request, "request", "inputs")?;
        let outputs = response.as_deref();
        let outputs = outputs.map(|path| tensors(path, "response", "outputs"));
        let outputs = outputs.transpose()?;
        let all = inputs.iter().chain(outputs.iter().flatten());
        bytes = all.fold(bytes, |sum, (_, tensor)| {
            sum.saturating_add(tensor.data().len())
        });
        ensure!(
            bytes <= MOST_BYTES,
            "the tensors in {} take more than {} MiB",
            path.display(),
            MOST_BYTES >> 20
        );
        pairs.push(Pair { inputs, outputs });
    }
    Ok(pairs)
}

/// Where requests and their responses are, by the name that they share.
fn files(folder: &Path) -> Result<BTreeMap<String, (PathBuf, Option<PathBuf>)>> {
    let told = || format!("cannot read {}", folder.display());
    let mut requests = BTreeMap::new();
    let mut responses = BTreeMap::new();
    for entry in std::fs::read_dir(folder).with_context(told)? {
        let path = entry.with_context(told)?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        if path.is_dir() {
            if path.join("request.json").exists() {
                requests.insert(name.to_owned(), path.clone());
            }
            if path.join("response.json").exists() {
                responses.insert(name.to_owned(), path.clone());
            }
        } else if let Some(name) = name.strip_suffix("_request.json") {
            requests.insert(name.to_owned(), path.clone());
        } else if let Some(name) = name.strip_suffix("_response.json") {
            responses.insert(name.to_owned(), path.clone());
        }
    }
    ensure!(
        (1..=MOST_PAIRS).contains(&requests.len()),
        "{} has {} requests, as NAME_request.json or NAME/request.json; 1 to {MOST_PAIRS} are needed",
        folder.display(),
        requests.len()
    );
    let lonely = responses.keys().find(|name| !requests.contains_key(*name));
    if let Some(name) = lonely {
        anyhow::bail!(
            "{}: '{name}' has a response and no request",
            folder.display()
        );
    }
    // A response that was forgotten would look like one that was right.
    if !responses.is_empty() {
        let lacking = requests.keys().find(|name| !responses.contains_key(*name));
        if let Some(name) = lacking {
            anyhow::bail!(
                "{}: '{name}' has no response, others have one",
                folder.display()
            );
        }
    }
    let pairs = requests.into_iter().map(|(name, request)| {
        let response = responses.remove(&name);
        (name, (request, response))
    });
    Ok(pairs.collect())
}

/// Tensors from a v2 JSON file, or from a folder with `NAME.json`, whose data may be in `NAME.bin`.
fn tensors(path: &Path, name: &str, key: &str) -> Result<Tensors> {
    let read = |path: &Path| {
        std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let tensors = if path.is_dir() {
        let data = path.join(format!("{name}.bin"));
        let document = read(&path.join(format!("{name}.json")))?;
        match data.exists() {
            true => header_tensors(&document, read(&data)?.into(), key),
            false => tensors_from_json(&document, Bytes::new(), key),
        }
    } else {
        tensors_from_json(&read(path)?, Bytes::new(), key)
    };
    tensors.with_context(|| format!("cannot use {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(key: &str, value: f32) -> String {
        format!(
            "{{\"{key}\":[{{\"name\":\"x\",\"datatype\":\"FP32\",\"shape\":[1],\"data\":[{value}]}}]}}"
        )
    }

    fn values(tensors: &Tensors) -> Vec<f32> {
        tensors[0].1.to_vec().unwrap()
    }

    #[test]
    fn recorded_tensors_are_read_from_files_and_folders() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("one.json");
        std::fs::write(&file, document("inputs", 2.0)).unwrap();
        let [pair] = &read(&file, None).unwrap()[..] else {
            panic!("one request");
        };
        assert_eq!(values(&pair.inputs), [2.0]);
        assert!(pair.outputs.is_none());
        let described = r#"{"inputs":[{"name":"x","datatype":"UINT8","shape":[2]}]}"#;
        std::fs::write(folder.path().join("request.json"), described).unwrap();
        std::fs::write(folder.path().join("request.bin"), [7, 8]).unwrap();
        let pairs = read(folder.path(), None).unwrap();
        assert_eq!(pairs[0].inputs[0].1.to_vec::<u8>().unwrap(), [7, 8]);
        let error = read(&folder.path().join("none.json"), None);
        assert!(format!("{:#}", error.unwrap_err()).contains("none.json"));
    }

    #[test]
    fn a_folder_has_pairs_in_the_order_of_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let complaint = || format!("{:#}", read(folder.path(), None).unwrap_err());
        write("notes.txt", "");
        assert!(complaint().contains("has 0 requests"), "{}", complaint());
        write("b_request.json", &document("inputs", 2.0));
        write("a/request.json", &document("inputs", 1.0));
        write("c_request.json", &document("inputs", 3.0));
        let pairs = read(folder.path(), None).unwrap();
        let inputs: Vec<_> = pairs.iter().map(|pair| values(&pair.inputs)).collect();
        assert_eq!(inputs, [[1.0], [2.0], [3.0]]);
        assert!(pairs.iter().all(|pair| pair.outputs.is_none()));
        write("a/response.json", &document("outputs", 10.0));
        write("b_response.json", &document("outputs", 20.0));
        assert!(
            complaint().contains("'c' has no response"),
            "{}",
            complaint()
        );
        write("c_response.json", &document("outputs", 30.0));
        let pairs = read(folder.path(), None).unwrap();
        let outputs = pairs
            .iter()
            .map(|pair| values(pair.outputs.as_ref().unwrap()));
        assert_eq!(outputs.collect::<Vec<_>>(), [[10.0], [20.0], [30.0]]);
        write("d_response.json", &document("outputs", 40.0));
        assert!(complaint().contains("'d' has a response and no request"));
        let error = read(folder.path(), Some(Path::new("x.json"))).unwrap_err();
        assert!(
            error.to_string().contains("has the answers, too"),
            "{error}"
        );
    }
}
