//! Models of any size, written as ONNX by the test itself: Y = X·W1 + X·W2 + … + B with weights
//! that are small whole numbers, so that every way of computing it gives the same bits.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::repository::TestRepository;
use crate::server::{TestServer, dormouse};
use crate::wire::{GrpcClient, Request, output};

/// Weights repeat with this period, along rows and along columns.
const PERIOD: usize = 13;

/// What such a model is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Generated {
    /// Inputs, and outputs.
    pub(crate) size: usize,
    /// Square matrices.
    pub(crate) layers: usize,
    /// Decides the matrices.
    pub(crate) weights: usize,
    /// Decides what is added at the end.
    pub(crate) bias: usize,
    /// The matrices are in `weights.bin` beside the graph.
    pub(crate) outside: bool,
}

impl Generated {
    pub(crate) const fn new(size: usize, layers: usize) -> Self {
        Self {
            size,
            layers,
            weights: 0,
            bias: 0,
            outside: false,
        }
    }

    pub(crate) const fn weights(self, weights: usize) -> Self {
        Self { weights, ..self }
    }

    pub(crate) const fn bias(self, bias: usize) -> Self {
        Self { bias, ..self }
    }

    pub(crate) const fn outside(self) -> Self {
        Self {
            outside: true,
            ..self
        }
    }

    fn weight(&self, layer: usize, residue: usize, column: usize) -> f32 {
        let value = 31 * residue + 17 * column + 7 * layer + self.weights;
        (value % PERIOD) as f32 - 6.0
    }

    fn added(&self, column: usize) -> f32 {
        ((column + self.bias) % 5) as f32
    }

    /// The answer to a row of `value`s.
    pub(crate) fn answer(&self, value: f32) -> Vec<f32> {
        let rows = |residue: usize| (self.size - residue).div_ceil(PERIOD) as f32;
        let column = |column: usize| {
            let mut sum = 0.0;
            for layer in 0..self.layers {
                for residue in 0..PERIOD.min(self.size) {
                    sum += rows(residue) * self.weight(layer, residue, column);
                }
            }
            sum * value + self.added(column)
        };
        (0..self.size).map(column).collect()
    }

    /// The graph's file.
    pub(crate) fn graph(&self) -> Vec<u8> {
        let mut nodes = Vec::new();
        let mut tensors = Vec::new();
        let mut parts = Vec::new();
        for layer in 0..self.layers {
            let (name, part) = (format!("W{layer}"), format!("h{layer}"));
            nodes.push(node("MatMul", &["X", &name], &part));
            tensors.push(self.matrix(&name, layer));
            parts.push(part);
        }
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        nodes.push(node("Sum", &parts, "sum"));
        nodes.push(node("Add", &["sum", "B"], "Y"));
        let added: Vec<u8> = (0..self.size)
            .flat_map(|column| self.added(column).to_le_bytes())
            .collect();
        tensors.push([tensor("B", &[self.size]), field(9, &added)].concat());
        let mut graph = Vec::new();
        for node in nodes {
            graph.extend(field(1, &node));
        }
        graph.extend(field(2, b"generated"));
        for tensor in tensors {
            graph.extend(field(5, &tensor));
        }
        graph.extend(field(11, &self.value("X")));
        graph.extend(field(12, &self.value("Y")));
        let opset = [field(1, b""), number(2, 21)].concat();
        [number(1, 10), field(7, &graph), field(8, &opset)].concat()
    }

    /// The bytes of the matrices that are outside of the graph.
    pub(crate) fn data(&self) -> Vec<u8> {
        (0..self.layers)
            .flat_map(|layer| self.matrix_bytes(layer))
            .collect()
    }

    fn matrix(&self, name: &str, layer: usize) -> Vec<u8> {
        let mut tensor = tensor(name, &[self.size, self.size]);
        if self.outside {
            let length = self.size * self.size * 4;
            let entries = [
                ("location", "weights.bin".to_owned()),
                ("offset", (layer * length).to_string()),
                ("length", length.to_string()),
            ];
            for (key, value) in entries {
                let entry = [field(1, key.as_bytes()), field(2, value.as_bytes())].concat();
                tensor.extend(field(13, &entry));
            }
            tensor.extend(number(14, 1));
        } else {
            tensor.extend(field(9, &self.matrix_bytes(layer)));
        }
        tensor
    }

    fn matrix_bytes(&self, layer: usize) -> Vec<u8> {
        let row = |residue: usize| -> Vec<u8> {
            (0..self.size)
                .flat_map(|column| self.weight(layer, residue, column).to_le_bytes())
                .collect()
        };
        let rows: Vec<Vec<u8>> = (0..PERIOD).map(row).collect();
        let mut bytes = Vec::with_capacity(self.size * self.size * 4);
        for index in 0..self.size {
            bytes.extend_from_slice(&rows[index % PERIOD]);
        }
        bytes
    }

    /// An input or output: rows of `size` numbers.
    fn value(&self, name: &str) -> Vec<u8> {
        let dims = [
            field(1, &field(2, b"batch")),
            field(1, &number(1, self.size as u64)),
        ];
        let kind = [number(1, 1), field(2, &dims.concat())].concat();
        [field(1, name.as_bytes()), field(2, &field(1, &kind))].concat()
    }

