"""tritonclient.http: every call."""

import numpy as np
import tritonclient.http as triton
from checks import arguments, cases, check, expect, expect_in, refuses, run
from tensors import NUMPY, example, same, v2
from tritonclient.utils import InferenceServerException

args = arguments()
client = triton.InferenceServerClient(args.http, concurrency=8, network_timeout=120)


def inputs(name, array, kind, binary=True):
    tensor = triton.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def add_sub(model="simple", rows=1, binary=True, **options):
    left = np.arange(rows * 16, dtype=np.int32).reshape(rows, 16)
    right = np.ones((rows, 16), np.int32)
    tensors = [inputs("INPUT0", left, "INT32", binary), inputs("INPUT1", right, "INT32", binary)]
    return left, right, client.infer(model, tensors, **options)


@check
def live_and_ready():
    expect(client.is_server_live(), True)
    expect(client.is_server_ready(), True)
    expect(client.is_model_ready("simple"), True)
    expect(client.is_model_ready("simple", "1"), True)
    expect(client.is_model_ready("simple", "9"), False)
    expect(client.is_model_ready("nobody"), False)


@check
def server_metadata():
    metadata = client.get_server_metadata()
    assert metadata["name"] and metadata["version"], metadata
    expect_in("binary_tensor_data", metadata["extensions"])


@check
def model_metadata():
    metadata = client.get_model_metadata("simple")
    expect((metadata["name"], metadata["platform"]), ("simple", "onnxruntime_onnx"))
    expect(metadata["versions"], ["1"])
    shapes = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in metadata["inputs"]}
    expect(shapes, {"INPUT0": ("INT32", [-1, 16]), "INPUT1": ("INT32", [-1, 16])})


@check
def model_config():
    config = client.get_model_config("simple")
    expect((config["name"], config["backend"], config["max_batch_size"]), ("simple", "onnxruntime", 4))
    expect_in("dynamic_batching", config)
    expect(config["input"][0]["data_type"], "TYPE_INT32")
    dims = [int(dim) for dim in config["input"][0]["dims"]]
    expect(dims, [16])


@check
def statistics_move():
    def entry():
        (entry,) = client.get_inference_statistics("simple")["model_stats"]
        return entry

    before = entry()["inference_count"]
    add_sub(rows=2)
    after = entry()
    expect(after["inference_count"] - before, 2)
    assert after["inference_stats"]["success"]["count"] > 0
    assert after["last_inference"] > 0
    cold = after["cold_starts"][-1]
    expect(cold["kind"] in ("source", "prepared", "parked"), True, cold)
    expect_in("session", {stage["name"] for stage in cold["stages"]})
    names = {entry["name"] for entry in client.get_inference_statistics()["model_stats"]}
    expect_in("simple", names)


@check
def repository_index():
    index = {(entry["name"], entry.get("version")): entry for entry in client.get_model_repository_index()}
    expect(index["simple", "1"]["state"], "READY")
    expect_in("corrupt", {name for name, _ in index})


@cases(NUMPY)
def round_trip_binary(kind):
    array = example(kind)
    for model in ("identity", "flat"):
        answer = client.infer(f"{model}_{kind}", [inputs("INPUT", array, v2(kind))])
        same(answer.as_numpy("OUTPUT"), array)


@cases([kind for kind in NUMPY if kind not in ("fp16", "bf16", "bytes")])
def round_trip_json(kind):
    array = example(kind)
    answer = client.infer(
        f"flat_{kind}",
        [inputs("INPUT", array, v2(kind), binary=False)],
        outputs=[triton.InferRequestedOutput("OUTPUT", binary_data=False)],
    )
    same(answer.as_numpy("OUTPUT"), array)


@check
def strings_as_json():
    array = np.array([["", "a", 'quote " \\ / \n', "Haselmaus \u00e4\U0001f42d"]], dtype=np.object_)
    answer = client.infer(
        "flat_bytes",
        [inputs("INPUT", array, "BYTES", binary=False)],
        outputs=[triton.InferRequestedOutput("OUTPUT", binary_data=False)],
    )
    same(answer.as_numpy("OUTPUT"), array)


@check
def binary_in_json_out_and_the_other_way():
    for binary_in in (True, False):
        for binary_out in (True, False):
            names = ("OUTPUT0", "OUTPUT1")
            outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in names]
            left, right, answer = add_sub(binary=binary_in, outputs=outputs)
            same(answer.as_numpy("OUTPUT0"), left + right)
            same(answer.as_numpy("OUTPUT1"), left - right)


@check
def mixed_binary_and_json():
    outputs = [
        triton.InferRequestedOutput("OUTPUT0", binary_data=True),
        triton.InferRequestedOutput("OUTPUT1", binary_data=False),
    ]
    left, right = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)
    tensors = [inputs("INPUT0", left, "INT32", False), inputs("INPUT1", right, "INT32", True)]
    answer = client.infer("simple", tensors, outputs=outputs)
    same(answer.as_numpy("OUTPUT0"), left + right)
    same(answer.as_numpy("OUTPUT1"), left - right)


