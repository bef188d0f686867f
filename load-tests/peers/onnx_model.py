"""One ONNX Runtime session, the same for every Python peer, and the binary form of v2 over HTTP for
those that have no v2 of their own."""

import json
import os
import pathlib

import numpy as np
import onnxruntime

KINDS = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
NAMES = {np.dtype(kind): name for name, kind in KINDS.items()}
ONNX_KINDS = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
}


def setting(name, default):
    return int(os.environ.get(f"PEER_{name}", default))


def models():
    """Names of the models in the repository, with their files."""
    root = pathlib.Path(os.environ["PEER_REPOSITORY"])
    return {file.parent.parent.name: str(file) for file in sorted(root.glob("*/1/model.onnx"))}


def describe(tensor):
    dims = [size if isinstance(size, int) else -1 for size in tensor.shape]
    return {"name": tensor.name, "datatype": ONNX_KINDS[tensor.type], "shape": dims}


class OnnxModel:
    """A session with as many threads as the comparison gives everybody, all else as it comes."""

    def __init__(self, name, file):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = setting("THREADS", 1)
        options.inter_op_num_threads = 1
        self.name = name
        self.session = onnxruntime.InferenceSession(
            file, options, providers=["CPUExecutionProvider"]
        )
        self.output_names = [output.name for output in self.session.get_outputs()]

    def run(self, inputs):
        return self.session.run(self.output_names, inputs)

    def run_together(self, requests):
        """Runs requests of one row or more as one batch, those of equal shapes together."""
        if len(requests) == 1:
            return [self.run(requests[0])]
        answers = [None] * len(requests)
        groups = {}
        for index, inputs in enumerate(requests):
            key = tuple(array.shape[1:] for array in inputs.values())
            groups.setdefault(key, []).append(index)
        for members in groups.values():
            first = requests[members[0]]
            rows = [len(next(iter(requests[index].values()))) for index in members]
            batch = {
                name: np.concatenate([requests[index][name] for index in members]) for name in first
            }
            cuts = np.cumsum(rows)[:-1]
            split = [np.split(output, cuts) for output in self.run(batch)]
            for place, index in enumerate(members):
                answers[index] = [output[place] for output in split]
        return answers

    def metadata(self):
        return {
            "name": self.name,
            "versions": ["1"],
            "platform": "onnxruntime_onnx",
            "inputs": [describe(tensor) for tensor in self.session.get_inputs()],
            "outputs": [describe(tensor) for tensor in self.session.get_outputs()],
        }

    def encode(self, outputs):
        """Header and tensors of an answer, and how long the header is."""
        described, parts = [], []
        for name, array in zip(self.output_names, outputs):
            data = np.ascontiguousarray(array).tobytes()
            described.append(
                {
                    "name": name,
                    "datatype": NAMES[array.dtype],
                    "shape": array.shape,
                    "parameters": {"binary_data_size": len(data)},
                }
            )
            parts.append(data)
        document = {"model_name": self.name, "model_version": "1", "outputs": described}
        header = json.dumps(document, separators=(",", ":")).encode()
        return b"".join([header, *parts]), len(header)


HEADER_LENGTH = "inference-header-content-length"
SERVER = {"version": "", "extensions": ["binary_tensor_data"]}


def decode(body, header_length):
    """Inputs of a request whose tensors follow its JSON."""
    inputs, offset, view = {}, header_length, memoryview(body)
    for tensor in json.loads(body[:header_length])["inputs"]:
        end = offset + tensor["parameters"]["binary_data_size"]
        array = np.frombuffer(view[offset:end], KINDS[tensor["datatype"]])
        inputs[tensor["name"]] = array.reshape(tensor["shape"])
        offset = end
    return inputs
