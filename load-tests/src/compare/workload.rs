//! Models and requests of a comparison, with the answers that ONNX Runtime itself gives.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use dormouse_client::Tensor;
use serde_json::json;

use super::plan::{Plan, Workload};
use crate::models::{self, BenchModel};
use crate::plain::{self, PlainRuntime};

/// How far answers may differ: batches and threads change the last digits.
const TOLERANCE: f32 = 2e-3;
/// Token ids that are words.
const FIRST_WORD: i64 = 1000;
const WORDS: i64 = 25_000;

/// A request and its right answer.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) workload: Workload,
    pub(crate) model: BenchModel,
    /// The request's folder, with `request.json` and `request.bin`.
    pub(crate) folder: PathBuf,
    expected: Vec<(String, Vec<f32>)>,
}

impl Asked {
    /// What is wrong with an answer.
    pub(crate) fn check(&self, outputs: &[(String, Tensor)]) -> Result<()> {
        for (name, wanted) in &self.expected {
            let found = outputs.iter().find(|(candidate, _)| candidate == name);
            let (_, found) = found.with_context(|| format!("output '{name}' is missing"))?;
            let found = found.to_vec::<f32>()?;
            ensure!(
                found.len() == wanted.len(),
                "output '{name}' has {} numbers instead of {}",
                found.len(),
                wanted.len()
            );
            let places = found.iter().zip(wanted).enumerate();
            for (place, (found, wanted)) in places {
                let allowed = TOLERANCE * wanted.abs().max(1.0);
                ensure!(
                    (found - wanted).abs() <= allowed,
                    "output '{name}' has {found} instead of {wanted} at place {place}"
                );
            }
        }
        Ok(())
    }
}

/// Everything a plan asks for.
#[derive(Debug)]
pub(crate) struct Workloads {
    all: Vec<Asked>,
    models: BTreeMap<String, BenchModel>,
}

impl Workloads {
    /// Finds or makes the models, writes the requests below `scratch`, and runs each once. Blocks.
    pub(crate) fn prepare(plan: &Plan, scratch: &Path) -> Result<Self> {
        let mut names: Vec<&str> = plan.workloads.iter().map(|w| &*w.model).collect();
        if let Some(cold) = &plan.cold {
            names.extend(cold.models.iter().map(String::as_str));
            names.push(&cold.copied);
        }
        names.sort_unstable();
        names.dedup();
        let mut found = BTreeMap::new();
        let mut large = Vec::new();
        for name in names {
            match name {
                "identity" => found.insert(name.to_owned(), BenchModel::identity(scratch)?),
                "tiny" => found.insert(name.to_owned(), BenchModel::tiny(scratch)?),
                _ if models::NAMES.contains(&name) => {
                    large.push(name);
                    None
                }
                _ => bail!(
                    "there is no model '{name}'; there are identity, tiny, {}",
                    models::NAMES.join(", ")
                ),
            };
        }
        for model in models::prepare(&large)? {
            found.insert(model.name.clone(), model);
        }
        let runtime = PlainRuntime::load(&plain::library()?)?;
        let mut all = Vec::new();
        let mut workloads = plan.workloads.clone();
        let cold_models = plan.cold.iter().flat_map(|cold| {
            let copied = std::iter::once(&cold.copied);
            cold.models.iter().chain(copied)
        });
        for name in cold_models {
            if !workloads.iter().any(|workload| workload.model == *name) {
                workloads.push(Workload {
                    name: name.clone(),
                    model: name.clone(),
                    tokens: None,
                });
            }
        }
        for workload in workloads {
            let model = &found[&workload.model];
            let asked = prepare(&workload, model, (runtime, scratch))
                .with_context(|| format!("workload '{}'", workload.name))?;
            all.push(asked);
        }
        Ok(Self { all, models: found })
    }

    /// A workload by its name.
    pub(crate) fn named(&self, name: &str) -> Result<&Asked> {
        let mut all = self.all.iter();
        all.find(|asked| asked.workload.name == name)
            .with_context(|| format!("there is no workload '{name}'"))
    }

