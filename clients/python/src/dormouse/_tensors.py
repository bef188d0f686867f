"""Between numpy's arrays and the protocol's bytes."""

from __future__ import annotations

import struct
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ._wire import Message
from .errors import InvalidInput, ProtocolError

Array = np.ndarray[Any, np.dtype[Any]]

try:
    from ml_dtypes import bfloat16 as _bfloat16
except ImportError:
    _bfloat16 = None

BF16: Optional[np.dtype[Any]] = None if _bfloat16 is None else np.dtype(_bfloat16)
"""numpy's type for BF16 where ``ml_dtypes`` is installed; otherwise its bits are ``uint16``."""

_FIXED: Dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("<u2") if BF16 is None else BF16,
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}

_BY_KIND: Dict[Tuple[str, int], str] = {
    (dtype.kind, dtype.itemsize): name for name, dtype in _FIXED.items() if name != "BF16"
}

_FLOATS = ("FP16", "BF16", "FP32", "FP64")

_CONTENTS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def numpy_dtype(datatype: str) -> np.dtype[Any]:
    """numpy's type of arrays of the protocol's ``datatype``."""
    if datatype == "BYTES":
        return np.dtype(object)
    found = _FIXED.get(datatype)
    if found is None:
        raise ProtocolError(f"the server speaks of a datatype {datatype!r}, which is not the protocol's")
    return found


def datatype_of(dtype: np.dtype[Any]) -> Optional[str]:
    """The protocol's name for numpy's ``dtype``, none when it has no counterpart."""
    if BF16 is not None and dtype == BF16:
        return "BF16"
    if dtype.kind in "OSU":
        return "BYTES"
    return _BY_KIND.get((dtype.kind, dtype.itemsize))


def is_array(value: Any) -> bool:
    """Whether the caller chose an element type, as for arrays and tensors, unlike for lists."""
    return isinstance(value, np.generic) or hasattr(value, "__array__")


def as_datatype(value: Any, datatype: str) -> Array:
    """A list or scalar as an array of ``datatype``; raises ``ValueError`` when values would change."""
    if datatype == "BYTES":
        return np.array(value, dtype=object)
    given = np.asarray(value)
    if datatype == "BF16" and BF16 is None:
        if given.dtype.kind not in "fiub":
            raise ValueError(f"{given.dtype} values are no numbers")
        with np.errstate(all="ignore"):
            _check_range(given, given.astype(np.float32), datatype)
        return _round_to_bf16(given.astype(np.float32))
    wanted = numpy_dtype(datatype)
    if given.size == 0:
        return given.astype(wanted)
    if not np.can_cast(given.dtype, wanted, casting="same_kind") and not (
        given.dtype.kind in "iu" and wanted.kind in "iu"
    ):
        raise ValueError(f"{given.dtype} values are not {datatype}")
    with np.errstate(all="ignore"):
        converted = given.astype(wanted)
    if given.dtype.kind in "iu" and wanted.kind in "iu" and not np.array_equal(given, converted):
        raise ValueError(f"values beyond the range of {datatype}")
    _check_range(given, converted, datatype)
    return converted


def _check_range(given: Array, converted: Array, datatype: str) -> None:
    """Rounding to a float is expected, becoming infinite is not."""
    if given.dtype.kind in "fiu" and datatype in _FLOATS:
        finite = np.isfinite(given)
        if not np.array_equal(finite, finite & np.isfinite(converted)):
            raise ValueError(f"values beyond the range of {datatype}")


def _round_to_bf16(given: Array) -> Array:
    bits = np.ascontiguousarray(given, dtype="<f4").view("<u4").reshape(given.shape)
    even = bits + (0x7FFF + ((bits >> 16) & 1)).astype("<u4")
    rounded = (even >> 16).astype("<u2")
    # Rounding could carry a NaN into infinity.
    quiet = ((bits >> 16) | 0x40).astype("<u2")
    return np.where(np.isnan(given), quiet, rounded).astype("<u2")


def encode(array: Array, datatype: str) -> bytes:
    """An array's elements as the protocol has them on the wire."""
    if datatype == "BYTES":
        return _encode_strings(array)
    if array.dtype != _FIXED[datatype]:
        # The other byte order, or the bits of BF16 in another type.
        array = array.astype(_FIXED[datatype]) if datatype != "BF16" else array.astype("<u2")
    return array.tobytes()


def _encode_strings(array: Array) -> bytes:
    parts: List[bytes] = []
    for index, element in enumerate(array.ravel(order="C").tolist()):
        if isinstance(element, str):
            element = element.encode()
        elif isinstance(element, (bytearray, memoryview)):
            element = bytes(element)
        elif not isinstance(element, bytes):
            raise InvalidInput(
                f"element {index} is of type {type(element).__name__}; a BYTES tensor holds str or bytes"
            )
        parts.append(struct.pack("<I", len(element)))
        parts.append(element)
    return b"".join(parts)


def decode(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> Array:
    """An output's bytes as an array. Fixed-size elements are a read-only view of ``raw``."""
    elements = _elements(name, shape)
    if datatype == "BYTES":
        return _decode_strings(name, elements, raw).reshape(shape)
    dtype = numpy_dtype(datatype)
    if len(raw) != elements * dtype.itemsize:
        raise ProtocolError(
            f"output {name!r} is {datatype}{list(shape)}, which takes {elements * dtype.itemsize} "
            f"bytes, and the server sent {len(raw)}"
        )
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def decode_contents(name: str, datatype: str, shape: Sequence[int], contents: Message) -> Array:
    """An output that some servers send as typed lists instead of bytes."""
    field = _CONTENTS.get(datatype)
    if field is None:
        raise ProtocolError(f"output {name!r} is {datatype} and came without its bytes")
    values = getattr(contents, field)
    elements = _elements(name, shape)
    if len(values) != elements:
        raise ProtocolError(
            f"output {name!r} is {datatype}{list(shape)}, which has {elements} elements, "
            f"and the server sent {len(values)}"
        )
    if datatype == "BYTES":
        return _objects(list(values)).reshape(shape)
    return np.array(values, dtype=numpy_dtype(datatype)).reshape(shape)


def _elements(name: str, shape: Sequence[int]) -> int:
    elements = 1
    for dimension in shape:
        if dimension < 0:
            raise ProtocolError(f"output {name!r} has the shape {list(shape)}")
        elements *= dimension
    return elements


def _decode_strings(name: str, elements: int, raw: bytes) -> Array:
    strings: List[bytes] = []
    position = 0
    while position < len(raw):
        if position + 4 > len(raw):
            raise ProtocolError(f"the bytes of output {name!r} end within an element's length")
        (length,) = struct.unpack_from("<I", raw, position)
        position += 4
        if position + length > len(raw):
            raise ProtocolError(f"the bytes of output {name!r} end within an element")
        strings.append(raw[position : position + length])
        position += length
    if len(strings) != elements:
        raise ProtocolError(
            f"output {name!r} should have {elements} elements, and the server sent {len(strings)}"
        )
    return _objects(strings)


def _objects(values: List[bytes]) -> Array:
    array: Array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
