use std::fs;

use super::*;
use crate::assets::magika_in;

/// What Magika sees of a text: its first and last 1,024 bytes, padded with 256.
fn features(text: &[u8]) -> Tensor {
    let text = text.trim_ascii();
    let mut values = [256i32; 2048];
    let head = text.len().min(1024);
    for (value, &byte) in values.iter_mut().zip(&text[..head]) {
        *value = byte.into();
    }
    let tail = &text[text.len() - head..];
    for (value, &byte) in values[2048 - head..].iter_mut().zip(tail) {
        *value = byte.into();
    }
    let data: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    tensor(DataType::Int32, &[1, 2048], data)
}

#[test]
fn magika_knows_what_this_file_is_written_in() {
    let files = magika_in(&cache(), &Quiet).unwrap();
    assert!(files.content_types.is_file());
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(files.config).unwrap()).unwrap();
    let labels = config["target_labels_space"].as_array().unwrap();
    let model = ModelBytes::in_memory(fs::read(files.model).unwrap(), Vec::new());
    let session = engine()
        .open(model, &SessionSpec::default(), Effort::Full)
        .unwrap();
    assert_eq!(session.inputs()[0].datatype, Some(DataType::Int32));
    let scores = run(&*session, &[features(include_bytes!("real_model.rs"))])
        .unwrap()
        .remove(0);
    assert_eq!(scores.shape.as_slice(), [1, labels.len() as i64]);
    let (best, _) = scores
        .data
        .as_chunks::<4>()
        .0
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .unwrap();
    assert_eq!(labels[best], "rust");
}
