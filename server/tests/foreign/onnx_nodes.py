"""The ONNX project's backend tests, served: models and recorded answers from the `onnx` package.

    onnx_nodes.py verdict            which cases v2 can express and ONNX Runtime itself passes;
                                     writes onnx_node_cases.txt beside this file
    onnx_nodes.py build FOLDER       lays those cases out as a model repository
    onnx_nodes.py --http=… … run     sends each through gRPC, HTTP binary and HTTP JSON
"""

import argparse
import ctypes
import http.client
import json
import pathlib
import shutil
import struct
import sys
import threading
import time

import ml_dtypes
import numpy as np
import onnx
import onnx.backend.test
from onnx import TensorProto as T
from onnx import numpy_helper

LIST = pathlib.Path(__file__).resolve().parent / "onnx_node_cases.txt"
DATA = pathlib.Path(onnx.backend.test.__file__).resolve().parent / "data"
KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
# More elements than this make a JSON body that tests only patience.
JSON_ELEMENTS = 20_000
CONNECTIONS = 2

V2 = {
    T.BOOL: ("BOOL", np.bool_),
    T.UINT8: ("UINT8", np.uint8),
    T.UINT16: ("UINT16", np.uint16),
    T.UINT32: ("UINT32", np.uint32),
    T.UINT64: ("UINT64", np.uint64),
    T.INT8: ("INT8", np.int8),
    T.INT16: ("INT16", np.int16),
    T.INT32: ("INT32", np.int32),
    T.INT64: ("INT64", np.int64),
    T.FLOAT16: ("FP16", np.float16),
    T.BFLOAT16: ("BF16", ml_dtypes.bfloat16),
    T.FLOAT: ("FP32", np.float32),
    T.DOUBLE: ("FP64", np.float64),
    T.STRING: ("BYTES", np.object_),
}
NUMPY = {name: kind for name, kind in V2.values()}


class Inexpressible(Exception):
    """v2 has no words for this case."""


class Case:
    """One folder of the package: a model, inputs, recorded outputs, tolerances."""

    def __init__(self, name):
        kind, _, folder = name.partition("/")
        self.name = name
        self.model = f"{kind}.{folder}"
        self.folder = DATA / kind / folder
        self.rtol, self.atol = 1e-3, 1e-7
        tolerances = self.folder / "data.json"
        if tolerances.exists():
            values = json.loads(tolerances.read_text())
            self.rtol = values.get("rtol", self.rtol)
            self.atol = values.get("atol", self.atol)

    def signature(self):
        """Names and v2 types of the inputs a request gives, and of the outputs."""
        graph = onnx.load(self.folder / "model.onnx", load_external_data=False).graph
        given = {tensor.name for tensor in graph.initializer}
        inputs = [tensor for tensor in graph.input if tensor.name not in given]
        return [self.tensors(inputs), self.tensors(graph.output)]

    def tensors(self, values):
        found = []
        for value in values:
            if value.type.WhichOneof("value") != "tensor_type":
                raise Inexpressible(f"{value.name} is no tensor")
            kind = value.type.tensor_type.elem_type
            if kind not in V2:
                raise Inexpressible(f"{value.name} is {T.DataType.Name(kind)}")
            found.append((value.name, V2[kind][0]))
        return found

    def data_sets(self):
        """Each recorded run as (inputs, outputs): lists of (name, v2 type, array)."""
        names = self.signature()
        for folder in sorted(self.folder.glob("test_data_set_*")):
            yield [
                [
                    (name, kind, read(folder / f"{side}_{i}.pb", kind))
                    for i, (name, kind) in enumerate(names[column])
                ]
                for column, side in enumerate(("input", "output"))
            ]

    def compare(self, wanted, found):
        """Fails unless `found` (name → array) holds the recorded outputs."""
        for name, kind, array in wanted:
            other = found[name]
            if array.shape == () and other.shape == (1,):
                other = other.reshape(())
            if other.shape != array.shape:
                raise AssertionError(f"{name}: shape {other.shape}, recorded {array.shape}")
            if kind == "BYTES":
                if octets(other) != octets(array):
                    raise AssertionError(f"{name}: {other!r}, recorded {array!r}")
            elif kind in ("FP16", "BF16", "FP32", "FP64"):
                wide = [a.astype(np.float64) for a in (other, array)]
                np.testing.assert_allclose(*wide, rtol=self.rtol, atol=self.atol, err_msg=name)
            else:
                np.testing.assert_array_equal(other, array, err_msg=name)


