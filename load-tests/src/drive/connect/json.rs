//! Tensors in the protocol's JSON documents, and behind them.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::{Bytes, BytesMut};
use dormouse_client::{DataType, Element, Tensor};
use half::{bf16, f16};
use serde::Deserialize;
use serde_json::{Value, json};

/// A request's body.
pub(super) struct Document {
    /// Of the JSON, where tensors follow it.
    pub(super) header_length: Option<usize>,
    pub(super) body: Bytes,
}

/// Writes a request.
pub(super) fn request(
    inputs: &[(String, Tensor)],
    deadline: Option<Duration>,
    binary: bool,
) -> Result<Document> {
    let mut parameters = serde_json::Map::new();
    if binary {
        parameters.insert("binary_data_output".to_owned(), json!(true));
    }
    if let Some(deadline) = deadline {
        let micros = u64::try_from(deadline.as_micros()).unwrap_or(u64::MAX);
        parameters.insert("timeout".to_owned(), json!(micros));
    }
    let mut text = BytesMut::from(&b"{"[..]);
    if !parameters.is_empty() {
        text.extend(b"\"parameters\":");
        text.extend(Value::Object(parameters).to_string().into_bytes());
        text.extend(b",");
    }
    text.extend(b"\"inputs\":[");
    for (index, (name, tensor)) in inputs.iter().enumerate() {
        if index > 0 {
            text.extend(b",");
        }
        let head = format!(
            "{{\"name\":{},\"datatype\":\"{}\",\"shape\":{}",
            json!(name),
            tensor.datatype(),
            json!(tensor.shape())
        );
        text.extend(head.into_bytes());
        let data = match binary {
            true => format!(
                ",\"parameters\":{{\"binary_data_size\":{}}}}}",
                tensor.data().len()
            ),
            false => format!(
                ",\"data\":{}}}",
                data(tensor).with_context(|| format!("input '{name}'"))?
            ),
        };
        text.extend(data.into_bytes());
    }
    text.extend(b"]}");
    let header_length = binary.then_some(text.len());
    if binary {
        for (_, tensor) in inputs {
            text.extend_from_slice(tensor.data());
        }
    }
    Ok(Document {
        header_length,
        body: text.freeze(),
    })
}

/// A tensor's elements as a JSON array.
fn data(tensor: &Tensor) -> Result<String> {
    fn list<T: Element + serde::Serialize>(tensor: &Tensor) -> Result<String> {
        Ok(serde_json::to_string(&*tensor.as_slice::<T>()?)?)
    }
    fn halves<T: Element + Into<f32>>(tensor: &Tensor) -> Result<String> {
        let values = tensor.to_vec::<T>()?;
        let values: Vec<f32> = values.into_iter().map(Into::into).collect();
        Ok(serde_json::to_string(&values)?)
    }
    let text = match tensor.datatype() {
        DataType::Bool => list::<bool>(tensor),
        DataType::Uint8 => list::<u8>(tensor),
        DataType::Uint16 => list::<u16>(tensor),
        DataType::Uint32 => list::<u32>(tensor),
        DataType::Uint64 => list::<u64>(tensor),
        DataType::Int8 => list::<i8>(tensor),
        DataType::Int16 => list::<i16>(tensor),
        DataType::Int32 => list::<i32>(tensor),
        DataType::Int64 => list::<i64>(tensor),
        DataType::Fp16 => halves::<f16>(tensor),
        DataType::Bf16 => halves::<bf16>(tensor),
        DataType::Fp32 => list::<f32>(tensor),
        DataType::Fp64 => list::<f64>(tensor),
        DataType::Bytes => Ok(serde_json::to_string(&tensor.strings()?)?),
    }?;
    ensure!(
        tensor.datatype() == DataType::Bytes || !text.contains("null"),
        "a value that is not finite has no JSON"
    );
    Ok(text)
}

#[derive(Deserialize)]
struct TensorDocument {
    name: String,
    datatype: String,
    shape: Vec<i64>,
    #[serde(default)]
    parameters: Parameters,
    #[serde(default)]
    data: Option<Value>,
}

#[derive(Default, Deserialize)]
struct Parameters {
    binary_data_size: Option<usize>,
}

