"""ONNX Runtime in Triton's Python backend."""

import json

import triton_python_backend_utils as pb_utils

from onnx_model import OnnxModel


class TritonPythonModel:
    def initialize(self, args):
        file = f"{args['model_repository']}/{args['model_version']}/model.onnx"
        self.model = OnnxModel(args["model_name"], file)
        config = json.loads(args["model_config"])
        self.inputs = [tensor["name"] for tensor in config["input"]]

    def execute(self, requests):
        decoded = [
            {
                name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                for name in self.inputs
            }
            for request in requests
        ]
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(name, array)
                    for name, array in zip(self.model.output_names, outputs)
                ]
            )
            for outputs in self.model.run_together(decoded)
        ]
