//! Writes small models for tests, field by field.

/// A protobuf message under construction.
#[derive(Clone, Debug, Default)]
pub(crate) struct Message(pub(crate) Vec<u8>);

impl Message {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub(crate) fn int(mut self, field: u32, value: i64) -> Self {
        self.raw_varint(u64::from(field) << 3);
        self.raw_varint(value as u64);
        self
    }

    pub(crate) fn bytes(mut self, field: u32, bytes: impl AsRef<[u8]>) -> Self {
        self.raw_varint(u64::from(field) << 3 | 2);
        self.raw_varint(bytes.as_ref().len() as u64);
        self.0.extend_from_slice(bytes.as_ref());
        self
    }

    pub(crate) fn message(self, field: u32, message: Message) -> Self {
        self.bytes(field, message.0)
    }

    pub(crate) fn messages(self, field: u32, messages: impl IntoIterator<Item = Message>) -> Self {
        messages
            .into_iter()
            .fold(self, |this, message| this.message(field, message))
    }
}

pub(crate) const FLOAT: i64 = 1;
pub(crate) const INT64: i64 = 7;

/// A tensor of whole numbers with its values in `raw_data`.
pub(crate) fn ints(name: &str, dims: &[i64], values: &[i64]) -> Message {
    let raw: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    tensor(name, INT64, dims).bytes(9, raw)
}

/// A tensor without data.
pub(crate) fn tensor(name: &str, kind: i64, dims: &[i64]) -> Message {
    let message = dims
        .iter()
        .fold(Message::new(), |message, &dim| message.int(1, dim));
    message.int(2, kind).bytes(8, name)
}

/// A float tensor whose data lies elsewhere.
pub(crate) fn external(name: &str, dims: &[i64], entries: &[(&str, &str)]) -> Message {
    let entry = |&(key, value): &(&str, &str)| Message::new().bytes(1, key).bytes(2, value);
    tensor(name, FLOAT, dims)
        .messages(13, entries.iter().map(entry))
        .int(14, 1)
}

/// An attribute that is one number.
pub(crate) fn int(name: &str, value: i64) -> Message {
    Message::new().bytes(1, name).int(3, value).int(20, 2)
}

/// An attribute that is a list of numbers.
pub(crate) fn list(name: &str, values: &[i64]) -> Message {
    let message = Message::new().bytes(1, name).int(20, 7);
    values
        .iter()
        .fold(message, |message, &value| message.int(8, value))
}

/// An attribute that is a string.
pub(crate) fn text(name: &str, value: &str) -> Message {
    Message::new().bytes(1, name).bytes(4, value).int(20, 3)
}

/// An attribute that is a tensor.
pub(crate) fn tensor_attribute(name: &str, tensor: Message) -> Message {
    Message::new().bytes(1, name).message(5, tensor).int(20, 4)
}

/// An attribute that is a graph.
pub(crate) fn graph_attribute(name: &str, graph: Message) -> Message {
    Message::new().bytes(1, name).message(6, graph).int(20, 5)
}

/// A node from `"out1,out2 = Op(in1,in2)"` and its attributes; its name is that of its operator.
pub(crate) fn node(line: &str, attributes: Vec<Message>) -> Message {
    let (outputs, call) = line.split_once(" = ").unwrap();
    let (op, inputs) = call.trim_end_matches(')').split_once('(').unwrap();
    let mut message = Message::new();
    for input in inputs.split(',').filter(|_| !inputs.is_empty()) {
        message = message.bytes(1, input.trim());
    }
    for output in outputs.split(',') {
        message = message.bytes(2, output.trim());
    }
    let (domain, op) = op.rsplit_once(':').unwrap_or(("", op));
    message
        .bytes(3, format!("the {op}"))
        .bytes(4, op)
        .bytes(7, domain)
        .messages(5, attributes)
}

/// A value of a tensor type; negative dimensions get a name instead of a number.
pub(crate) fn value(name: &str, kind: i64, dims: &[i64]) -> Message {
    let dims = dims.iter().map(|&dim| match dim {
        0.. => Message::new().int(1, dim),
        _ => Message::new().bytes(2, "batch"),
    });
    let shape = Message::new().messages(1, dims);
    let kind = Message::new().message(1, Message::new().int(1, kind).message(2, shape));
    Message::new().bytes(1, name).message(2, kind)
}

/// A model of operator set 17 around a graph.
pub(crate) fn model(graph: Message) -> Message {
    model_of(17, graph)
}

pub(crate) fn model_of(opset: i64, graph: Message) -> Message {
    let opset = Message::new().bytes(1, "").int(2, opset);
    Message::new().int(1, 8).message(7, graph).message(8, opset)
}
