"""tritonclient's repository calls on a server in explicit mode with `simple` loaded."""

import json
import pathlib

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from checks import arguments, cases, expect, expect_in, refuses, run
from tritonclient.utils import InferenceServerException

args = arguments()
MODELS = pathlib.Path(__file__).resolve().parent.parent / "models"
PROTOCOLS = [
    ("grpc", triton_grpc, triton_grpc.InferenceServerClient(args.grpc)),
    ("http", triton_http, triton_http.InferenceServerClient(args.http)),
]


def sums(module, client, model="simple"):
    tensors = []
    for name, value in (("INPUT0", 5), ("INPUT1", 3)):
        tensors.append(module.InferInput(name, [1, 16], "INT32"))
        tensors[-1].set_data_from_numpy(np.full((1, 16), value, np.int32))
    return int(client.infer(model, tensors).as_numpy("OUTPUT0")[0][0])


def state(client, model):
    index = client.get_model_repository_index()
    if not isinstance(index, list):
        index = [
            {"name": entry.name, "state": entry.state, "reason": entry.reason} for entry in index.models
        ]
    return [entry for entry in index if entry["name"] == model]


@cases(PROTOCOLS)
def load_and_unload(protocol):
    _, module, client = protocol
    expect(client.is_model_ready("versions"), False)
    client.load_model("versions")
    expect(client.is_model_ready("versions"), True)
    expect(sums(module, client, "versions"), 2)
    assert all(entry["state"] == "READY" for entry in state(client, "versions"))
    client.unload_model("versions")
    for _ in range(1000):
        if not client.is_model_ready("versions"):
            break
    expect(client.is_model_ready("versions"), False)
    refuses(lambda: sums(module, client, "versions"), InferenceServerException)
    client.unload_model("versions", unload_dependents=True)


@cases(PROTOCOLS)
def load_with_another_configuration(protocol):
    _, module, client = protocol
    config = {"backend": "onnxruntime", "max_batch_size": 2, "version_policy": {"specific": {"versions": [1]}}}
    client.load_model("versions", config=json.dumps(config))
    found = client.get_model_config("versions")
    size = found["max_batch_size"] if isinstance(found, dict) else found.config.max_batch_size
    expect(size, 2)
    expect(sums(module, client, "versions"), 8)
    client.load_model("versions")
    expect(sums(module, client, "versions"), 2)
    client.unload_model("versions")


SWAPPED = {"file:5/model.onnx": (MODELS / "add_sub_swapped.onnx").read_bytes()}
CONFIG = json.dumps({"backend": "onnxruntime", "max_batch_size": 4})


@cases(PROTOCOLS)
def files_in_a_load_take_the_place_of_the_models_folder(protocol):
    _, module, client = protocol
    client.load_model("simple", config=CONFIG, files=SWAPPED)
    expect(sums(module, client), 2)
    metadata = client.get_model_metadata("simple")
    versions = metadata["versions"] if isinstance(metadata, dict) else list(metadata.versions)
    expect(versions, ["5"])
    # Another file of the same size is another model.
    client.load_model("simple", config=CONFIG, files={"file:5/model.onnx": (MODELS / "add_sub.onnx").read_bytes()})
    expect(sums(module, client), 8)
    client.load_model("simple", config=CONFIG, files=SWAPPED)
    expect(sums(module, client), 2)
    # Without them, it is the repository's again.
    client.load_model("simple")
    expect(sums(module, client), 8)
    # So it is after an unload.
    client.load_model("simple", config=CONFIG, files=SWAPPED)
    client.unload_model("simple")
    client.load_model("simple")
    expect(sums(module, client), 8)


@cases(PROTOCOLS)
def a_model_of_no_repository_can_be_brought_along(protocol):
    _, module, client = protocol
    client.load_model("guest", config=CONFIG, files=SWAPPED)
    expect(sums(module, client, "guest"), 2)
    assert all(entry["state"] == "READY" for entry in state(client, "guest"))
    client.unload_model("guest")
    expect(state(client, "guest"), [])
    refuses(lambda: sums(module, client, "guest"), InferenceServerException)
    error = refuses(lambda: client.load_model("guest"), InferenceServerException)
    expect_in("guest", error.message())


@cases(PROTOCOLS)
def files_that_cannot_be_used_change_nothing(protocol):
    _, module, client = protocol
    content = SWAPPED["file:5/model.onnx"]
    error = refuses(lambda: client.load_model("simple", files=SWAPPED), InferenceServerException)
    expect_in("'config'", error.message())
    for path in ("../1/model.onnx", "/1/model.onnx", "1/../../model.onnx", "1//model.onnx", "", "a" * 300):
        refuses(
            lambda: client.load_model("simple", config=CONFIG, files={"file:" + path: content}),
            InferenceServerException,
        )
    for name in ("simple", "guest"):
        error = refuses(
            lambda: client.load_model(name, config=CONFIG, files={"file:1/model.onnx": b"nothing"}),
            InferenceServerException,
        )
        expect_in(name, error.message())
    expect(state(client, "guest"), [])
    expect(sums(module, client), 8)


@cases(PROTOCOLS)
def bad_loads_say_why(protocol):
    _, module, client = protocol
    for model in ("nobody", "corrupt"):
        error = refuses(lambda: client.load_model(model), InferenceServerException)
        expect_in(model, error.message())
    for entry in state(client, "corrupt"):
        expect(entry["state"], "UNAVAILABLE")
        assert entry["reason"], "no reason"
    error = refuses(lambda: client.load_model("simple", config="{"), InferenceServerException)
    assert error.message()
    error = refuses(
        lambda: client.load_model("simple", config=json.dumps({"no_such_field": 1})),
        InferenceServerException,
    )
    expect_in("no_such_field", error.message())
    # Whatever was refused, the loaded model goes on.
    expect(sums(module, client), 8)


run()
