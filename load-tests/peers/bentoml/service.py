"""A BentoML service with one endpoint for each model. Raw bytes instead of JSON, through input and
output specifications of its own."""

import bentoml
from bentoml import IODescriptor
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from onnx_model import HEADER_LENGTH, SERVER, OnnxModel, decode, models, setting


class RawRequest(IODescriptor):
    # A list, which is what BentoML joins into batches.
    requests: list

    @classmethod
    async def from_http_request(cls, request, serde):
        inputs = decode(await request.body(), int(request.headers[HEADER_LENGTH]))
        return cls.model_construct(requests=[inputs])


class RawResponse(IODescriptor):
    answers: list

    @classmethod
    async def to_http_response(cls, answers, serde):
        body, header_length = answers[0]
        headers = {HEADER_LENGTH: str(header_length)}
        return Response(body, media_type="application/octet-stream", headers=headers)


def member(name):
    return f"infer_{name.replace('-', '_')}"


def endpoint(name):
    def infer(self, requests):
        model = self.models[name]
        return [model.encode(outputs) for outputs in model.run_together(requests)]

    infer.__name__ = member(name)
    options = {"route": f"/v2/models/{name}/infer"}
    if setting("MAX_BATCH", 0) > 1:
        options |= {"batchable": True, "max_batch_size": setting("MAX_BATCH", 0)}
    return bentoml.api(infer, input_spec=RawRequest, output_spec=RawResponse, **options)


async def about(request):
    return JSONResponse({"name": "bentoml", **SERVER})


def load(self):
    self.models = {name: OnnxModel(name, file) for name, file in models().items()}


members = {member(name): endpoint(name) for name in models()}
Onnx = bentoml.service(
    type("Onnx", (), {"__init__": load, **members}),
    workers=1,
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
)
Onnx = bentoml.asgi_app(Starlette(routes=[Route("/v2", about)]), path="/")(Onnx)
