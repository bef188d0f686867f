"""tritonclient.grpc: every unary call."""

import queue
import struct

import grpc
import numpy as np
import tritonclient.grpc as triton
from checks import arguments, cases, check, expect, expect_in, refuses, run
from tensors import NUMPY, example, same, v2
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

args = arguments()
client = triton.InferenceServerClient(args.grpc)
stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(args.grpc))


def inputs(name, array, kind):
    tensor = triton.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def add_sub(model="simple", rows=1, **options):
    left = np.arange(rows * 16, dtype=np.int32).reshape(rows, 16)
    right = np.ones((rows, 16), np.int32)
    tensors = [inputs("INPUT0", left, "INT32"), inputs("INPUT1", right, "INT32")]
    return left, right, client.infer(model, tensors, **options)


@check
def live_and_ready():
    expect(client.is_server_live(), True)
    expect(client.is_server_ready(), True)
    expect(client.is_model_ready("simple"), True)
    expect(client.is_model_ready("simple", "1"), True)
    expect(client.is_model_ready("simple", "9"), False)


@check
def server_metadata():
    metadata = client.get_server_metadata()
    assert metadata.name and metadata.version, metadata
    for extension in ("model_repository", "model_configuration", "binary_tensor_data", "statistics"):
        expect_in(extension, list(metadata.extensions), "extensions")


@check
def model_metadata():
    metadata = client.get_model_metadata("simple")
    expect(metadata.name, "simple")
    expect(list(metadata.versions), ["1"])
    expect(metadata.platform, "onnxruntime_onnx")
    expect(sorted(tensor.name for tensor in metadata.inputs), ["INPUT0", "INPUT1"])
    expect(sorted(tensor.name for tensor in metadata.outputs), ["OUTPUT0", "OUTPUT1"])
    for tensor in (*metadata.inputs, *metadata.outputs):
        expect((tensor.datatype, list(tensor.shape)), ("INT32", [-1, 16]))
    expect(list(client.get_model_metadata("versions").versions), ["1", "2"])
    expect(client.get_model_metadata("simple", as_json=True)["name"], "simple")


@check
def model_config():
    config = client.get_model_config("simple").config
    expect((config.name, config.backend, config.max_batch_size), ("simple", "onnxruntime", 4))
    expect({tensor.name: list(tensor.dims) for tensor in config.input}, {"INPUT0": [16], "INPUT1": [16]})
    expect(config.HasField("dynamic_batching"), True, "dynamic batching")
    assert len(config.instance_group) > 0, "no instance group"
    expect(client.get_model_config("flat_fp32").config.max_batch_size, 0)


@check
def optional_inputs_are_marked():
    config = client.get_model_config("optional_input").config
    optional = {tensor.name: tensor.optional for tensor in config.input}
    expect(optional, {"X": False, "BIAS": True})


@check
def statistics_move():
    def counts():
        (entry,) = client.get_inference_statistics("simple").model_stats
        return entry.inference_count, entry.inference_stats.success.count, entry.execution_count

    before = counts()
    add_sub(rows=3)
    after = counts()
    expect((after[0] - before[0], after[1] - before[1], after[2] - before[2]), (3, 1, 1))
    (entry,) = client.get_inference_statistics("simple", "1").model_stats
    assert entry.last_inference > 0
    assert entry.inference_stats.compute_infer.ns > 0
    assert any(batch.batch_size == 3 for batch in entry.batch_stats), entry.batch_stats
    # What this client has no name for is skipped: the rest of the entry is read as ever.
    as_json = client.get_inference_statistics("simple", as_json=True)["model_stats"][0]
    expect((as_json["name"], as_json["version"]), ("simple", "1"))
    expect(int(as_json["inference_count"]), entry.inference_count)
    assert not hasattr(entry, "cold_starts") and entry.ByteSize() > 0
    names = {entry.name for entry in client.get_inference_statistics().model_stats}
    expect_in("simple", names)


@check
def repository_index():
    index = {(model.name, model.version): model for model in client.get_model_repository_index().models}
    expect(index["simple", "1"].state, "READY")
    assert ("versions", "1") in index and ("versions", "2") in index, list(index)
    corrupt = [model for (name, _), model in index.items() if name == "corrupt"]
    expect(len(corrupt), 1)


