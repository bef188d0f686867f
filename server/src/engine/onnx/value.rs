//! Tensors going into and coming out of ONNX Runtime. Bytes are lent, not copied, wherever the
//! element type allows it.

use std::ptr::{self, NonNull};
use std::slice;

use bytes::Bytes;
use dormouse_core::datatype::DataType;
use dormouse_core::shape::{DisplayShape, Shape, byte_count, element_count};
use ort::sys;
use sys::ONNXTensorElementDataType as Element;

use super::environment::{Environment, missing};
use super::status::check;
use crate::engine::EngineError;
use crate::request::Tensor;

/// A value of ONNX Runtime, released on drop.
pub(super) struct Value {
    environment: &'static Environment,
    pub(super) ptr: NonNull<sys::OrtValue>,
}

#[expect(unsafe_code, reason = "a value holds a pointer of the C API")]
// SAFETY: a value is bound to no thread; ONNX Runtime's reference counts are atomic.
unsafe impl Send for Value {}
#[expect(unsafe_code, reason = "a value holds a pointer of the C API")]
// SAFETY: once created a value is only read, or released by its one owner.
unsafe impl Sync for Value {}

impl Drop for Value {
    #[expect(unsafe_code, reason = "frees a value of the C API")]
    fn drop(&mut self) {
        // SAFETY: owned, released once.
        unsafe { (self.environment.api.ReleaseValue)(self.ptr.as_ptr()) }
    }
}

impl Value {
    /// Takes over a value that ONNX Runtime handed out.
    pub(super) fn own(environment: &'static Environment, ptr: NonNull<sys::OrtValue>) -> Self {
        Self { environment, ptr }
    }
}

/// An input for one run: the value and the memory it points into, which must stay until after
/// the run.
pub(super) struct Input {
    // Declared first: the value goes before the memory it points into.
    pub(super) value: Value,
    memory: InputMemory,
}

enum InputMemory {
    /// The received buffer itself.
    Lent(Bytes),
    /// A copy whose address suits every element type.
    Aligned { words: Vec<u64>, length: usize },
    /// The value owns its strings.
    Owned,
}

impl Input {
    /// Makes a value of `tensor`, whose name only appears in errors.
    pub(super) fn new(
        environment: &'static Environment,
        name: &str,
        tensor: &Tensor,
    ) -> Result<Self, EngineError> {
        match tensor.datatype.element_size() {
            Some(size) => Self::fixed(environment, name, tensor, size),
            None => Self::strings(environment, name, tensor),
        }
    }

    /// The addresses the value covers, so that an output that is really an input is noticed.
    pub(super) fn covers(&self, address: usize) -> bool {
        let (start, length) = match &self.memory {
            InputMemory::Lent(bytes) => (bytes.as_ptr().addr(), bytes.len()),
            InputMemory::Aligned { words, length } => (words.as_ptr().addr(), *length),
            InputMemory::Owned => return false,
        };
        (start..start.saturating_add(length)).contains(&address)
    }

    #[expect(unsafe_code, reason = "creates a value over foreign memory")]
    fn fixed(
        environment: &'static Environment,
        name: &str,
        tensor: &Tensor,
        element_size: usize,
    ) -> Result<Self, EngineError> {
        let data = &tensor.data;
        let expected = byte_count(tensor.datatype, &tensor.shape);
        if expected != Some(data.len() as u64) {
            return Err(EngineError::Failed(format!(
                "input '{name}' has {} bytes, its shape {} of {} needs {}",
                data.len(),
                DisplayShape(&tensor.shape),
                tensor.datatype,
                expected.map_or_else(|| "more than can be counted".to_owned(), |n| n.to_string())
            )));
        }
        // A C++ bool that is neither 0 nor 1 is undefined behaviour in the kernels.
        let odd_bools = tensor.datatype == DataType::Bool && data.iter().any(|&byte| byte > 1);
        let memory = if odd_bools {
            InputMemory::Lent(data.iter().map(|&byte| u8::from(byte != 0)).collect())
        } else if data.as_ptr().addr().is_multiple_of(element_size) {
            InputMemory::Lent(data.clone())
        } else {
            aligned(data)
        };
        let start = match &memory {
            InputMemory::Lent(bytes) => bytes.as_ptr(),
            InputMemory::Aligned { words, .. } => words.as_ptr().cast(),
            InputMemory::Owned => ptr::null(),
        };
        let mut value = ptr::null_mut();
        let api = environment.api;
        // SAFETY: `start` is valid for `data.len()` bytes, which is what the shape needs, aligned
        // to the element, and stays so as long as `memory`, which outlives the value. ONNX Runtime
        // takes the pointer as mutable but never writes to what is fed to a run.
        check(api, unsafe {
            (api.CreateTensorWithDataAsOrtValue)(
                environment.memory.as_ptr(),
                start.cast_mut().cast(),
                data.len(),
                tensor.shape.as_ptr(),
                tensor.shape.len(),
                element(tensor.datatype),
                &mut value,
            )
        })?;
        let ptr = NonNull::new(value).ok_or_else(|| missing("input tensor"))?;
        Ok(Self {
            value: Value { environment, ptr },
            memory,
        })
    }