    /// Writes the model's files into a folder.
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder)?;
        fs::write(folder.join("model.onnx"), self.graph())?;
        if self.outside {
            fs::write(folder.join("weights.bin"), self.data())?;
        }
        Ok(())
    }

    /// Adds the model to a repository as version 1.
    pub(crate) fn add(&self, repository: &TestRepository, name: &str, config: &str) -> Result<()> {
        self.write(&repository.model_dir(name).join("1"))?;
        repository.write_config(name, config)
    }

    /// Asks for a row of `value`s.
    pub(crate) fn request(&self, model: &str, value: f32) -> Request {
        Request::new(model).input("X", &[1, self.size as i64], &vec![value; self.size])
    }

    /// Sends a request, checks its answer to the bit, and tells what the model was woken from if
    /// the request had to wait for that.
    pub(crate) async fn ask(&self, client: &GrpcClient, model: &str) -> Result<Option<String>> {
        self.ask_for(client, self.request(model, 1.0), 1.0).await
    }

    pub(crate) async fn ask_for(
        &self,
        client: &GrpcClient,
        request: Request,
        value: f32,
    ) -> Result<Option<String>> {
        let model = request.0.model_name.clone();
        let answer = client.clone().model_infer(request.0).await;
        let answer = answer.with_context(|| format!("model {model}"))?;
        let timing = answer.metadata().get("server-timing");
        let timing = timing.map(|value| value.to_str().map(str::to_owned));
        let found = output::<f32>(&answer.into_inner(), "Y", &[1, self.size as i64])?;
        let expected = self.answer(value);
        ensure!(
            found == expected,
            "{model} answers {:?}… instead of {:?}…",
            &found[..4.min(found.len())],
            &expected[..4.min(expected.len())]
        );
        let Some(timing) = timing.transpose()? else {
            return Ok(None);
        };
        let load = timing.split(',').next().unwrap_or_default();
        let kind = load.split(";desc=").nth(1).context("a load of no kind")?;
        Ok(kind.split(';').next().map(str::to_owned))
    }
}

/// `parameters` of a model's configuration.
pub(crate) fn parameters(pairs: &[(&str, &str)]) -> String {
    let one = |(key, value): &(&str, &str)| {
        format!(r#"parameters {{ key: "dormouse.{key}" value {{ string_value: "{value}" }} }}"#)
    };
    pairs.iter().map(one).collect::<Vec<_>>().join("\n")
}

/// Waits until files that were written just now can be told from later ones by their times: only
/// then are their digests remembered.
pub(crate) async fn settled() {
    tokio::time::sleep(Duration::from_millis(2100)).await;
}

/// A folder for a prepared store.
#[derive(Debug)]
pub(crate) struct TestStore {
    dir: TempDir,
}

impl TestStore {
    pub(crate) fn new() -> Result<Self> {
        let mut builder = tempfile::Builder::new();
        let dir = builder.prefix("dormouse-store-").tempdir()?;
        Ok(Self { dir })
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The flag that names it.
    pub(crate) fn flag(&self) -> String {
        format!("--store={}", self.path().display())
    }

    /// The files in one of its folders, in order.
    pub(crate) fn files(&self, folder: &str) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        let mut open = vec![self.path().join("v1").join(folder)];
        while let Some(folder) = open.pop() {
            for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
                let path = entry?.path();
                match path.is_dir() {
                    true => open.push(path),
                    false => files.push(path),
                }
            }
        }
        files.sort();
        Ok(files)
    }

    /// Runs `dormouse store COMMAND` over it; its output must be JSON.
    pub(crate) async fn command(&self, command: &str) -> Result<(bool, serde_json::Value)> {
        let mut program = tokio::process::Command::from(dormouse());
        program.args(["store", command, "--format=json"]);
        let output = program.arg(self.flag()).output().await?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let value = serde_json::from_str(&text).with_context(|| format!("{text}{errors}"))?;
        Ok((output.status.success(), value))
    }
}

/// How many models the server has put into its store.
pub(crate) async fn preparations(server: &TestServer) -> Result<f64> {
    server.metric("dormouse_preparations_total", &[]).await
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn number(field: u64, value: u64) -> Vec<u8> {
    [varint(field << 3), varint(value)].concat()
}

fn field(field: u64, bytes: &[u8]) -> Vec<u8> {
    [
        &varint(field << 3 | 2)[..],
        &varint(bytes.len() as u64),
        bytes,
    ]
    .concat()
}

fn node(operator: &str, inputs: &[&str], output: &str) -> Vec<u8> {
    let mut node: Vec<u8> = inputs
        .iter()
        .flat_map(|input| field(1, input.as_bytes()))
        .collect();
    node.extend(field(2, output.as_bytes()));
    node.extend(field(4, operator.as_bytes()));
    node
}

/// A float tensor without its data.
fn tensor(name: &str, dims: &[usize]) -> Vec<u8> {
    let mut tensor: Vec<u8> = dims.iter().flat_map(|&dim| number(1, dim as u64)).collect();
    tensor.extend(number(2, 1));
    tensor.extend(field(8, name.as_bytes()));
    tensor
}