def read(path, kind):
    tensor = T()
    if not path.exists():
        raise Inexpressible(f"no {path.name}")
    tensor.ParseFromString(path.read_bytes())
    if tensor.data_type not in V2 or V2[tensor.data_type][0] != kind:
        raise Inexpressible(f"{path.name} is no {kind}")
    return numpy_helper.to_array(tensor)


def octets(array):
    return [e if isinstance(e, bytes) else str(e).encode() for e in array.ravel().tolist()]


def to_raw(kind, array):
    if kind == "BYTES":
        return b"".join(struct.pack("<I", len(e)) + e for e in octets(array))
    return np.ascontiguousarray(array).tobytes()


def from_raw(kind, shape, raw):
    if kind != "BYTES":
        return np.frombuffer(raw, NUMPY[kind]).reshape(shape)
    elements, at = [], 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        elements.append(raw[at + 4 : at + 4 + length])
        at += 4 + length
    return np.array(elements + [None], np.object_)[:-1].reshape(shape)


# Which cases: what v2 can express and the engine itself passes.


def expressible():
    for kind in KINDS:
        for folder in sorted((DATA / kind).iterdir()):
            if not (folder / "model.onnx").exists():
                continue
            case = Case(f"{kind}/{folder.name}")
            try:
                sets = list(case.data_sets())
            except Inexpressible:
                continue
            if sets:
                yield case, sets


def engine_passes(case, sets):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    path = str(case.folder / "model.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    for inputs, outputs in sets:
        names = [name for name, _, _ in outputs]
        if any(kind == "BF16" for _, kind, _ in inputs + outputs):
            found = run_bf16(session, names, inputs, outputs)
        else:
            feed = {name: np.ascontiguousarray(array) for name, _, array in inputs}
            feed = {name: feed[name].reshape(array.shape) for name, _, array in inputs}
            found = dict(zip(names, map(np.asarray, session.run(names, feed))))
        case.compare(outputs, found)


def run_bf16(session, names, inputs, outputs):
    """numpy has no bfloat16 of its own: give and take the bytes."""
    from onnxruntime import OrtValue

    feed = {}
    for name, kind, array in inputs:
        array = np.ascontiguousarray(array)
        if kind == "BF16":
            make = OrtValue.ortvalue_from_numpy_with_onnx_type
            feed[name] = make(array.view(np.uint16), T.BFLOAT16)
        else:
            feed[name] = OrtValue.ortvalue_from_numpy(array)
    found = {}
    for (name, kind, _), value in zip(outputs, session.run_with_ort_values(names, feed)):
        if kind == "BF16":
            shape = value.shape()
            raw = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(shape)))
            found[name] = from_raw(kind, shape, raw)
        else:
            found[name] = value.numpy()
    return found


def verdict():
    passed, failed = [], []
    for case, sets in expressible():
        try:
            engine_passes(case, sets)
            passed.append(case.name)
        except Exception as error:
            failed.append((case.name, str(error).strip().splitlines()[0][:100]))
    LIST.write_text("".join(f"{name}\n" for name in passed))
    for name, error in failed:
        print(f"left out {name}: {error}")
    print(f"{len(passed)} of {len(passed) + len(failed)} expressible cases pass in the engine itself")


def listed():
    return [Case(name) for name in LIST.read_text().split()]


def build(repository):
    cases = listed()
    for case in cases:
        version = repository / case.model / "1"
        version.mkdir(parents=True)
        for file in case.folder.iterdir():
            if file.is_file() and file.name != "data.json":
                shutil.copyfile(file, version / file.name)
    print(f"laid out {len(cases)} models")


# The three ways through a live server.