    #[expect(unsafe_code, reason = "fills a string tensor through the C API")]
    fn strings(
        environment: &'static Environment,
        name: &str,
        tensor: &Tensor,
    ) -> Result<Self, EngineError> {
        // Counted before anything is allocated: the shape's number alone proves nothing.
        let count = count_strings(&tensor.data)
            .map_err(|reason| EngineError::Failed(format!("input '{name}': {reason}")))?;
        if element_count(&tensor.shape) != Some(count as u64) {
            return Err(EngineError::Failed(format!(
                "input '{name}' has {count} BYTES elements, its shape {} needs {}",
                DisplayShape(&tensor.shape),
                element_count(&tensor.shape)
                    .map_or_else(|| "more than can be counted".to_owned(), |n| n.to_string())
            )));
        }
        let api = environment.api;
        let mut value = ptr::null_mut();
        // SAFETY: the shape is valid for its length and `value` is a place for one pointer.
        check(api, unsafe {
            (api.CreateTensorAsOrtValue)(
                environment.allocator.as_ptr(),
                tensor.shape.as_ptr(),
                tensor.shape.len(),
                Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING,
                &mut value,
            )
        })?;
        let ptr = NonNull::new(value).ok_or_else(|| missing("input tensor"))?;
        let value = Value { environment, ptr };
        // Element by element, because `FillStringTensor` ends each at its first zero byte.
        for (index, string) in Strings(&tensor.data).enumerate() {
            let mut room = ptr::null_mut();
            // SAFETY: `index` is below the element count checked above; on success `room` holds
            // `string.len()` bytes that belong to the value.
            unsafe {
                check(
                    api,
                    (api.GetResizedStringTensorElementBuffer)(
                        ptr.as_ptr(),
                        index,
                        string.len(),
                        &mut room,
                    ),
                )?;
                if !string.is_empty() {
                    if room.is_null() {
                        return Err(missing("room for a string"));
                    }
                    ptr::copy_nonoverlapping(string.as_ptr(), room.cast(), string.len());
                }
            }
        }
        Ok(Self {
            value,
            memory: InputMemory::Owned,
        })
    }
}

fn aligned(data: &[u8]) -> InputMemory {
    let mut words = vec![0u64; data.len().div_ceil(8)];
    for (word, chunk) in words.iter_mut().zip(data.chunks(8)) {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_ne_bytes(bytes);
    }
    InputMemory::Aligned {
        words,
        length: data.len(),
    }
}

/// The elements of a BYTES tensor in the raw layout; ends early on a malformed one.
struct Strings<'a>(&'a [u8]);

impl<'a> Iterator for Strings<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (length, rest) = self.0.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let (string, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some(string)
    }
}

fn count_strings(data: &[u8]) -> Result<usize, String> {
    let mut strings = Strings(data);
    let count = strings.by_ref().count();
    if strings.0.is_empty() {
        return Ok(count);
    }
    Err(format!(
        "BYTES element {count} does not fit: {} bytes are left for a length and its bytes",
        strings.0.len()
    ))
}

/// Reads what a run produced. `lent` tells addresses in memory that is not the value's own: an
/// output that is really an input or a weight is copied.
#[expect(unsafe_code, reason = "reads a value of the C API")]
pub(super) fn output(
    name: &str,
    value: Value,
    lent: impl Fn(usize) -> bool,
) -> Result<Tensor, EngineError> {
    let api = value.environment.api;
    let ptr = value.ptr.as_ptr();
    let mut present = 0;
    // The enums are read as integers: a newer library may know more of them than we do.
    let mut kind = 0i32;
    // SAFETY: `ptr` is alive; the places are large enough for what is written.
    unsafe {
        check(api, (api.HasValue)(ptr, &mut present))?;
        if present == 0 {
            return Err(EngineError::Failed(format!(
                "output '{name}' is an optional without a value, which has no form in the v2 protocol"
            )));
        }
        check(api, (api.GetValueType)(ptr, (&raw mut kind).cast()))?;
    }
    if kind != sys::ONNXType::ONNX_TYPE_TENSOR as i32 {
        return Err(EngineError::Failed(format!(
            "output '{name}' is {}, which has no form in the v2 protocol",
            kind_name(kind)
        )));
    }

    let mut element = 0i32;
    let mut dims = ptr::null();
    let mut rank = 0usize;
    // SAFETY: a present tensor; the shape that is pointed to belongs to the value and is copied
    // before the value can go.
    let shape: Shape = unsafe {
        check(
            api,
            (api.GetTensorElementTypeAndShapeDataReference)(
                ptr,
                (&raw mut element).cast(),
                &mut dims,
                &mut rank,
            ),
        )?;
        if rank == 0 || dims.is_null() {
            Shape::new()
        } else {
            Shape::from_slice(slice::from_raw_parts(dims, rank))
        }
    };
    let Some(datatype) = datatype(element) else {
        return Err(EngineError::Failed(format!(
            "output '{name}' has elements of type {}, which have no form in the v2 protocol",
            element_name(element)
        )));
    };
    let uncountable = || {
        EngineError::Failed(format!(
            "output '{name}' has an impossible shape {}",
            DisplayShape(&shape)
        ))
    };
    if datatype == DataType::Bytes {
        let count = element_count(&shape)
            .and_then(|count| usize::try_from(count).ok())
            .ok_or_else(uncountable)?;
        let data = read_strings(name, &value, count)?;
        return Ok(Tensor {
            datatype,
            shape,
            data,
        });
    }
    let length = byte_count(datatype, &shape)
        .and_then(|length| usize::try_from(length).ok())
        .ok_or_else(uncountable)?;
    let data = if length == 0 {
        Bytes::new()
    } else {
        let mut start = ptr::null_mut();
        // SAFETY: a present tensor of fixed-size elements.
        check(api, unsafe { (api.GetTensorMutableData)(ptr, &mut start) })?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| missing("output data"))?;
        let data = LentOutput {
            start,
            length,
            _value: value,
        };
        if lent(start.as_ptr().addr()) {
            Bytes::copy_from_slice(data.as_ref())
        } else {
            Bytes::from_owner(data)
        }
    };
    Ok(Tensor {
        datatype,
        shape,
        data,
    })
}

