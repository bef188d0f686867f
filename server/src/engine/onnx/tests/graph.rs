//! Writes small ONNX models, so that a test shows the graph it is about.

use dormouse_core::datatype::DataType;

/// The numbers of ONNX's element types.
pub(crate) const fn onnx_type(datatype: DataType) -> u64 {
    super::super::value::element(datatype) as u64
}

/// A protobuf message under construction.
#[derive(Clone, Default)]
pub(crate) struct Proto(Vec<u8>);

impl Proto {
    pub(crate) fn number(mut self, field: u64, value: i64) -> Self {
        self.varint(field << 3);
        self.varint(value.cast_unsigned());
        self
    }

    pub(crate) fn bytes(mut self, field: u64, value: impl AsRef<[u8]>) -> Self {
        let value = value.as_ref();
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    pub(crate) fn messages(self, field: u64, messages: &[Proto]) -> Self {
        messages
            .iter()
            .fold(self, |proto, message| proto.bytes(field, &message.0))
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// An input or output; a dimension of -1 is open.
pub(crate) fn value_info(name: &str, element: u64, dims: &[i64]) -> Proto {
    let dims: Vec<_> = dims
        .iter()
        .map(|&dim| match dim {
            -1 => Proto::default().bytes(2, "n"),
            dim => Proto::default().number(1, dim),
        })
        .collect();
    let tensor = Proto::default()
        .number(1, element.cast_signed())
        .bytes(2, Proto::default().messages(1, &dims).0);
    Proto::default()
        .bytes(1, name)
        .bytes(2, Proto::default().bytes(1, tensor.0).0)
}

pub(crate) fn node(operator: &str, inputs: &[&str], outputs: &[&str]) -> Proto {
    let mut proto = Proto::default();
    for input in inputs {
        proto = proto.bytes(1, input);
    }
    for output in outputs {
        proto = proto.bytes(2, output);
    }
    proto.bytes(4, operator)
}

/// A tensor with its data inside.
pub(crate) fn tensor(name: &str, element: u64, dims: &[i64], data: &[u8]) -> Proto {
    head(name, element, dims).bytes(9, data)
}

/// A tensor whose data lies in a file.
pub(crate) fn external_tensor(
    name: &str,
    element: u64,
    dims: &[i64],
    (location, offset, length): (&str, Option<u64>, Option<u64>),
) -> Proto {
    let mut proto = head(name, element, dims).number(14, 1);
    let entries = [
        ("location", Some(location.to_owned())),
        ("offset", offset.map(|offset| offset.to_string())),
        ("length", length.map(|length| length.to_string())),
    ];
    for (key, value) in entries {
        if let Some(value) = value {
            proto = proto.bytes(13, Proto::default().bytes(1, key).bytes(2, value).0);
        }
    }
    proto
}

fn head(name: &str, element: u64, dims: &[i64]) -> Proto {
    dims.iter()
        .fold(Proto::default(), |proto, &dim| proto.number(1, dim))
        .number(2, element.cast_signed())
        .bytes(8, name)
}

pub(crate) fn graph_attribute(name: &str, graph: &Graph) -> Proto {
    Proto::default()
        .bytes(1, name)
        .number(20, 5)
        .bytes(6, graph.proto().0)
}

pub(crate) fn int_attribute(name: &str, value: i64) -> Proto {
    Proto::default()
        .bytes(1, name)
        .number(20, 2)
        .number(3, value)
}

pub(crate) fn tensor_attribute(name: &str, tensor: &Proto) -> Proto {
    Proto::default()
        .bytes(1, name)
        .number(20, 4)
        .bytes(5, &tensor.0)
}

#[derive(Clone, Default)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Proto>,
    pub(crate) initializers: Vec<Proto>,
    pub(crate) inputs: Vec<Proto>,
    pub(crate) outputs: Vec<Proto>,
}

impl Graph {
    pub(crate) fn proto(&self) -> Proto {
        Proto::default()
            .messages(1, &self.nodes)
            .bytes(2, "g")
            .messages(5, &self.initializers)
            .messages(11, &self.inputs)
            .messages(12, &self.outputs)
    }

    /// The model's bytes.
    pub(crate) fn model(&self) -> Vec<u8> {
        let opset = Proto::default().bytes(1, "").number(2, 21);
        Proto::default()
            .number(1, 10)
            .bytes(8, opset.0)
            .bytes(7, self.proto().0)
            .0
    }
}

/// `y = x`, of any shape with this rank.
pub(crate) fn identity(element: u64, dims: &[i64]) -> Graph {
    Graph {
        nodes: vec![node("Identity", &["x"], &["y"])],
        inputs: vec![value_info("x", element, dims)],
        outputs: vec![value_info("y", element, dims)],
        ..Graph::default()
    }
}
