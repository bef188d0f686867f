"""Writes the tiny models of the integration tests beside this file.

    pip install onnx==1.22.0 numpy ml_dtypes safetensors==0.8.0
    python generate.py

The output is checked in; run this again only after changing it.
"""

import json
import pathlib

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper
from safetensors.numpy import save as stored

HERE = pathlib.Path(__file__).resolve().parent
OPSET = 21
LIMIT = 3 * 1024

DTYPES = {
    "bool": T.BOOL,
    "uint8": T.UINT8,
    "uint16": T.UINT16,
    "uint32": T.UINT32,
    "uint64": T.UINT64,
    "int8": T.INT8,
    "int16": T.INT16,
    "int32": T.INT32,
    "int64": T.INT64,
    "fp16": T.FLOAT16,
    "fp32": T.FLOAT,
    "fp64": T.DOUBLE,
    "bf16": T.BFLOAT16,
    "bytes": T.STRING,
}


def value(name, kind, dims):
    return helper.make_tensor_value_info(name, kind, dims)


def constant(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def save(name, graph, opsets=None, check=True, limit=LIMIT):
    opsets = opsets or [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    model.producer_name = "dormouse-tests"
    if check:
        onnx.checker.check_model(model)
    data = model.SerializeToString(deterministic=True)
    assert len(data) < limit, f"{name}: {len(data)} bytes, at most {limit}"
    (HERE / f"{name}.onnx").write_bytes(data)


def identities():
    for name, kind in DTYPES.items():
        graph = helper.make_graph(
            [helper.make_node("Identity", ["INPUT"], ["OUTPUT"])],
            f"identity_{name}",
            [value("INPUT", kind, ["n", "m"])],
            [value("OUTPUT", kind, ["n", "m"])],
        )
        save(f"identity_{name}", graph)


def add_sub():
    for name, outputs in {
        "add_sub": ["OUTPUT0", "OUTPUT1"],
        "add_sub_swapped": ["OUTPUT1", "OUTPUT0"],
    }.items():
        graph = helper.make_graph(
            [
                helper.make_node("Add", ["INPUT0", "INPUT1"], [outputs[0]]),
                helper.make_node("Sub", ["INPUT0", "INPUT1"], [outputs[1]]),
            ],
            name,
            [value(n, T.INT32, ["batch", 16]) for n in ("INPUT0", "INPUT1")],
            [value(n, T.INT32, ["batch", 16]) for n in ("OUTPUT0", "OUTPUT1")],
        )
        save(name, graph)


def scalar():
    graph = helper.make_graph(
        [helper.make_node("Mul", ["X", "two"], ["Y"])],
        "scalar",
        [value("X", T.FLOAT, [])],
        [value("Y", T.FLOAT, [])],
        [constant("two", np.float32(2))],
    )
    save("scalar", graph)


def no_input():
    graph = helper.make_graph(
        [helper.make_node("Identity", ["table"], ["Y"])],
        "no_input",
        [],
        [value("Y", T.FLOAT, [2, 3])],
        [constant("table", np.arange(6, dtype=np.float32).reshape(2, 3))],
    )
    save("no_input", graph)


def optional_input():
    """BIAS has an initializer, so a request may leave it out; then it is 100."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["X", "BIAS"], ["Y"])],
        "optional_input",
        [value("X", T.FLOAT, ["batch", 4]), value("BIAS", T.FLOAT, [1, 4])],
        [value("Y", T.FLOAT, ["batch", 4])],
        [constant("BIAS", np.full((1, 4), 100, np.float32))],
    )
    save("optional_input", graph)


def external_graph(name, location, offset=0, length=64, size=4):
    """Y = X * W, W a square matrix kept outside the model file."""
    weights = T(name="W", data_type=T.FLOAT, dims=[size, size], data_location=T.EXTERNAL)
    for key, entry in (("location", location), ("offset", offset), ("length", length)):
        if entry is not None:
            weights.external_data.add(key=key, value=str(entry))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["X", "W"], ["Y"])],
        name,
        [value("X", T.FLOAT, ["batch", size])],
        [value("Y", T.FLOAT, ["batch", size])],
        [weights],
    )
    save(name, graph, check=False)


def external():
    """One good reference to `weights.bin`, and the ways of asking for something else."""
    (HERE / "weights.bin").write_bytes(np.full((4, 4), 2, np.float32).tobytes())
    external_graph("external", "weights.bin")
    # 64 MiB; the test that uses it writes the weights itself.
    external_graph("external_large", "weights.bin", length=2**26, size=2**12)
    external_graph("external_parent", "../weights.bin")
    external_graph("external_parent_nested", "a/../../weights.bin")
    external_graph("external_absolute", "/etc/hostname", length=None)
    external_graph("external_proc", "/proc/self/environ", length=None)
    external_graph("external_memory", "*/_ORT_MEM_ADDR_/*", offset=4096)
    external_graph("external_offset", "weights.bin", offset=2**63 - 1)
    external_graph("external_length", "weights.bin", length=2**40)
    external_graph("external_negative", "weights.bin", offset=-64)


def loop_body(name, kind, dims, step):
    """One iteration: a chain of small nodes over the state, so that a run can stop between them."""
    chain = ["state"] + [f"s{i}" for i in range(7)] + ["next"]
    nodes = [
        helper.make_node("Add", [before, step], [after])
        for before, after in zip(chain, chain[1:])
    ]
    nodes.append(helper.make_node("Identity", ["going"], ["still"]))
    return helper.make_graph(
        nodes,
        name,
        [value("i", T.INT64, []), value("going", T.BOOL, []), value("state", kind, dims)],
        [value("still", T.BOOL, []), value("next", kind, dims)],
    )


def slow():
    """Counts ITERATIONS by eighths: its time is ITERATIONS times a few microseconds."""
    graph = helper.make_graph(
        [
            helper.make_node("Squeeze", ["ITERATIONS"], ["trips"]),
            helper.make_node(
                "Loop",
                ["trips", "", "zero"],
                ["total"],
                body=loop_body("count", T.DOUBLE, [1], "eighth"),
            ),
            helper.make_node("Cast", ["total"], ["COUNT"], to=T.INT64),
        ],
        "slow",
        [value("ITERATIONS", T.INT64, [1])],
        [value("COUNT", T.INT64, [1])],
        [constant("zero", np.zeros(1)), constant("eighth", np.full(1, 0.125))],
    )
    save("slow", graph)


def steady():
    """Y = X + 1 after a fixed time that does not depend on the number of rows."""
    trips = 1024
    graph = helper.make_graph(
        [
            helper.make_node(
                "Loop",
                ["trips", "", "X"],
                ["Y"],
                body=loop_body("wait", T.FLOAT, ["batch", 4], "step"),
            )
        ],
        "steady",
        [value("X", T.FLOAT, ["batch", 4])],
        [value("Y", T.FLOAT, ["batch", 4])],
        [
            constant("trips", np.int64(trips)),
            constant("step", np.full((1, 4), 1 / (8 * trips), np.float32)),
        ],
    )
    save("steady", graph)


def poison():
    """Y = 10 * X for X in 0..16; another X fails the whole run."""
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "X"], ["Y"], axis=0)],
        "poison",
        [value("X", T.INT32, ["batch", 1])],
        [value("Y", T.INT32, ["batch", 1])],
        [constant("table", np.arange(16, dtype=np.int32) * 10)],
    )
    save("poison", graph)


def dynquant():
    """Quantises over the whole batch: a neighbour's large values change a row's answer."""
    random = np.random.default_rng(7)
    graph = helper.make_graph(
        [
            helper.make_node("DynamicQuantizeLinear", ["X"], ["q", "scale", "zero"]),
            helper.make_node("MatMulInteger", ["q", "W", "zero"], ["sum"]),
            helper.make_node("Cast", ["sum"], ["wide"], to=T.FLOAT),
            helper.make_node("Mul", ["wide", "scale"], ["Y"]),
        ],
        "dynquant",
        [value("X", T.FLOAT, ["batch", 8])],
        [value("Y", T.FLOAT, ["batch", 4])],
        [constant("W", random.integers(-100, 100, (8, 4), dtype=np.int8))],
    )
    save("dynquant", graph)


def mlp():
    random = np.random.default_rng(11)

    def weights(*shape):
        return random.normal(0, 0.5, shape).astype(np.float32)

    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["X", "W1", "B1"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("Gemm", ["r", "W2", "B2"], ["Y"]),
        ],
        "mlp",
        [value("X", T.FLOAT, ["batch", 16])],
        [value("Y", T.FLOAT, ["batch", 4])],
        [
            constant("W1", weights(16, 24)),
            constant("B1", weights(24)),
            constant("W2", weights(24, 4)),
            constant("B2", weights(4)),
        ],
    )
    save("mlp", graph)


def conv():
    random = np.random.default_rng(13)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["X", "W", "B"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("MaxPool", ["r"], ["Y"], kernel_shape=[2, 2], strides=[2, 2]),
        ],
        "conv",
        [value("X", T.FLOAT, ["batch", 2, 8, 8])],
        [value("Y", T.FLOAT, ["batch", 4, 4, 4])],
        [
            constant("W", random.normal(0, 0.5, (4, 2, 3, 3)).astype(np.float32)),
            constant("B", random.normal(0, 0.5, 4).astype(np.float32)),
        ],
    )
    save("conv", graph)


def decided():
    """OUTPUT = relu(INPUT). The branch that is never taken has an operator that no kernel is there for:
    only optimising the graph, which leaves that branch out, makes a session possible."""
    result = value("OUTPUT", T.FLOAT, [-1, 4])
    taken = [helper.make_node("Relu", ["INPUT"], ["OUTPUT"])]
    other = [
        helper.make_node("Cast", ["INPUT"], ["narrow"], to=T.BFLOAT16),
        helper.make_node("Erf", ["narrow"], ["erf"]),
        helper.make_node("Cast", ["erf"], ["OUTPUT"], to=T.FLOAT),
    ]
    node = helper.make_node(
        "If",
        ["condition"],
        ["OUTPUT"],
        then_branch=helper.make_graph(taken, "taken", [], [result]),
        else_branch=helper.make_graph(other, "other", [], [result]),
    )
    graph = helper.make_graph(
        [node],
        "decided",
        [value("INPUT", T.FLOAT, [-1, 4])],
        [result],
        initializer=[constant("condition", np.array(True))],
    )
    save("decided", graph)


def beside():
    """The same weights inside the graph, as safetensors by input, and as safetensors by reference.

    Each is larger than what the engine is given inside the graph in any case.
    """
    random = np.random.default_rng(3)
    weights = {
        "W": random.normal(0, 1, (48, 32)).astype(np.float32),
        "H": random.normal(0, 1, (52, 40)).astype(np.float16),
        "B": random.normal(0, 1, (52, 40)).astype(ml_dtypes.bfloat16),
        "N": random.integers(-(2**62), 2**62, 520, dtype=np.int64),
    }
    kinds = {"W": T.FLOAT, "H": T.FLOAT16, "B": T.BFLOAT16, "N": T.INT64}
    inside = [
        helper.make_tensor(name, kinds[name], array.shape, array.tobytes(), raw=True)
        for name, array in weights.items()
    ]
    by_name = []
    for name, array in weights.items():
        tensor = T(name=name, data_type=kinds[name], dims=array.shape, data_location=T.EXTERNAL)
        tensor.external_data.add(key="location", value="model.safetensors")
        by_name.append(tensor)
    declared = [value(name, kinds[name], array.shape) for name, array in weights.items()]

    def graph(name, inputs, initializers):
        return helper.make_graph(
            [
                helper.make_node("MatMul", ["X", "W"], ["Y"]),
                helper.make_node("Cast", ["H"], ["h"], to=T.FLOAT),
                helper.make_node("Mul", ["h", "SCALE"], ["HALF"]),
                helper.make_node("Cast", ["B"], ["b"], to=T.FLOAT),
                helper.make_node("Mul", ["b", "SCALE"], ["BRAIN"]),
                helper.make_node("Add", ["N", "STEP"], ["NUMBERS"]),
            ],
            name,
            [
                value("X", T.FLOAT, ["rows", 48]),
                value("SCALE", T.FLOAT, [1]),
                value("STEP", T.INT64, [1]),
                *inputs,
            ],
            [
                value("Y", T.FLOAT, ["rows", 32]),
                value("HALF", T.FLOAT, [52, 40]),
                value("BRAIN", T.FLOAT, [52, 40]),
                value("NUMBERS", T.INT64, [520]),
            ],
            initializers,
        )

    save("beside_inside", graph("beside", [], inside), limit=32 * 1024)
    save("beside_inputs", graph("beside", declared, []))
    save("beside_references", graph("beside", [], by_name), check=False)
    folder = HERE / "beside"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(stored(weights))
    shards = {
        "model-00001-of-00002.safetensors": ["W", "N"],
        "model-00002-of-00002.safetensors": ["H", "B"],
    }
    for shard, names in shards.items():
        (folder / shard).write_bytes(stored({name: weights[name] for name in names}))
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in weights.values())},
        "weight_map": {name: shard for shard, names in shards.items() for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def sequences():
    """Running totals: over a batch, with every control shown, and without a batch dimension."""
    marks = ["START", "end", "ready", "corrid"]
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["INPUT", "STATE_IN"], ["OUTPUT"]),
            helper.make_node("Identity", ["OUTPUT"], ["STATE_OUT"]),
            helper.make_node("Cast", ["END"], ["end"], to=T.INT32),
            helper.make_node("Cast", ["READY"], ["ready"], to=T.INT32),
            helper.make_node("Cast", ["CORRID"], ["corrid"], to=T.INT32),
            helper.make_node("Concat", marks, ["MARKS"], axis=1),
        ],
        "sequence",
        [
            value("INPUT", T.INT32, ["batch", 1]),
            value("START", T.INT32, ["batch", 1]),
            value("END", T.FLOAT, ["batch", 1]),
            value("READY", T.BOOL, ["batch", 1]),
            value("CORRID", T.UINT64, ["batch", 1]),
            value("STATE_IN", T.INT32, ["batch", 1]),
        ],
        [
            value("OUTPUT", T.INT32, ["batch", 1]),
            value("MARKS", T.INT32, ["batch", 4]),
            value("STATE_OUT", T.INT32, ["batch", 1]),
        ],
    )
    save("sequence", graph)
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["INPUT", "STATE_IN"], ["sum"]),
            helper.make_node("Where", ["START", "INPUT", "sum"], ["OUTPUT"]),
            helper.make_node("Identity", ["OUTPUT"], ["STATE_OUT"]),
        ],
        "sequence_unbatched",
        [
            value("INPUT", T.INT32, [1]),
            value("START", T.BOOL, [1]),
            value("STATE_IN", T.INT32, [1]),
        ],
        [value("OUTPUT", T.INT32, [1]), value("STATE_OUT", T.INT32, [1])],
    )
    save("sequence_unbatched", graph)


def history():
    """Answers every input of a sequence so far, and the sequence's name."""
    graph = helper.make_graph(
        [
            helper.make_node("Concat", ["PAST", "INPUT"], ["HISTORY"], axis=1),
            helper.make_node("Identity", ["HISTORY"], ["FUTURE"]),
            helper.make_node("Identity", ["CORRID"], ["NAME"]),
        ],
        "history",
        [
            value("INPUT", T.INT32, ["batch", 1]),
            value("CORRID", T.STRING, ["batch", 1]),
            value("PAST", T.INT32, ["batch", "n"]),
        ],
        [
            value("HISTORY", T.INT32, ["batch", "m"]),
            value("NAME", T.STRING, ["batch", 1]),
            value("FUTURE", T.INT32, ["batch", "m"]),
        ],
    )
    save("history", graph)


def ragged():
    """Sums of requests of any length, joined into one row, and all that is said of the batch."""
    graph = helper.make_graph(
        [
            helper.make_node("CumSum", ["INPUT", "axis"], ["sums"]),
            helper.make_node("Concat", ["zero", "sums"], ["before"], axis=0),
            helper.make_node("Slice", ["BOUNDS", "one", "end"], ["ends"]),
            helper.make_node("Slice", ["BOUNDS", "start", "last"], ["begins"]),
            helper.make_node("Gather", ["before", "ends"], ["to"]),
            helper.make_node("Gather", ["before", "begins"], ["from"]),
            helper.make_node("Sub", ["to", "from"], ["sum"]),
            helper.make_node("Unsqueeze", ["sum", "one"], ["SUM"]),
            helper.make_node("Unsqueeze", ["COUNT", "one"], ["ELEMENTS"]),
            helper.make_node("Unsqueeze", ["REACHED", "one"], ["END"]),
            helper.make_node("Shape", ["LONGEST"], ["longest"]),
            helper.make_node("Shape", ["SUM"], ["column"]),
            helper.make_node("Expand", ["longest", "column"], ["MOST"]),
            helper.make_node("Unsqueeze", ["FLAT", "one"], ["flat"]),
            helper.make_node("Concat", ["ITEM", "flat"], ["SHAPES"], axis=1),
            helper.make_node("Add", ["INPUT", "INPUT"], ["DOUBLED"]),
        ],
        "ragged",
        [
            value("INPUT", T.FLOAT, ["elements"]),
            value("COUNT", T.FLOAT, ["requests"]),
            value("REACHED", T.INT32, ["requests"]),
            value("BOUNDS", T.INT32, ["bounds"]),
            value("LONGEST", T.INT32, ["longest"]),
            value("ITEM", T.INT32, ["requests", 1]),
            value("FLAT", T.INT32, ["requests"]),
        ],
        [
            value("SUM", T.FLOAT, ["requests", 1]),
            value("ELEMENTS", T.FLOAT, ["requests", 1]),
            value("END", T.INT32, ["requests", 1]),
            value("MOST", T.INT64, ["requests", 1]),
            value("SHAPES", T.INT32, ["requests", 2]),
            value("DOUBLED", T.FLOAT, ["elements"]),
        ],
        [
            constant("axis", np.int64(0)),
            constant("zero", np.zeros(1, np.float32)),
            constant("start", np.array([0])),
            constant("one", np.array([1])),
            constant("last", np.array([-1])),
            constant("end", np.array([2**31 - 1])),
        ],
    )
    save("ragged", graph)


def tokens():
    """A transformer's inputs, whose sizes must agree, without the transformer."""
    names = ["input_ids", "attention_mask", "token_type_ids"]
    graph = helper.make_graph(
        [
            helper.make_node("Mul", names[:2], ["attended"]),
            helper.make_node("Add", ["attended", names[2]], ["last_hidden_state"]),
        ],
        "tokens",
        [value(name, T.INT64, ["batch", "sequence"]) for name in names],
        [value("last_hidden_state", T.INT64, ["batch", "sequence"])],
    )
    save("tokens", graph)


def broken():
    good = (HERE / "add_sub.onnx").read_bytes()
    (HERE / "corrupt.onnx").write_bytes(good[: len(good) // 2] + b"\xff" * 64)
    (HERE / "empty.onnx").write_bytes(b"")
    graph = helper.make_graph(
        [helper.make_node("Mystery", ["X"], ["Y"], domain="com.example")],
        "custom_op",
        [value("X", T.FLOAT, ["batch", 4])],
        [value("Y", T.FLOAT, ["batch", 4])],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.example", 1)]
    save("custom_op", graph, opsets, check=False)


if __name__ == "__main__":
    identities()
    add_sub()
    scalar()
    no_input()
    optional_input()
    external()
    slow()
    steady()
    poison()
    dynquant()
    mlp()
    conv()
    decided()
    beside()
    sequences()
    history()
    ragged()
    tokens()
    broken()