class Connections:
    def __init__(self, arguments):
        import grpc
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        self.pb = service_pb2
        channel = grpc.insecure_channel(
            arguments.grpc, options=[("grpc.max_receive_message_length", -1)]
        )
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.http = http.client.HTTPConnection(arguments.http, timeout=120)

    def by_grpc(self, case, inputs):
        request = self.pb.ModelInferRequest(model_name=case.model)
        for name, kind, array in inputs:
            request.inputs.add(name=name, datatype=kind, shape=array.shape)
            request.raw_input_contents.append(to_raw(kind, array))
        answer = self.stub.ModelInfer(request)
        return {
            output.name: from_raw(output.datatype, tuple(output.shape), raw)
            for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
        }

    def post(self, case, header, tail=b"", headers=None):
        body = json.dumps(header).encode()
        headers = dict(headers or {})
        if tail or "binary_data_output" in header.get("parameters", {}):
            headers["Inference-Header-Content-Length"] = str(len(body))
        self.http.request("POST", f"/v2/models/{case.model}/infer", body + tail, headers)
        answer = self.http.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise AssertionError(f"HTTP {answer.status}: {content[:300]!r}")
        length = answer.getheader("Inference-Header-Content-Length")
        cut = int(length) if length else len(content)
        return json.loads(content[:cut]), content[cut:]

    def by_binary(self, case, inputs):
        header, tail = {"inputs": [], "parameters": {"binary_data_output": True}}, b""
        for name, kind, array in inputs:
            raw = to_raw(kind, array)
            tail += raw
            header["inputs"].append(
                {
                    "name": name,
                    "datatype": kind,
                    "shape": list(array.shape),
                    "parameters": {"binary_data_size": len(raw)},
                }
            )
        answer, rest = self.post(case, header, tail)
        found = {}
        for output in answer["outputs"]:
            size = output["parameters"]["binary_data_size"]
            raw, rest = rest[:size], rest[size:]
            found[output["name"]] = from_raw(output["datatype"], tuple(output["shape"]), raw)
        if rest:
            raise AssertionError(f"{len(rest)} bytes after the last output")
        return found

    def by_json(self, case, inputs):
        header = {"inputs": []}
        for name, kind, array in inputs:
            if kind == "BYTES":
                data = [element.decode() for element in octets(array)]
            else:
                data = array.ravel().tolist()
            header["inputs"].append(
                {"name": name, "datatype": kind, "shape": list(array.shape), "data": data}
            )
        answer, _ = self.post(case, header)
        found = {}
        for output in answer["outputs"]:
            array = np.array(output["data"] + [None], np.object_)[:-1].reshape(output["shape"])
            kind = output["datatype"]
            found[output["name"]] = array if kind == "BYTES" else array.astype(NUMPY[kind])
        return found


def fits_json(tensors):
    for _, kind, array in tensors:
        if kind in ("FP16", "BF16") or array.size > JSON_ELEMENTS:
            return False
        if kind in ("FP32", "FP64") and not np.isfinite(array).all():
            return False
        if kind == "BYTES":
            try:
                [element.decode() for element in octets(array)]
            except UnicodeDecodeError:
                return False
    return True


def run(arguments):
    """Scalars are sent as [1] and may come back so: a configuration cannot say "no dimensions"."""
    cases = listed()
    lock = threading.Lock()
    remaining = iter(cases)
    done = {"grpc": 0, "binary": 0, "json": 0}
    failures = []

    def work():
        connections = Connections(arguments)
        while True:
            with lock:
                case = next(remaining, None)
            if case is None:
                return
            for inputs, outputs in case.data_sets():
                inputs = [(name, kind, np.atleast_1d(array)) for name, kind, array in inputs]
                ways = {"grpc": connections.by_grpc, "binary": connections.by_binary}
                if fits_json(inputs) and fits_json(outputs):
                    ways["json"] = connections.by_json
                for way, call in ways.items():
                    try:
                        case.compare(outputs, call(case, inputs))
                        with lock:
                            done[way] += 1
                    except Exception as error:
                        with lock:
                            text = " | ".join(str(error).strip().splitlines())[:500]
                            failures.append(f"{case.name} by {way}: {text}")

    started = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        print(f"FAILED {failure}")
    print(
        f"ok {len(cases)} cases: {done['grpc']} runs by gRPC, {done['binary']} by HTTP binary,"
        f" {done['json']} by HTTP JSON, {len(failures)} failures"
        f" in {time.monotonic() - started:.0f} s"
    )
    sys.exit(1 if failures or not cases else 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--http")
    parser.add_argument("--grpc")
    parser.add_argument("--metrics")
    parser.add_argument("--pid", type=int)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("verdict")
    commands.add_parser("build").add_argument("repository", type=pathlib.Path)
    commands.add_parser("run")
    arguments = parser.parse_args()
    if arguments.command == "verdict":
        verdict()
    elif arguments.command == "build":
        build(arguments.repository)
    else:
        run(arguments)


if __name__ == "__main__":
    main()
