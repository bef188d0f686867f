//! Writes small safetensors files for tests.

/// A tensor: name, type, shape, bytes.
pub(crate) type Tensor<'a> = (&'a str, &'a str, &'a [i64], &'a [u8]);

/// A file of these tensors in this order, its header padded with `padding` spaces.
pub(crate) fn padded(tensors: &[Tensor<'_>], padding: usize) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let (start, end) = (data.len(), data.len() + bytes.len());
        let name = serde_json::to_string(name).unwrap();
        entries.push(format!(
            r#"{name}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#
        ));
        data.extend_from_slice(bytes);
    }
    let header = format!("{{{}}}{}", entries.join(","), " ".repeat(padding));
    with_header(&header, &data)
}

pub(crate) fn file(tensors: &[Tensor<'_>]) -> Vec<u8> {
    padded(tensors, 0)
}

pub(crate) fn with_header(header: impl AsRef<[u8]>, data: &[u8]) -> Vec<u8> {
    let header = header.as_ref();
    let length = (header.len() as u64).to_le_bytes();
    [&length, header, data].concat()
}
