//! Which tensors of safetensors files are which of a graph.

use std::collections::{HashMap, HashSet};

use super::{StoredTensor, told};
use crate::graph::{ExternalData, GraphTensor, GraphType};
use crate::manifest::ElementType;
use crate::names::NameError;
use crate::onnx::{
    NewInitializer, Rewrite, SiteData, Walked, element_name, element_number, element_type, shown,
};

/// How many names a message lists.
const LISTED: usize = 5;

/// Why a graph cannot be given tensors of safetensors files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    #[error("tensor {tensor} is not in {file}")]
    Missing { tensor: String, file: String },
    #[error("tensor {tensor} is {wanted} in the graph and {found} in {file}")]
    ElementType {
        tensor: String,
        wanted: String,
        found: &'static str,
        file: String,
    },
    #[error("tensor {tensor} has the shape {wanted:?} in the graph and {found:?} in {file}")]
    Shape {
        tensor: String,
        wanted: Vec<i64>,
        found: Vec<i64>,
        file: String,
    },
    #[error("tensor {tensor} is in {first} and in {second}")]
    Twice {
        tensor: String,
        first: String,
        second: String,
    },
    #[error("none of the {count} tensors in {file} is an input of the graph ({names})")]
    NothingUsed {
        count: usize,
        file: String,
        names: String,
    },
    #[error("{file} says that tensor {tensor} is in {place}, which is not a file beside it")]
    Place {
        file: String,
        tensor: String,
        place: String,
    },
    #[error("{file} names more than {limit} files")]
    TooManyFiles { file: String, limit: usize },
    #[error("{file} is not an index of safetensors files: {}", told(cause))]
    Index {
        file: String,
        cause: serde_json::Error,
    },
    #[error(
        "dormouse.weights is {file}, which ends neither in '.safetensors' nor in '.safetensors.index.json'"
    )]
    NotSafetensors { file: String },
    #[error("dormouse.weights is {file}, which is not a path in the version's folder: {cause}")]
    Path { file: String, cause: NameError },
}

/// The tensors of one file.
#[derive(Debug)]
pub(crate) struct Contents {
    /// Relative to the graph's folder.
    pub(crate) location: String,
    pub(crate) tensors: Vec<StoredTensor>,
    /// Its tensors may be inputs of the graph; else only what refers to the file gets them.
    pub(crate) chosen: bool,
    used: Vec<bool>,
    by_name: HashMap<String, usize>,
}

impl Contents {
    pub(crate) fn new(location: String, tensors: Vec<StoredTensor>) -> Self {
        let names = tensors.iter().enumerate();
        Self {
            used: vec![false; tensors.len()],
            by_name: names
                .map(|(at, tensor)| (tensor.name.clone(), at))
                .collect(),
            chosen: false,
            location,
            tensors,
        }
    }

    /// Whether the graph was given any of its tensors.
    pub(crate) fn is_used(&self) -> bool {
        self.used.contains(&true)
    }

