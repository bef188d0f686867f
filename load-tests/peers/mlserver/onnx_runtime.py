"""ONNX Runtime as an MLServer runtime, as its documentation has custom runtimes."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from mlserver.utils import get_model_uri

from onnx_model import OnnxModel


class OnnxRuntime(MLModel):
    async def load(self) -> bool:
        file = await get_model_uri(self._settings)
        self.model = OnnxModel(self.name, file)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        inputs = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        outputs = self.model.run(inputs)
        return InferenceResponse(
            model_name=self.name,
            model_version=self.version,
            outputs=[
                NumpyCodec.encode_output(name, array)
                for name, array in zip(self.model.output_names, outputs)
            ],
        )