@cases(NUMPY)
def round_trip(kind):
    array = example(kind)
    for model in ("identity", "flat"):
        answer = client.infer(f"{model}_{kind}", [inputs("INPUT", array, v2(kind))])
        same(answer.as_numpy("OUTPUT"), array)
        (output,) = answer.get_response().outputs
        expect((output.datatype, list(output.shape)), (v2(kind), [3, 4]))
        expect(len(answer.get_response().raw_output_contents), 1, "raw outputs")


CONTENTS = {
    "bool": "bool_contents",
    "uint8": "uint_contents",
    "uint16": "uint_contents",
    "uint32": "uint_contents",
    "uint64": "uint64_contents",
    "int8": "int_contents",
    "int16": "int_contents",
    "int32": "int_contents",
    "int64": "int64_contents",
    "fp32": "fp32_contents",
    "fp64": "fp64_contents",
    "bytes": "bytes_contents",
}


@cases(CONTENTS)
def typed_contents(kind):
    array = example(kind)
    request = pb.ModelInferRequest(model_name=f"flat_{kind}", id="typed")
    tensor = request.inputs.add(name="INPUT", datatype=v2(kind), shape=[3, 4])
    getattr(tensor.contents, CONTENTS[kind]).extend(array.ravel().tolist())
    response = stub.ModelInfer(request)
    expect(response.id, "typed")
    same(triton.InferResult(response).as_numpy("OUTPUT"), array)


@check
def typed_contents_out_of_range_are_refused():
    request = pb.ModelInferRequest(model_name="flat_int8")
    tensor = request.inputs.add(name="INPUT", datatype="INT8", shape=[1, 2])
    tensor.contents.int_contents.extend([1, 300])
    error = refuses(lambda: stub.ModelInfer(request), grpc.RpcError)
    expect(error.code(), grpc.StatusCode.INVALID_ARGUMENT)


@check
def contents_of_another_type_are_refused():
    request = pb.ModelInferRequest(model_name="flat_int32")
    tensor = request.inputs.add(name="INPUT", datatype="INT32", shape=[1, 2])
    tensor.contents.fp32_contents.extend([1, 2])
    error = refuses(lambda: stub.ModelInfer(request), grpc.RpcError)
    expect(error.code(), grpc.StatusCode.INVALID_ARGUMENT)


@check
def raw_and_typed_contents_do_not_mix():
    request = pb.ModelInferRequest(model_name="simple")
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    request.inputs[0].contents.int_contents.extend(range(16))
    request.raw_input_contents.append(struct.pack("<16i", *range(16)))
    error = refuses(lambda: stub.ModelInfer(request), grpc.RpcError)
    expect(error.code(), grpc.StatusCode.INVALID_ARGUMENT)


@check
def scalars():
    """A configuration cannot say "no dimensions": a scalar is [1] to clients, as in Triton."""
    array = np.array([21], np.float32)
    same(client.infer("scalar", [inputs("X", array, "FP32")]).as_numpy("Y"), array * 2)


@check
def no_inputs_at_all():
    same(client.infer("no_input", []).as_numpy("Y"), np.arange(6, dtype=np.float32).reshape(2, 3))


@check
def empty_tensors():
    for kind in ("fp32", "int64", "bool"):
        array = np.empty((0, 3), NUMPY[kind])
        answer = client.infer(f"flat_{kind}", [inputs("INPUT", array, v2(kind))])
        same(answer.as_numpy("OUTPUT"), array)


@check
def optional_input_left_out_and_given():
    x = np.ones((2, 4), np.float32)
    answer = client.infer("optional_input", [inputs("X", x, "FP32")])
    same(answer.as_numpy("Y"), x + 100)
    bias = np.full((1, 4), 5, np.float32)
    answer = client.infer("optional_input", [inputs("X", x, "FP32"), inputs("BIAS", bias, "FP32")])
    same(answer.as_numpy("Y"), x + 5)


@check
def external_weights():
    x = np.ones((2, 4), np.float32)
    same(client.infer("external", [inputs("X", x, "FP32")]).as_numpy("Y"), np.full((2, 4), 8, np.float32))