    pub(crate) fn holds(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    fn find(&mut self, name: &str) -> Option<&StoredTensor> {
        let &at = self.by_name.get(name)?;
        self.used[at] = true;
        Some(&self.tensors[at])
    }

    fn file(&self) -> String {
        shown(self.location.as_bytes())
    }

    fn unused(&self) -> impl Iterator<Item = &str> {
        let tensors = self.tensors.iter().zip(&self.used);
        tensors
            .filter(|(_, used)| !**used)
            .map(|(tensor, _)| tensor.name.as_str())
    }
}

/// Finds the data of initializers that name a safetensors file and no place in it.
pub(crate) fn resolve_references(
    walked: &mut Walked,
    files: &mut [Contents],
    rewrite: &mut Rewrite,
) -> Result<(), WeightsError> {
    for site in &walked.tensors {
        let SiteData::ByName(index) = site.data else {
            continue;
        };
        let reference = &mut walked.summary.external[index];
        let name = walked.nodes.names.text(site.name);
        let plain = crate::names::plain(&reference.location);
        let file = files.iter_mut().find(|file| file.location == plain);
        let (found, file) = match file {
            Some(file) => {
                let shown = file.file();
                (file.find(name), shown)
            }
            None => (None, shown(plain.as_bytes())),
        };
        let tensor = || shown(name.as_bytes());
        let Some(found) = found else {
            return Err(WeightsError::Missing {
                tensor: tensor(),
                file,
            });
        };
        if found.element != Some(ElementType(site.element)) {
            return Err(WeightsError::ElementType {
                tensor: tensor(),
                wanted: ElementType(site.element).name().to_owned(),
                found: found.dtype,
                file,
            });
        }
        if found.dims != site.dims {
            return Err(WeightsError::Shape {
                tensor: tensor(),
                wanted: site.dims.clone(),
                found: found.dims.clone(),
                file,
            });
        }
        reference.offset = found.offset;
        reference.length = Some(found.length);
        rewrite.places.insert(site.message.start, reference.clone());
    }
    Ok(())
}

/// Why files that nobody named are left alone; none when they are certainly meant.
pub(crate) fn objection(walked: &Walked, files: &[Contents]) -> Option<String> {
    let inputs: HashMap<&str, &GraphTensor> = by_name(walked);
    let mut given = HashSet::new();
    for file in files.iter().filter(|file| file.chosen) {
        for (at, tensor) in file.tensors.iter().enumerate() {
            let name = tensor.name.as_str();
            match inputs.get(name) {
                Some(input) => {
                    let fixed = |dims: &[i64]| dims.iter().all(|&dim| dim >= 0);
                    if !input.dims.as_deref().is_some_and(fixed) {
                        return Some(format!(
                            "input {} has an open shape",
                            shown(name.as_bytes())
                        ));
                    }
                    given.insert(name);
                }
                None if file.used[at] => {}
                None => {
                    return Some(format!(
                        "its tensor {} is no input of the graph",
                        shown(name.as_bytes())
                    ));
                }
            }
        }
    }
    if given.is_empty() {
        return Some("it has no tensor that is an input of the graph".to_owned());
    }
    (given.len() == inputs.len()).then(|| "no input would be left".to_owned())
}

/// Makes initializers of the inputs that the files hold.
pub(crate) fn give_inputs(
    walked: &mut Walked,
    files: &mut [Contents],
    rewrite: &mut Rewrite,
) -> Result<(), WeightsError> {
    let mut given = Vec::new();
    for (at, input) in walked.summary.inputs.iter().enumerate() {
        let mut chosen = files.iter_mut().filter(|file| file.chosen);
        let Some(file) = chosen.find(|file| file.holds(&input.name)) else {
            continue;
        };
        let (location, file_shown) = (file.location.clone(), file.file());
        let found = file.find(&input.name).expect("the file holds the name");
        check_input(input, found, file_shown)?;
        rewrite.dropped.insert(walked.inputs[at].field.start);
        rewrite.added.push(NewInitializer {
            name: input.name.clone(),
            element: found.element.map_or(0, |element| element.0),
            dims: found.dims.clone(),
            data: ExternalData {
                location,
                offset: found.offset,
                length: Some(found.length),
            },
        });
        given.push((at, found.dims.len()));
    }
    rewrite.graph = walked.graph.start;
    let references = rewrite.added.iter().map(|tensor| tensor.data.clone());
    walked.summary.external.extend(references);
    walked.give_inputs(&given);
    Ok(())
}

fn check_input(
    input: &GraphTensor,
    found: &StoredTensor,
    file: String,
) -> Result<(), WeightsError> {
    let tensor = || shown(input.name.as_bytes());
    let number = match input.kind {
        GraphType::Tensor(_) => (1..=26).find(|&number| element_type(number) == input.kind),
        GraphType::Other(name) => element_number(name),
    };
    if number.is_none() || found.element.map(|element| element.0) != number {
        let wanted = match (number, input.kind) {
            (None, GraphType::Other(name)) => name,
            (number, _) => element_name(number.unwrap_or(0)),
        };
        return Err(WeightsError::ElementType {
            tensor: tensor(),
            wanted: wanted.to_owned(),
            found: found.dtype,
            file,
        });
    }
    let Some(wanted) = input.dims.as_deref() else {
        return Ok(());
    };
    let fits = wanted.len() == found.dims.len()
        && wanted
            .iter()
            .zip(&found.dims)
            .all(|(&wanted, &found)| wanted < 0 || wanted == found);
    if fits {
        return Ok(());
    }
    Err(WeightsError::Shape {
        tensor: tensor(),
        wanted: wanted.to_vec(),
        found: found.dims.clone(),
        file,
    })
}

/// Fails when two files hold a tensor of one name.
pub(crate) fn no_name_twice(files: &[Contents]) -> Result<(), WeightsError> {
    let mut seen: HashMap<&str, &Contents> = HashMap::new();
    for file in files.iter().filter(|file| file.chosen) {
        for tensor in &file.tensors {
            if let Some(first) = seen.insert(&tensor.name, file) {
                return Err(WeightsError::Twice {
                    tensor: shown(tensor.name.as_bytes()),
                    first: first.file(),
                    second: file.file(),
                });
            }
        }
    }
    Ok(())
}

/// Fails when the chosen files have nothing that the graph could use.
pub(crate) fn something_used(files: &[Contents], named: &str) -> Result<(), WeightsError> {
    let chosen: Vec<&Contents> = files.iter().filter(|file| file.chosen).collect();
    if chosen.iter().any(|file| file.is_used()) {
        return Ok(());
    }
    let names = chosen.iter().flat_map(|file| file.unused());
    Err(WeightsError::NothingUsed {
        count: chosen.iter().map(|file| file.tensors.len()).sum(),
        file: shown(named.as_bytes()),
        names: listed(names.collect()),
    })
}

/// A sentence for each file with tensors that nobody uses.
pub(crate) fn leftovers(files: &[Contents]) -> impl Iterator<Item = String> {
    files.iter().filter_map(|file| {
        let unused: Vec<&str> = file.unused().collect();
        (!unused.is_empty()).then(|| {
            format!(
                "{} of the {} tensors in {} are not used by the graph: {}",
                unused.len(),
                file.tensors.len(),
                file.file(),
                listed(unused)
            )
        })
    })
}

fn by_name(walked: &Walked) -> HashMap<&str, &GraphTensor> {
    let inputs = walked.summary.inputs.iter();
    inputs.map(|input| (input.name.as_str(), input)).collect()
}

fn listed(names: Vec<&str>) -> String {
    let mut text: Vec<String> = names
        .iter()
        .take(LISTED)
        .map(|name| shown(name.as_bytes()))
        .collect();
    if names.len() > LISTED {
        text.push(format!("and {} more", names.len() - LISTED));
    }
    text.join(", ")
}
