"""Gives every model a configuration for Triton's Python backend, and the backend its stub for this
Python."""

import json
import os
import pathlib
import shutil
import sys

import onnx_model
import pytriton
from onnx_model import OnnxModel, models, setting

here = pathlib.Path(__file__).parent


def tensors(entries, batched):
    for tensor in entries:
        kind = {"BOOL": "TYPE_BOOL"}.get(tensor["datatype"], f"TYPE_{tensor['datatype']}")
        dims = tensor["shape"][1:] if batched else tensor["shape"]
        yield f'{{ name: "{tensor["name"]}" data_type: {kind} dims: {json.dumps(dims)} }}'


def config(metadata, max_batch):
    batched = max_batch > 0
    lines = ['backend: "python"', f"max_batch_size: {max_batch}"]
    for key in ("input", "output"):
        lines.append(f"{key} [ {', '.join(tensors(metadata[f'{key}s'], batched))} ]")
    lines.append("instance_group [ { kind: KIND_CPU count: 1 } ]")
    if max_batch > 1:
        delay = setting("BATCH_DELAY_US", 0)
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {delay} }}")
    return "\n".join(lines) + "\n"


for name, file in models().items():
    folder = pathlib.Path(file).parent.parent
    metadata = OnnxModel(name, file).metadata()
    (folder / "config.pbtxt").write_text(config(metadata, setting("MAX_BATCH", 0)))
    for part in (here / "model.py", pathlib.Path(onnx_model.__file__)):
        shutil.copy(part, folder / "1" / part.name)

server = pathlib.Path(pytriton.__file__).parent / "tritonserver"
version = f"{sys.version_info.major}.{sys.version_info.minor}"
stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
target = server / "backends" / "python" / "triton_python_backend_stub"
if not target.exists():
    part = target.with_suffix(f".{os.getpid()}")
    shutil.copy(stub, part)
    part.rename(target)