@check
def scalars_constants_and_empty_tensors():
    array = np.array([21], np.float32)
    same(client.infer("scalar", [inputs("X", array, "FP32")]).as_numpy("Y"), array * 2)
    same(client.infer("no_input", []).as_numpy("Y"), np.arange(6, dtype=np.float32).reshape(2, 3))
    empty = np.empty((0, 3), np.float32)
    same(client.infer("flat_fp32", [inputs("INPUT", empty, "FP32")]).as_numpy("OUTPUT"), empty)


@check
def optional_input_left_out_and_given():
    x = np.ones((2, 4), np.float32)
    same(client.infer("optional_input", [inputs("X", x, "FP32")]).as_numpy("Y"), x + 100)
    bias = np.full((1, 4), 5, np.float32)
    both = [inputs("X", x, "FP32"), inputs("BIAS", bias, "FP32")]
    same(client.infer("optional_input", both).as_numpy("Y"), x + 5)


@check
def requested_outputs():
    left, right, answer = add_sub(outputs=[triton.InferRequestedOutput("OUTPUT1")])
    same(answer.as_numpy("OUTPUT1"), left - right)
    expect(answer.as_numpy("OUTPUT0"), None)


@check
def versions_answer_differently():
    left, right, answer = add_sub("versions", model_version="1")
    same(answer.as_numpy("OUTPUT0"), left + right)
    left, right, answer = add_sub("versions", model_version="2")
    same(answer.as_numpy("OUTPUT0"), left - right)


@check
def id_parameters_priority_and_timeout():
    _, _, answer = add_sub(
        request_id="my id \u00e4",
        priority=1,
        timeout=10_000_000,
        parameters={"text": "a", "number": 5, "flag": True},
        headers={"x-tag": "1"},
        query_params={"unused": "1"},
    )
    expect(answer.get_response()["id"], "my id \u00e4")
    expect(answer.get_response()["model_name"], "simple")
    expect(answer.get_response()["model_version"], "1")


@cases(["gzip", "deflate"])
def compression(algorithm):
    for request, response in ((algorithm, None), (None, algorithm), (algorithm, algorithm)):
        left, right, answer = add_sub(
            rows=4,
            request_compression_algorithm=request,
            response_compression_algorithm=response,
        )
        same(answer.as_numpy("OUTPUT0"), left + right)


@check
def asynchronous_calls():
    left = np.arange(16, dtype=np.int32).reshape(1, 16)
    calls = []
    for i in range(40):
        tensors = [inputs("INPUT0", left * i, "INT32"), inputs("INPUT1", left, "INT32")]
        calls.append((i, client.async_infer("simple", tensors)))
    for i, call in calls:
        same(call.get_result(timeout=60).as_numpy("OUTPUT0"), left * i + left)


@check
def generate_and_parse_bodies():
    array = np.ones((1, 16), np.int32)
    tensors = [inputs("INPUT0", array, "INT32"), inputs("INPUT1", array, "INT32")]
    body, header_length = triton.InferenceServerClient.generate_request_body(tensors)
    answer = client._post(
        request_uri="v2/models/simple/infer",
        request_body=body,
        headers={"Inference-Header-Content-Length": str(header_length)},
        query_params=None,
    )
    expect(answer.status_code, 200)
    length = answer.get("Inference-Header-Content-Length")
    parsed = triton.InferenceServerClient.parse_response_body(
        answer.read(), header_length=int(length) if length else None
    )
    same(parsed.as_numpy("OUTPUT0"), array * 2)


@cases(
    [
        ("unknown model", "404", "nobody", lambda: add_sub("nobody")),
        ("unknown version", "404", "simple", lambda: add_sub(model_version="7")),
        ("too many rows", "400", "simple", lambda: add_sub(rows=5)),
        ("unknown output", "400", "NONE",
         lambda: add_sub(outputs=[triton.InferRequestedOutput("NONE")])),
        ("missing input", "400", "INPUT1",
         lambda: client.infer("simple", [inputs("INPUT0", np.ones((1, 16), np.int32), "INT32")])),
        ("wrong type", "400", "INPUT",
         lambda: client.infer("flat_fp32", [inputs("INPUT", np.ones((1, 1), np.int32), "INT32")])),
        ("wrong rank", "400", "INPUT",
         lambda: client.infer("flat_fp32", [inputs("INPUT", np.ones(3, np.float32), "FP32")])),
    ]
)
def refused(case):
    _, status, word, call = case
    error = refuses(call, InferenceServerException)
    expect(error.status(), status, f"status of {error.message()!r}")
    expect_in(word, error.message())


@check
def large_tensor():
    array = np.arange(4 << 20, dtype=np.float32).reshape(1, -1)
    same(client.infer("flat_fp32", [inputs("INPUT", array, "FP32")]).as_numpy("OUTPUT"), array)


run()
