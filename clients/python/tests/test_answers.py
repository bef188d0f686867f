"""Answers that are unusual, and timelines."""

from typing import Any

import numpy as np
import pytest

import dormouse
from dormouse import InferResult, _tensors, _wire
from dormouse._timeline import parse_server_timing


def response(datatype: str, shape: Any, raw: Any = None, **contents: Any) -> Any:
    message = _wire.ModelInferResponse(model_name="m", model_version="1")
    output = message.outputs.add(name="y", datatype=datatype, shape=shape)
    if raw is not None:
        message.raw_output_contents.append(raw)
    for field, values in contents.items():
        getattr(output.contents, field).extend(values)
    return message


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("INT8", "int_contents", [-1, 2]),
        ("UINT16", "uint_contents", [1, 2]),
        ("INT64", "int64_contents", [1, -2]),
        ("FP32", "fp32_contents", [0.5, 2.0]),
        ("BOOL", "bool_contents", [True, False]),
        ("BYTES", "bytes_contents", [b"a", b""]),
    ],
)
def test_typed_contents_of_other_servers_are_read(datatype: str, field: str, values: Any) -> None:
    output = InferResult(response(datatype, [1, 2], **{field: values}))["y"]
    assert output.tolist() == [values] and output.dtype == _tensors.numpy_dtype(datatype)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (response("FP32", [2], b"1234"), "takes 8 bytes, and the server sent 4"),
        (response("BYTES", [1], b"\5\0\0\0abc"), "end within an element"),
        (response("BYTES", [1], b"\5\0"), "end within an element's length"),
        (response("BYTES", [2], b"\1\0\0\0a"), "should have 2 elements, and the server sent 1"),
        (response("FP8", [1], b"1"), "which is not the protocol's"),
        (response("FP32", [-1], b""), "has the shape [-1]"),
        (response("FP32", [2], fp32_contents=[1.0]), "has 2 elements, and the server sent 1"),
        (response("BF16", [2]), "came without its bytes"),
    ],
)
def test_answers_that_contradict_themselves_are_refused(message: Any, says: str) -> None:
    with pytest.raises(dormouse.ProtocolError) as refused:
        InferResult(message)["y"]
    assert says in str(refused.value)


def test_an_output_in_shared_memory_is_no_array() -> None:
    message = response("FP32", [1], b"")
    message.outputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(KeyError, match="shared memory"):
        InferResult(message)["y"]


@pytest.mark.parametrize(
    ("value", "datatype"), [([1e300], "FP32"), ([70000], "FP16"), ([-7e4], "FP16"), ([1e39], "BF16")]
)
def test_lists_beyond_a_floats_range_are_refused(value: Any, datatype: str) -> None:
    with pytest.raises(ValueError, match="beyond the range"):
        _tensors.as_datatype(value, datatype)
    near = _tensors.as_datatype([0.1, float("inf"), float("nan")], datatype)
    assert near.shape == (3,)


def test_bytes_without_an_output_are_refused() -> None:
    message = response("FP32", [1], b"1234")
    message.raw_output_contents.append(b"")
    with pytest.raises(dormouse.ProtocolError, match="names 1 outputs and has the bytes of 2"):
        InferResult(message)


def test_a_result_is_a_mapping_and_speaks_triton() -> None:
    result = InferResult(response("INT32", [2], np.array([1, 2], np.int32).tobytes()))
    assert dict(result)["y"].tolist() == [1, 2] and len(result) == 1 and "z" not in result
    with pytest.raises(KeyError):
        result["z"]
    assert result.get_output("y").datatype == "INT32"
    assert result.get_output("y", as_json=True)["shape"] == ["2"]
    assert result.get_output("z") is None
    described: Any = result.get_response(as_json=True)
    assert described["model_name"] == "m"
    assert repr(result) == "<InferResult of m 1: y: INT32[2]>"


def test_rounding_to_bf16_by_hand_is_that_of_ml_dtypes() -> None:
    from ml_dtypes import bfloat16

    values = np.random.default_rng(7).standard_normal(10_000).astype(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-40], np.float32)
    for array in (values, special):
        ours = _tensors._round_to_bf16(array)
        theirs = array.astype(bfloat16).view(np.uint16)
        nan = np.isnan(array)
        assert np.array_equal(ours[~nan], theirs[~nan])
        assert np.isnan(ours[nan].view(bfloat16).astype(np.float32)).all()


def test_timelines_are_read() -> None:
    told = parse_server_timing(
        "load;dur=30;desc=prepared;overlap=2, populate;dur=1;start=0.5;bytes=4096, "
        'odd;desc="a, b;dur=9 \\" c";dur=2, wait;dur=31, run;dur=4, total;dur=35'
    )
    assert told is not None
    assert (told.total, told.kind, told.overlap, told.bytes) == (0.03, "prepared", 0.002, 4096)
    assert [(stage.name, stage.start, stage.duration) for stage in told.stages] == [
        ("populate", 0.0005, 0.001),
        ("odd", None, 0.002),
    ]
    assert told.request == dormouse.RequestTiming(waited=0.031, run=0.004, total=0.035)
    drawn = str(told)
    assert drawn.startswith("cold start from prepared: 30.0 ms\n  populate")
    assert "request: waited 31.0 ms, ran 4.0 ms, 35.0 ms in all" in drawn


@pytest.mark.parametrize(
    "value", ["", ",,;", "cache;dur=3", "load", "load;dur=x", "load;dur=-1", "load;dur=NaN"]
)
def test_what_is_no_load_is_no_cold_start(value: str) -> None:
    assert parse_server_timing(value) is None
