//! How a server is installed, given its models and started: `load-tests/peers/NAME/recipe.toml`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::drive::scenario::time;
use crate::drive::target::Protocol;

/// Placeholders in commands and environments.
const PLACEHOLDERS: [&str; 12] = [
    "dormouse",
    "library",
    "python",
    "bin",
    "site",
    "recipe",
    "repository",
    "scratch",
    "http_port",
    "grpc_port",
    "metrics_port",
    "threads",
];

/// What the Python recipes have in common.
const SHARED: (&str, &str) = ("onnx_model.py", include_str!("../../peers/onnx_model.py"));

/// A recipe of this program: its name, its document and its files.
struct BuiltIn {
    name: &'static str,
    document: &'static str,
    files: &'static [(&'static str, &'static str)],
}

macro_rules! built_in {
    ($name:literal $(, $file:literal)*) => {
        BuiltIn {
            name: $name,
            document: include_str!(concat!("../../peers/", $name, "/recipe.toml")),
            files: &[$(($file, include_str!(concat!("../../peers/", $name, "/", $file)))),*],
        }
    };
}

const BUILT_IN: [BuiltIn; 7] = [
    built_in!("dormouse"),
    built_in!("triton"),
    built_in!("pytriton", "model.py", "lay_out.py"),
    built_in!("mlserver", "onnx_runtime.py", "lay_out.py"),
    built_in!("kserve", "serve.py"),
    built_in!("litserve", "serve.py"),
    built_in!("bentoml", "service.py"),
];

/// How to install, lay out and start a server.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Recipe {
    #[serde(skip)]
    pub(crate) name: String,
    pub(crate) title: String,
    /// From PyPI, with exact versions, into an environment of its own.
    #[serde(default)]
    pub(crate) packages: Vec<String>,
    /// Python files beside the document.
    #[serde(default)]
    files: Vec<String>,
    /// Must be on the PATH.
    #[serde(default)]
    pub(crate) program: Option<String>,
    pub(crate) protocols: Vec<Protocol>,
    /// How models are loaded and unloaded while it runs; none where that is not possible.
    #[serde(default)]
    pub(crate) loads: Option<Loads>,
    /// Whether it joins requests into batches.
    pub(crate) batching: bool,
    /// Whether it starts without any model.
    pub(crate) starts_empty: bool,
    /// How old files must be before it trusts them.
    #[serde(default, with = "time")]
    pub(crate) settle: Duration,
    /// For the reader of figures.
    pub(crate) notes: String,
    #[serde(default)]
    pub(crate) lay_out: LayOut,
    pub(crate) start: Start,
}

/// How models are loaded and unloaded.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Loads {
    /// Further words of the command line that allow it.
    #[serde(default)]
    pub(crate) flags: Vec<String>,
    /// Where the comparison's own does not offer it.
    #[serde(default)]
    pub(crate) protocol: Option<Protocol>,
}

/// What is done to a repository before a server starts over it; not timed.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LayOut {
    /// Configuration that is written beside each model.
    #[serde(default)]
    pub(crate) config: ConfigForm,
    #[serde(default)]
    pub(crate) command: Vec<String>,
}

/// Configuration beside a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ConfigForm {
    #[default]
    None,
    /// `config.pbtxt` for an ONNX Runtime backend.
    Triton,
}

/// The server's command line.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Start {
    pub(crate) command: Vec<String>,
    #[serde(default)]
    pub(crate) environment: BTreeMap<String, String>,
    /// Path over HTTP that answers 200 once it can serve.
    pub(crate) ready: String,
    /// How names of its shared memory begin.
    #[serde(default)]
    pub(crate) shared_memory: Option<String>,
}

impl Recipe {
    /// The built-in recipe of a name.
    pub(crate) fn named(name: &str) -> Result<Self> {
        let Some(found) = BUILT_IN.iter().find(|recipe| recipe.name == name) else {
            let names: Vec<_> = BUILT_IN.iter().map(|recipe| recipe.name).collect();
            bail!(
                "there is no recipe '{name}'; there are {}",
                names.join(", ")
            );
        };
        let mut recipe = Self::parse(found.document).with_context(|| format!("recipe '{name}'"))?;
        recipe.name = name.to_owned();
        Ok(recipe)
    }