/// The tensors under `key` of a document. Those without data of their own are in `binary`, in
/// order; what none of them takes is an error.
pub(crate) fn decode(document: &[u8], binary: Bytes, key: &str) -> Result<Vec<(String, Tensor)>> {
    read(document, binary, key, |tensor, _| {
        tensor.parameters.binary_data_size
    })
}

/// As [`decode`], for documents that leave the sizes in `binary` to the shapes.
pub(crate) fn header_tensors(
    document: &[u8],
    binary: Bytes,
    key: &str,
) -> Result<Vec<(String, Tensor)>> {
    read(document, binary, key, |tensor, datatype| {
        let size = datatype.element_size()?;
        tensor.shape.iter().try_fold(size, |product, &dim| {
            product.checked_mul(usize::try_from(dim).ok()?)
        })
    })
}

fn read(
    document: &[u8],
    mut binary: Bytes,
    key: &str,
    size: impl Fn(&TensorDocument, DataType) -> Option<usize>,
) -> Result<Vec<(String, Tensor)>> {
    let mut document: Value = serde_json::from_slice(document).context("not JSON")?;
    let tensors = document
        .get_mut(key)
        .map(Value::take)
        .with_context(|| format!("the document has no '{key}'"))?;
    let tensors: Vec<TensorDocument> =
        serde_json::from_value(tensors).with_context(|| format!("'{key}'"))?;
    let mut all = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let name = tensor.name.clone();
        let mut one = || -> Result<Tensor> {
            let datatype: DataType = tensor.datatype.parse()?;
            if let Some(data) = &tensor.data {
                return from_data(datatype, tensor.shape.clone(), data);
            }
            let size = size(&tensor, datatype).context("no data, and no size of binary data")?;
            ensure!(
                size <= binary.len(),
                "the binary data ends within it: {size} bytes needed, {} there",
                binary.len()
            );
            Ok(Tensor::raw(
                datatype,
                tensor.shape.clone(),
                binary.split_to(size),
            )?)
        };
        let made = one().with_context(|| format!("tensor '{name}'"))?;
        all.push((name, made));
    }
    ensure!(
        binary.is_empty(),
        "{} bytes of binary data belong to no tensor",
        binary.len()
    );
    Ok(all)
}

/// A tensor of a JSON array, nested or flat.
fn from_data(datatype: DataType, shape: Vec<i64>, data: &Value) -> Result<Tensor> {
    let mut flat = Vec::new();
    flatten(data, &mut flat);
    fn integers<T: Element + TryFrom<i128>>(shape: Vec<i64>, flat: &[&Value]) -> Result<Tensor> {
        let one = |value: &&Value| {
            let number = value
                .as_i64()
                .map(i128::from)
                .or_else(|| value.as_u64().map(i128::from));
            number
                .and_then(|number| T::try_from(number).ok())
                .with_context(|| format!("{value} does not fit {}", T::DATATYPE))
        };
        let values = flat.iter().map(one).collect::<Result<Vec<T>>>()?;
        Ok(Tensor::from_vec(shape, values)?)
    }
    fn numbers<T: Element>(
        shape: Vec<i64>,
        flat: &[&Value],
        from: impl Fn(f64) -> T,
    ) -> Result<Tensor> {
        let one = |value: &&Value| {
            let number = value.as_f64();
            number.with_context(|| format!("{value} is not a number"))
        };
        let values = flat
            .iter()
            .map(|value| one(value).map(&from))
            .collect::<Result<Vec<T>>>()?;
        Ok(Tensor::from_vec(shape, values)?)
    }
    match datatype {
        DataType::Bool => {
            let one = |value: &&Value| match value {
                Value::Bool(value) => Ok(*value),
                Value::Number(number) => Ok(number.as_f64() != Some(0.0)),
                other => bail!("{other} is not a truth value"),
            };
            let values = flat.iter().map(one).collect::<Result<Vec<bool>>>()?;
            Ok(Tensor::from_vec(shape, values)?)
        }
        DataType::Uint8 => integers::<u8>(shape, &flat),
        DataType::Uint16 => integers::<u16>(shape, &flat),
        DataType::Uint32 => integers::<u32>(shape, &flat),
        DataType::Uint64 => integers::<u64>(shape, &flat),
        DataType::Int8 => integers::<i8>(shape, &flat),
        DataType::Int16 => integers::<i16>(shape, &flat),
        DataType::Int32 => integers::<i32>(shape, &flat),
        DataType::Int64 => integers::<i64>(shape, &flat),
        DataType::Fp16 => numbers(shape, &flat, f16::from_f64),
        DataType::Bf16 => numbers(shape, &flat, bf16::from_f64),
        DataType::Fp32 => numbers(shape, &flat, |value| value as f32),
        DataType::Fp64 => numbers(shape, &flat, |value| value),
        DataType::Bytes => {
            let one = |value: &&Value| {
                let text = value.as_str().map(str::to_owned);
                text.with_context(|| format!("{value} is not text"))
            };
            let values = flat.iter().map(one).collect::<Result<Vec<String>>>()?;
            Ok(Tensor::bytes(shape, values)?)
        }
    }
}