@check
def requested_outputs():
    left, right, answer = add_sub(outputs=[triton.InferRequestedOutput("OUTPUT1")])
    same(answer.as_numpy("OUTPUT1"), left - right)
    expect(answer.as_numpy("OUTPUT0"), None)
    names = ["OUTPUT1", "OUTPUT0"]
    _, _, answer = add_sub(outputs=[triton.InferRequestedOutput(name) for name in names])
    expect([output.name for output in answer.get_response().outputs], names)


@check
def unknown_output_is_refused():
    error = refuses(
        lambda: add_sub(outputs=[triton.InferRequestedOutput("NONE")]), InferenceServerException
    )
    expect(error.status(), "StatusCode.INVALID_ARGUMENT")
    expect_in("NONE", error.message())


@check
def versions_answer_differently():
    left, right, answer = add_sub("versions", model_version="1")
    same(answer.as_numpy("OUTPUT0"), left + right)
    for version in ("2", ""):
        left, right, answer = add_sub("versions", model_version=version)
        same(answer.as_numpy("OUTPUT0"), left - right)
        expect(answer.get_response().model_version, "2")


@check
def request_id_is_echoed():
    _, _, answer = add_sub(request_id="my id \u00e4")
    expect(answer.get_response().id, "my id \u00e4")
    expect(answer.get_response().model_name, "simple")


@check
def custom_parameters_headers_and_priority_are_accepted():
    add_sub(parameters={"text": "a", "number": 5, "flag": True}, headers={"x-tag": "1"}, priority=1)
    add_sub(sequence_id=0, sequence_start=False, sequence_end=False, timeout=10_000_000)


@cases(["gzip", "deflate"])
def compression(algorithm):
    left, right, answer = add_sub(rows=4, compression_algorithm=algorithm)
    same(answer.as_numpy("OUTPUT0"), left + right)


@check
def generous_client_timeout():
    add_sub(client_timeout=60)


@check
def short_client_timeout():
    array = np.array([100_000_000], np.int64)
    error = refuses(
        lambda: client.infer("slow", [inputs("ITERATIONS", array, "INT64")], client_timeout=0.2),
        InferenceServerException,
    )
    expect(error.status(), "StatusCode.DEADLINE_EXCEEDED")
    quick = client.infer("slow", [inputs("ITERATIONS", np.array([3]), "INT64")])
    same(quick.as_numpy("COUNT"), np.array([3]))


@check
def cancellation():
    answers = queue.Queue()
    array = np.array([100_000_000], np.int64)
    call = client.async_infer(
        "slow",
        [inputs("ITERATIONS", array, "INT64")],
        lambda result, error: answers.put((result, error)),
    )
    call.cancel()
    result, error = answers.get(timeout=60)
    expect(result, None)
    expect(error.status(), "StatusCode.CANCELLED")
    quick = client.infer("slow", [inputs("ITERATIONS", np.array([3]), "INT64")])
    same(quick.as_numpy("COUNT"), np.array([3]))


@check
def asynchronous_calls():
    answers = queue.Queue()
    left = np.arange(16, dtype=np.int32).reshape(1, 16)
    for i in range(50):
        tensors = [
            inputs("INPUT0", left * i, "INT32"),
            inputs("INPUT1", left, "INT32"),
        ]
        client.async_infer(
            "simple",
            tensors,
            lambda result, error: answers.put((result, error)),
            request_id=str(i),
        )
    seen = set()
    for _ in range(50):
        result, error = answers.get(timeout=60)
        expect(error, None)
        i = int(result.get_response().id)
        same(result.as_numpy("OUTPUT0"), left * i + left)
        seen.add(i)
    expect(seen, set(range(50)))


def refused_with(code, words, change):
    """Sends a good `simple` request after `change` spoilt it."""
    request = pb.ModelInferRequest(model_name="simple")
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        request.raw_input_contents.append(bytes(64))
    change(request)
    error = refuses(lambda: stub.ModelInfer(request), grpc.RpcError)
    expect(error.code(), code, f"code of {error.details()!r}")
    for word in words:
        expect_in(word, error.details())


BAD = grpc.StatusCode.INVALID_ARGUMENT


def spoil(**fields):
    def change(request):
        for key, value in fields.items():
            if key == "shape":
                del request.inputs[0].shape[:]
                request.inputs[0].shape.extend(value)
            elif key == "raw":
                request.raw_input_contents[0] = value
            else:
                setattr(request.inputs[0], key, value)

    return change