    fn parse(document: &str) -> Result<Self> {
        let recipe: Self = toml::from_str(document)?;
        ensure!(!recipe.protocols.is_empty(), "protocols: at least one");
        ensure!(!recipe.start.command.is_empty(), "start.command: needed");
        ensure!(
            recipe.start.ready.starts_with('/'),
            "start.ready: a path of a URL"
        );
        for package in &recipe.packages {
            ensure!(
                package
                    .split_once("==")
                    .is_some_and(|(name, version)| { !name.is_empty() && !version.is_empty() }),
                "packages: '{package}' has no exact version"
            );
        }
        let texts = recipe.start.command.iter();
        let texts = texts
            .chain(&recipe.lay_out.command)
            .chain(recipe.start.environment.values())
            .chain(&recipe.start.shared_memory);
        for text in texts {
            fill(text, |name| PLACEHOLDERS.contains(&name).then(String::new))?;
        }
        Ok(recipe)
    }

    /// Writes the recipe's files into a folder, for its Python to import.
    pub(crate) fn write_files(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder)?;
        let found = BUILT_IN.iter().find(|recipe| recipe.name == self.name);
        let files = found.map_or(&[][..], |recipe| recipe.files);
        for name in &self.files {
            let file = files.iter().find(|(found, _)| found == name);
            let (_, text) = file.with_context(|| format!("{name} is not part of the program"))?;
            fs::write(folder.join(name), text)?;
        }
        if !self.packages.is_empty() {
            fs::write(folder.join(SHARED.0), SHARED.1)?;
        }
        Ok(())
    }
}

/// Replaces every `{name}` by what `value` says.
pub(crate) fn fill(text: &str, value: impl Fn(&str) -> Option<String>) -> Result<String> {
    let mut filled = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        let (name, behind) = after
            .split_once('}')
            .with_context(|| format!("'{text}': a brace is not closed"))?;
        filled.push_str(before);
        filled.push_str(&value(name).with_context(|| format!("'{text}': what is {{{name}}}?"))?);
        rest = behind;
    }
    filled.push_str(rest);
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_recipes_are_complete() {
        for built_in in &BUILT_IN {
            let recipe = Recipe::named(built_in.name).unwrap();
            assert!(!recipe.title.is_empty() && !recipe.notes.is_empty());
            let folder = tempfile::tempdir().unwrap();
            recipe.write_files(folder.path()).unwrap();
            assert_eq!(recipe.files.len(), built_in.files.len(), "{}", recipe.name);
        }
        let error = Recipe::named("torchserve").unwrap_err().to_string();
        assert!(error.contains("mlserver"), "{error}");
    }

    #[test]
    fn python_peers_share_one_version_of_onnx_runtime() {
        let versions: std::collections::BTreeSet<String> = BUILT_IN
            .iter()
            .flat_map(|built_in| Recipe::named(built_in.name).unwrap().packages)
            .filter(|package| package.starts_with("onnxruntime=="))
            .collect();
        assert_eq!(versions.len(), 1, "{versions:?}");
    }

    #[test]
    fn faulty_recipes_are_refused() {
        let base = |packages: &str, command: &str| {
            format!(
                "title = 'x'\npackages = [{packages}]\nprotocols = ['http']\n                 batching = false\nstarts_empty = false\nnotes = 'x'\n[start]\ncommand = [{command}]\n\
                 ready = '/ready'\n"
            )
        };
        assert!(Recipe::parse(&base("'a==1'", "'{python}'")).is_ok());
        for (document, words) in [
            (base("'a>=1'", "'x'"), "no exact version"),
            (base("", ""), "start.command"),
            (base("", "'{venv}'"), "what is {venv}?"),
            (base("", "'{python'"), "not closed"),
        ] {
            let error = format!("{:#}", Recipe::parse(&document).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn placeholders_are_filled_wherever_they_stand() {
        let value = |name: &str| (name == "a").then(|| "1".to_owned());
        assert_eq!(fill("x{a}y{a}", value).unwrap(), "x1y1");
        assert_eq!(fill("plain", value).unwrap(), "plain");
    }
}
