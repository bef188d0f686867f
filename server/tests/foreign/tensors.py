"""Example tensors of every v2 type, as the numpy arrays tritonclient takes."""

import ml_dtypes
import numpy as np

NUMPY = {
    "bool": np.bool_,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "fp16": np.float16,
    "fp32": np.float32,
    "fp64": np.float64,
    "bf16": ml_dtypes.bfloat16,
    "bytes": np.object_,
}


def v2(name):
    return name.upper()


def example(name):
    """A [3, 4] tensor that reaches the type's limits and is exact in it."""
    if name == "bool":
        return (np.arange(12) % 3 == 0).reshape(3, 4)
    if name == "bytes":
        words = [b"", b"a", b"\x00\xff\x80", "Haselmaus \u00e4\U0001f42d".encode(), b"x" * 1000]
        return np.array([words[i % 5] for i in range(12)], dtype=np.object_).reshape(3, 4)
    if name == "bf16":
        return np.linspace(-3e38, 3e38, 12).astype(ml_dtypes.bfloat16).reshape(3, 4)
    kind = NUMPY[name]
    if np.issubdtype(kind, np.floating):
        info = np.finfo(kind)
        values = np.linspace(-2, 2, 12).astype(kind)
        values[:4] = [info.min, info.max, info.tiny, -0.0]
        return values.reshape(3, 4)
    info = np.iinfo(kind)
    values = np.arange(12).astype(kind)
    values[:2] = [info.min, info.max]
    return values.reshape(3, 4)


def same(found, wanted):
    """Equal in shape and value; strings compared as bytes."""
    if found is None:
        raise AssertionError("no such output")
    if tuple(found.shape) != tuple(wanted.shape):
        raise AssertionError(f"shape {found.shape}, wanted {wanted.shape}")
    if wanted.dtype == np.object_:
        def octets(array):
            return [e if isinstance(e, bytes) else str(e).encode() for e in array.ravel()]

        if octets(found) != octets(wanted):
            raise AssertionError(f"{found!r}, wanted {wanted!r}")
    elif not np.array_equal(found.astype(wanted.dtype), wanted):
        raise AssertionError(f"{found!r}, wanted {wanted!r}")