def drop_input(request):
    del request.inputs[1]
    del request.raw_input_contents[1]


def add_input(request):
    request.inputs.add(name="INPUT2", datatype="INT32", shape=[1, 16])
    request.raw_input_contents.append(bytes(64))


def repeat_input(request):
    request.inputs[1].name = "INPUT0"


@cases(
    [
        ("missing input", BAD, ["INPUT1"], drop_input),
        ("unknown input", BAD, ["INPUT2"], add_input),
        ("repeated input", BAD, ["INPUT0"], repeat_input),
        ("wrong type", BAD, ["INPUT0", "FP32", "INT32"], spoil(datatype="FP32")),
        ("unknown type", BAD, ["INT33"], spoil(datatype="INT33")),
        ("wrong shape", BAD, ["INPUT0", "[1,17]", "16"], spoil(shape=[1, 17])),
        ("wrong rank", BAD, ["INPUT0"], spoil(shape=[16])),
        ("negative dimension", BAD, ["INPUT0"], spoil(shape=[-1, 16])),
        ("huge dimension", BAD, ["INPUT0"], spoil(shape=[1 << 40, 16])),
        ("overflowing shape", BAD, ["INPUT0"], spoil(shape=[1 << 62, 1 << 62])),
        ("too many rows", BAD, ["simple"], spoil(shape=[5, 16], raw=bytes(320))),
        ("short data", BAD, ["INPUT0", "63", "64"], spoil(raw=bytes(63))),
        ("long data", BAD, ["INPUT0", "68", "64"], spoil(raw=bytes(68))),
        ("missing data", BAD, [], lambda request: request.raw_input_contents.pop()),
        ("extra data", BAD, [], lambda request: request.raw_input_contents.append(b"")),
        ("unknown model", grpc.StatusCode.NOT_FOUND, ["nobody"],
         lambda request: setattr(request, "model_name", "nobody")),
        ("unknown version", grpc.StatusCode.NOT_FOUND, ["simple", "7"],
         lambda request: setattr(request, "model_version", "7")),
        ("bad version", BAD, ["first"],
         lambda request: setattr(request, "model_version", "first")),
        ("no model", grpc.StatusCode.NOT_FOUND, [], lambda request: request.ClearField("model_name")),
        ("broken model", grpc.StatusCode.UNAVAILABLE, ["corrupt"],
         lambda request: setattr(request, "model_name", "corrupt")),
    ]
)
def refused(case):
    _, code, words, change = case
    refused_with(code, words, change)


@cases(
    [
        ("length beyond the end", struct.pack("<I", 100) + b"abc", [1, 1]),
        ("cut length", b"\x01\x00", [1, 1]),
        ("too few elements", struct.pack("<I", 1) + b"a", [1, 2]),
        ("too many elements", (struct.pack("<I", 1) + b"a") * 3, [1, 2]),
        ("largest length", b"\xff\xff\xff\xff", [1, 1]),
    ]
)
def broken_strings(case):
    _, data, shape = case
    request = pb.ModelInferRequest(model_name="flat_bytes", raw_input_contents=[data])
    request.inputs.add(name="INPUT", datatype="BYTES", shape=shape)
    error = refuses(lambda: stub.ModelInfer(request), grpc.RpcError)
    expect(error.code(), BAD, f"code of {error.details()!r}")
    expect_in("INPUT", error.details())


@check
def engine_failure_names_the_model():
    array = np.array([[1000]], np.int32)
    error = refuses(
        lambda: client.infer("poison", [inputs("X", array, "INT32")]), InferenceServerException
    )
    expect_in("Gather", error.message())


@check
def large_tensor():
    array = np.arange(4 << 20, dtype=np.float32).reshape(1, -1)
    same(client.infer("flat_fp32", [inputs("INPUT", array, "FP32")]).as_numpy("OUTPUT"), array)


@check
def shared_memory_is_off_and_says_so():
    for call in (
        client.get_system_shared_memory_status,
        lambda: client.register_system_shared_memory("region", "/key", 64),
    ):
        error = refuses(call, InferenceServerException)
        expect(error.status(), "StatusCode.UNIMPLEMENTED")
        expect_in("--allow-client-shm", error.message())
    extensions = list(client.get_server_metadata().extensions)
    assert not any("shared_memory" in extension for extension in extensions), extensions


run()
