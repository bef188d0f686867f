"""KServe's model server over ONNX Runtime sessions."""

import logging
import sys

import kserve
from kserve import InferOutput, InferRequest, InferResponse

from onnx_model import NAMES, OnnxModel, models


class OnnxRuntime(kserve.Model):
    def __init__(self, name, file):
        super().__init__(name)
        self.file = file

    def load(self):
        self.model = OnnxModel(self.name, self.file)
        self.metadata = self.model.metadata()
        self.ready = True
        return True

    def stop(self):
        self.model = None

    async def get_input_types(self):
        return self.metadata["inputs"]

    async def get_output_types(self):
        return self.metadata["outputs"]

    def predict(self, payload: InferRequest, headers=None) -> InferResponse:
        outputs = self.model.run({tensor.name: tensor.as_numpy() for tensor in payload.inputs})
        answer = []
        for name, array in zip(self.model.output_names, outputs):
            tensor = InferOutput(name, list(array.shape), NAMES[array.dtype])
            tensor.set_data_from_numpy(array, binary_data=True)
            answer.append(tensor)
        return InferResponse(payload.id or "", self.name, answer)


class Repository(kserve.ModelRepository):
    async def load(self, name):
        file = models().get(name)
        if file is None:
            return False
        model = OnnxRuntime(name, file)
        model.load()
        self.update(model)
        return True


if __name__ == "__main__":
    # The server parses the same command line.
    kserve.model_server.args, _ = kserve.model_server.parser.parse_known_args(sys.argv[1:])
    loaded = []
    for name, file in models().items():
        model = OnnxRuntime(name, file)
        model.load()
        loaded.append(model)
    server = kserve.ModelServer(registered_models=Repository(), access_log_format=None)
    # A line for every request otherwise.
    for name in ("kserve", "kserve.trace", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
    server.start(loaded)