/// An output's bytes where ONNX Runtime put them.
struct LentOutput {
    start: NonNull<u8>,
    length: usize,
    _value: Value,
}

#[expect(unsafe_code, reason = "holds a pointer into a value of the C API")]
// SAFETY: the bytes belong to the value, which may be moved between threads.
unsafe impl Send for LentOutput {}

impl AsRef<[u8]> for LentOutput {
    #[expect(unsafe_code, reason = "views the memory of a value")]
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the value is a tensor of `length` bytes at `start` that nobody writes after the
        // run, and it is released only when `self` goes.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

/// Encodes a string tensor in the raw layout.
#[expect(unsafe_code, reason = "reads a string tensor of the C API")]
fn read_strings(name: &str, value: &Value, count: usize) -> Result<Bytes, EngineError> {
    if count == 0 {
        return Ok(Bytes::new());
    }
    let api = value.environment.api;
    let ptr = value.ptr.as_ptr();
    let mut total = 0usize;
    // SAFETY: a present string tensor.
    check(api, unsafe {
        (api.GetStringTensorDataLength)(ptr, &mut total)
    })?;
    let mut text = vec![0u8; total];
    let mut offsets = vec![0usize; count];
    // SAFETY: both buffers are as long as they are said to be.
    check(api, unsafe {
        (api.GetStringTensorContent)(
            ptr,
            text.as_mut_ptr().cast(),
            total,
            offsets.as_mut_ptr(),
            count,
        )
    })?;
    let mut out = Vec::with_capacity(total.saturating_add(count.saturating_mul(4)));
    for (index, &start) in offsets.iter().enumerate() {
        let end = offsets.get(index + 1).copied().unwrap_or(total);
        let string = text.get(start..end).ok_or_else(|| {
            EngineError::Failed(format!("output '{name}' has an impossible element {index}"))
        })?;
        let length = u32::try_from(string.len()).map_err(|_| {
            EngineError::Failed(format!(
                "output '{name}' element {index} has {} bytes, more than a BYTES element can have",
                string.len()
            ))
        })?;
        out.extend_from_slice(&length.to_le_bytes());
        out.extend_from_slice(string);
    }
    Ok(out.into())
}

pub(super) const fn element(datatype: DataType) -> Element {
    match datatype {
        DataType::Bool => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
        DataType::Uint8 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
        DataType::Uint16 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16,
        DataType::Uint32 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32,
        DataType::Uint64 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64,
        DataType::Int8 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
        DataType::Int16 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,
        DataType::Int32 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
        DataType::Int64 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
        DataType::Fp16 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        DataType::Bf16 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
        DataType::Fp32 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        DataType::Fp64 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE,
        DataType::Bytes => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING,
    }
}

/// The v2 type of an element type, none when there is none.
pub(super) fn datatype(raw: i32) -> Option<DataType> {
    DataType::ALL
        .into_iter()
        .find(|&datatype| element(datatype) as i32 == raw)
}

/// ONNX's name of an element type that v2 lacks.
pub(super) fn element_name(raw: i32) -> String {
    let name = match raw {
        0 => "undefined",
        14 => "complex64",
        15 => "complex128",
        17 => "float8e4m3fn",
        18 => "float8e4m3fnuz",
        19 => "float8e5m2",
        20 => "float8e5m2fnuz",
        21 => "uint4",
        22 => "int4",
        23 => "float4e2m1",
        24 => "uint2",
        25 => "int2",
        26 => "float8e8m0",
        other => return format!("number {other}"),
    };
    name.to_owned()
}

fn kind_name(raw: i32) -> &'static str {
    match raw {
        2 => "a sequence",
        3 => "a map",
        4 => "opaque",
        5 => "a sparse tensor",
        6 => "an optional",
        _ => "of an unknown kind",
    }
}
