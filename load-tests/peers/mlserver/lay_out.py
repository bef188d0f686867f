"""Writes `model-settings.json` beside every model."""

import json
import pathlib

from onnx_model import OnnxModel, models, setting

for name, file in models().items():
    metadata = OnnxModel(name, file).metadata()
    settings = {
        "name": name,
        "implementation": "onnx_runtime.OnnxRuntime",
        "platform": metadata["platform"],
        "inputs": metadata["inputs"],
        "outputs": metadata["outputs"],
        "parameters": {"uri": file, "version": "1"},
    }
    if setting("MAX_BATCH", 0) > 1:
        settings["max_batch_size"] = setting("MAX_BATCH", 0)
        settings["max_batch_time"] = setting("BATCH_DELAY_US", 0) / 1e6
    target = pathlib.Path(file).parent.parent / "model-settings.json"
    target.write_text(json.dumps(settings, indent=1) + "\n")