fn flatten<'a>(value: &'a Value, flat: &mut Vec<&'a Value>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| flatten(value, flat)),
        value => flat.push(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs() -> Vec<(String, Tensor)> {
        vec![
            (
                "a \"b\"".to_owned(),
                Tensor::from_slice([1, 2], &[1.5f32, 0.1]).unwrap(),
            ),
            ("b".to_owned(), Tensor::from_slice([1], &[-7i64]).unwrap()),
            ("c".to_owned(), Tensor::bytes([2], ["x", "null"]).unwrap()),
            (
                "d".to_owned(),
                Tensor::from_slice([1], &[f16::from_f32(0.5)]).unwrap(),
            ),
            (
                "e".to_owned(),
                Tensor::from_slice([2], &[true, false]).unwrap(),
            ),
        ]
    }

    #[test]
    fn what_is_written_is_read_again_in_both_forms() {
        for binary in [false, true] {
            let written = request(&inputs(), Some(Duration::from_millis(5)), binary).unwrap();
            let length = written.header_length.unwrap_or(written.body.len());
            assert_eq!(written.header_length.is_some(), binary);
            let head: Value = serde_json::from_slice(&written.body[..length]).unwrap();
            assert_eq!(head["parameters"]["timeout"], 5000);
            let read = decode(
                &written.body[..length],
                written.body.slice(length..),
                "inputs",
            );
            assert_eq!(read.unwrap(), inputs());
        }
    }

    #[test]
    fn nested_lists_are_flat_tensors() {
        let document =
            br#"{"outputs":[{"name":"y","datatype":"INT8","shape":[2,2],"data":[[1,2],[3,-4]]}]}"#;
        let read = decode(document, Bytes::new(), "outputs").unwrap();
        assert_eq!(read[0].1.to_vec::<i8>().unwrap(), [1, 2, 3, -4]);
    }

    #[test]
    fn what_does_not_add_up_is_named() {
        let check = |document: &str, binary: &'static [u8], words: &str| {
            let error = decode(document.as_bytes(), Bytes::from_static(binary), "outputs");
            let error = format!("{:#}", error.unwrap_err());
            assert!(error.contains(words), "{error}");
        };
        check("{}", b"", "no 'outputs'");
        let sized = r#"{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]}"#;
        check(sized, b"123", "4 bytes needed, 3 there");
        check(sized, b"12345", "1 bytes of binary data");
        let typed = |data: &str| {
            format!(
                r#"{{"outputs":[{{"name":"y","datatype":"INT8","shape":[1],"data":[{data}]}}]}}"#
            )
        };
        check(&typed("200"), b"", "200 does not fit INT8");
        check(&typed("1, 2"), b"", "1 elements, 2 were given");
        let infinite = Tensor::from_slice([1], &[f32::INFINITY]).unwrap();
        let error = request(&[("x".to_owned(), infinite)], None, false);
        assert!(error.is_err());
    }

    #[test]
    fn sizes_come_from_shapes_where_the_document_has_none() {
        let document = br#"{"inputs":[{"name":"x","datatype":"FP32","shape":[1]},{"name":"n","datatype":"INT64","shape":[]}]}"#;
        let mut data = 1.5f32.to_le_bytes().to_vec();
        data.extend(16i64.to_le_bytes());
        let read = header_tensors(document, data.into(), "inputs").unwrap();
        assert_eq!(read[0].1.to_vec::<f32>().unwrap(), [1.5]);
        assert_eq!(read[1].1.to_vec::<i64>().unwrap(), [16]);
    }
}
