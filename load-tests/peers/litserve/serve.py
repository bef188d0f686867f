"""LitServe with one API for each model. Its own requests are JSON; raw bytes come in through a
FastAPI dependency and go out as a response of its, which is faster."""

import argparse
from typing import Annotated

import litserve
from fastapi import Depends, Request, Response

from onnx_model import HEADER_LENGTH, SERVER, OnnxModel, decode, models, setting


async def raw(request: Request):
    return await request.body(), int(request.headers[HEADER_LENGTH])


class OnnxRuntime(litserve.LitAPI):
    def __init__(self, name, file, **options):
        super().__init__(api_path=f"/v2/models/{name}/infer", **options)
        self.name, self.file = name, file

    def setup(self, device):
        self.model = OnnxModel(self.name, self.file)

    def decode_request(self, request: Annotated[tuple, Depends(raw)]):
        return decode(*request)

    def predict(self, inputs):
        return self.model.run(inputs)

    def encode_response(self, outputs) -> Response:
        body, header_length = self.model.encode(outputs)
        headers = {HEADER_LENGTH: str(header_length)}
        return Response(body, media_type="application/octet-stream", headers=headers)


class Batched(OnnxRuntime):
    def batch(self, inputs):
        return inputs

    def predict(self, inputs):
        return self.model.run_together(inputs)

    def unbatch(self, outputs):
        return outputs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    kind, options = OnnxRuntime, {}
    if setting("MAX_BATCH", 0) > 1:
        delay = setting("BATCH_DELAY_US", 0) / 1e6
        kind, options = Batched, {"max_batch_size": setting("MAX_BATCH", 0), "batch_timeout": delay}
    apis = [kind(name, file, **options) for name, file in models().items()]
    server = litserve.LitServer(apis, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.app.add_api_route("/v2", lambda: {"name": "litserve", **SERVER})
    server.run(
        host="127.0.0.1",
        port=port,
        num_api_servers=1,
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )


if __name__ == "__main__":
    main()
