//! Finding a model in the prepared store: the beginning of every wake.

use std::hint::black_box;
use std::sync::Arc;

use dormouse_model_store::store::{
    Begun, Digest, KeyParts, NewTensor, PreparedContent, PreparedFacts, Store, StoreConfig,
    TensorData,
};

use super::{Step, Workload};

pub const WORKLOADS: &[Workload] = &[
    Workload {
        name: "store: the key of a model",
        prepare: key,
    },
    Workload {
        name: "store: find a model of 100 tensors",
        prepare: find,
    },
    Workload {
        name: "store: a model that is not there",
        prepare: miss,
    },
];

const TENSORS: u8 = 100;

fn parts() -> KeyParts {
    KeyParts {
        sources: vec![("model.onnx".to_owned(), Digest::of(b"model"))],
        engine: "onnxruntime 1.31.0".to_owned(),
        provider: "cpu".to_owned(),
        cpu: "sse4.2 avx avx2 fma f16c".to_owned(),
        options: "level=all".to_owned(),
    }
}

fn open(folder: &tempfile::TempDir) -> Arc<Store> {
    Store::open(StoreConfig {
        dir: folder.path().join("store"),
        max_bytes: 1 << 30,
    })
    .expect("a temporary folder can hold a store")
}

fn key() -> Step {
    let parts = parts();
    Box::new(move || {
        black_box(black_box(&parts).key());
    })
}

fn find() -> Step {
    let folder = tempfile::tempdir().expect("there is room for temporary files");
    let store = open(&folder);
    let key = parts().key();
    let weights: Vec<Vec<u8>> = (0..TENSORS).map(|tensor| vec![tensor; 4096]).collect();
    let tensors = weights.iter().enumerate().map(|(index, bytes)| NewTensor {
        name: format!("encoder.layer.{index}.weight"),
        element_type: 2,
        dims: vec![64, 64],
        data: TensorData::Memory(bytes),
    });
    let content = PreparedContent {
        graph: vec![7; 16 << 10],
        tensors: tensors.collect(),
        facts: PreparedFacts::default(),
    };
    match store.begin(&key).expect("the store is writable") {
        Begun::Draft(draft) => draft.commit(content).expect("the model can be stored"),
        Begun::Exists(_) | Begun::Busy => unreachable!("the store is ours alone"),
    };
    Box::new(move || {
        let _until_the_end = &folder;
        let found = store.find(black_box(&key)).expect("the store can be read");
        assert!(black_box(found).is_some(), "the model was stored");
    })
}

fn miss() -> Step {
    let folder = tempfile::tempdir().expect("there is room for temporary files");
    let store = open(&folder);
    let key = parts().key();
    Box::new(move || {
        let _until_the_end = &folder;
        let found = store.find(black_box(&key)).expect("the store can be read");
        assert!(black_box(found).is_none(), "nothing was stored");
    })
}
