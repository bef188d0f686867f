//! Element types as ONNX numbers and names them.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::onnx::{element_name, element_number};

/// An element type of ONNX, by its number in `TensorProto.DataType`; as text, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ElementType(pub i32);

impl ElementType {
    /// ONNX's name: `float`, `bfloat16`, `int64` …
    pub fn name(self) -> &'static str {
        element_name(self.0)
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for ElementType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for ElementType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        // A number that ONNX does not have is written as what it is: unknown.
        Ok(Self(element_number(&name).unwrap_or(0)))
    }
}