    /// The first workload of a model.
    pub(crate) fn of_model(&self, model: &str) -> Result<&Asked> {
        let mut all = self.all.iter();
        all.find(|asked| asked.workload.model == model)
            .with_context(|| format!("nothing is asked of model '{model}'"))
    }

    /// A model by its name.
    pub(crate) fn model(&self, name: &str) -> Result<&BenchModel> {
        self.models
            .get(name)
            .with_context(|| format!("there is no model '{name}'"))
    }
}

fn prepare(
    workload: &Workload,
    model: &BenchModel,
    (runtime, scratch): (PlainRuntime, &Path),
) -> Result<Asked> {
    let mut model = model.clone();
    if let Some(tokens) = workload.tokens {
        set_length(&mut model, tokens)?;
    }
    let folder = scratch.join("requests").join(&workload.name);
    fs::create_dir_all(&folder)?;
    let mut described = Vec::new();
    let mut data = Vec::new();
    for (name, tensor) in &model.inputs {
        described.push(json!({
            "name": name,
            "datatype": tensor.datatype().to_string(),
            "shape": tensor.shape(),
        }));
        data.extend_from_slice(tensor.data());
    }
    let document = json!({ "inputs": described });
    fs::write(folder.join("request.json"), document.to_string())?;
    fs::write(folder.join("request.bin"), data)?;
    let mut expected = Vec::new();
    let session = runtime.open(&model.file())?;
    session.run(&model.inputs, |output| {
        expected.push((output.name.to_owned(), output.values.to_vec()));
    })?;
    Ok(Asked {
        workload: workload.clone(),
        model,
        folder,
        expected,
    })
}

/// Other inputs for a model of sequences: as many words, all of one sentence.
fn set_length(model: &mut BenchModel, tokens: usize) -> Result<()> {
    let length = i64::try_from(tokens)?;
    for (name, tensor) in &mut model.inputs {
        let value: fn(i64) -> i64 = match name.as_str() {
            // Spread, so that rows of the embedding are not neighbours.
            "input_ids" => |place| FIRST_WORD + (place * 7919) % WORDS,
            "attention_mask" => |_| 1,
            "token_type_ids" => |_| 0,
            other => bail!("tokens: input '{other}' is not one of a model of sequences"),
        };
        let values: Vec<i64> = (0..length).map(value).collect();
        *tensor = Tensor::from_vec([1, length], values)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[f32]) -> Tensor {
        Tensor::from_slice([values.len() as i64], values).unwrap()
    }

    #[test]
    fn answers_that_differ_are_told_with_their_place() {
        let folder = tempfile::tempdir().unwrap();
        let asked = Asked {
            workload: Workload {
                name: "w".to_owned(),
                model: "tiny".to_owned(),
                tokens: None,
            },
            model: BenchModel::tiny(folder.path()).unwrap(),
            folder: folder.path().to_owned(),
            expected: vec![("Y".to_owned(), vec![1.0, 100.0])],
        };
        let check = |name: &str, values: &[f32]| {
            let outputs = [(name.to_owned(), tensor(values))];
            asked.check(&outputs).map_err(|error| error.to_string())
        };
        check("Y", &[1.001, 100.1]).unwrap();
        assert!(
            check("Y", &[1.0, 101.0])
                .unwrap_err()
                .contains("at place 1")
        );
        assert!(check("Y", &[f32::NAN, 100.0]).unwrap_err().contains("NaN"));
        assert!(check("Y", &[1.0]).unwrap_err().contains("1 numbers"));
        assert!(check("Z", &[1.0, 100.0]).unwrap_err().contains("missing"));
    }

    #[test]
    fn only_models_of_sequences_have_a_length() {
        let folder = tempfile::tempdir().unwrap();
        let mut model = BenchModel::tiny(folder.path()).unwrap();
        let error = set_length(&mut model, 8).unwrap_err().to_string();
        assert!(error.contains("input 'X'"), "{error}");
        model.inputs = vec![("input_ids".to_owned(), tensor(&[0.0]))];
        set_length(&mut model, 3).unwrap();
        assert_eq!(model.inputs[0].1.shape(), [1, 3]);
        assert_eq!(
            model.inputs[0].1.to_vec::<i64>().unwrap(),
            [1000, 8919, 16838]
        );
    }
}
