//! The engine against the real library, which is installed below `target/` on first use.

mod apart;
mod control;
mod external;
pub(crate) mod graph;
mod measure;
mod measure_disturbance;
mod measure_memory;
mod measure_wake;
mod memory;
mod prepared;
mod real_model;
mod runs;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_model_store::spec::SessionSpec;

use super::{OnnxEngine, OnnxOptions};
use crate::assets::Quiet;
use crate::engine::{Effort, Engine, EngineError, ModelBytes, Session};
use crate::request::Tensor;
use crate::runtime_library;

/// Where the library and the model are kept between runs of the tests.
fn cache() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/dormouse-cache")
}

/// The engine of this process.
pub(crate) fn engine() -> &'static OnnxEngine {
    static ENGINE: OnceLock<OnnxEngine> = OnceLock::new();
    ENGINE.get_or_init(|| {
        let installed = runtime_library::install_in(&cache(), &Quiet).unwrap();
        OnnxEngine::new(OnnxOptions::new(installed.library)).unwrap()
    })
}

fn try_open(graph: &graph::Graph) -> Result<Arc<dyn Session>, EngineError> {
    let model = ModelBytes::in_memory(graph.model(), Vec::new());
    engine().open(model, &SessionSpec::default(), Effort::Full)
}

fn open(graph: &graph::Graph) -> Arc<dyn Session> {
    try_open(graph).unwrap()
}

fn tensor(datatype: DataType, shape: &[i64], data: impl Into<Bytes>) -> Tensor {
    Tensor {
        datatype,
        shape: shape.into(),
        data: data.into(),
    }
}

fn floats(shape: &[i64], values: &[f32]) -> Tensor {
    let data: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    tensor(DataType::Fp32, shape, data)
}

/// Runs on all inputs in order for all outputs.
fn run(session: &dyn Session, inputs: &[Tensor]) -> Result<Vec<Tensor>, EngineError> {
    let inputs: Vec<_> = inputs.iter().cloned().enumerate().collect();
    let outputs: Vec<_> = (0..session.outputs().len()).collect();
    session.run(&inputs, &outputs, &session.stop_handle()?)
}
