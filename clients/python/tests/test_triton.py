"""tritonclient's types and ours in one process, its messages and ours side by side."""

from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

import dormouse
from dormouse import Client


def triton_inputs(module: Any, **options: Any) -> Any:
    inputs = []
    for name, value in (("INPUT0", 5), ("INPUT1", 3)):
        tensor = module.InferInput(name, [1, 16], "INT32")
        tensor.set_data_from_numpy(np.full((1, 16), value, np.int32), **options)
        inputs.append(tensor)
    return inputs


@pytest.mark.parametrize(
    ("module", "options"),
    [(triton_grpc, {}), (triton_http, {}), (triton_http, {"binary_data": False})],
)
def test_their_inputs_and_outputs_are_taken(client: Client, module: Any, options: Any) -> None:
    outputs = [module.InferRequestedOutput("OUTPUT1")]
    result = client.infer("simple", triton_inputs(module, **options), outputs=outputs)
    assert list(result) == ["OUTPUT1"]
    array = result.as_numpy("OUTPUT1")
    assert array is not None and array.tolist() == [[2] * 16]


@pytest.mark.parametrize("options", [{}, {"binary_data": False}])
def test_their_strings_are_taken(client: Client, options: Any) -> None:
    tensor = triton_http.InferInput("INPUT", [1, 2], "BYTES")
    tensor.set_data_from_numpy(np.array([["a", "bc"]], object), **options)
    assert client.infer("identity_bytes", [tensor])["OUTPUT"].tolist() == [[b"a", b"bc"]]


def test_our_answer_becomes_theirs(client: Client, url: str) -> None:
    inputs = triton_inputs(triton_grpc)
    ours = client.infer("simple", inputs, id="x")
    with triton_grpc.InferenceServerClient(url) as their_client:
        theirs = their_client.infer("simple", inputs, request_id="x")
    for output in ("OUTPUT0", "OUTPUT1"):
        assert np.array_equal(ours[output], theirs.as_numpy(output))
        assert np.array_equal(ours.to_triton().as_numpy(output), theirs.as_numpy(output))
    mine, yours = ours.get_response(as_json=True), theirs.get_response(as_json=True)
    assert mine == yours


def test_their_inputs_are_checked_too(client: Client) -> None:
    with pytest.raises(dormouse.InvalidInput, match="has no data: call set_data_from_numpy"):
        client.infer("simple", [triton_grpc.InferInput("INPUT0", [1, 16], "INT32")])
    wrong = triton_grpc.InferInput("INPUT0", [1, 16], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 16), np.float32))
    with pytest.raises(dormouse.InvalidInput, match="is INT32, given FP32"):
        client.infer("simple", [wrong])
    strangers: Any = [np.zeros(3)]
    with pytest.raises(dormouse.InvalidInput, match="this list has a ndarray"):
        client.infer("simple", strangers)
