"""KServe's own clients, gRPC and REST."""

import asyncio

import httpx
import numpy as np
from checks import arguments, check, expect, expect_in, run_async

# Read before kserve is imported, which reads the command line too.
args = arguments()

from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest  # noqa: E402
from kserve.inference_client import RESTConfig  # noqa: E402

BASE = f"http://{args.http}"


def request(binary, model="simple", request_id="kserve"):
    left = np.arange(16, dtype=np.int32).reshape(1, 16)
    inputs = []
    for name in ("INPUT0", "INPUT1"):
        inputs.append(InferInput(name, [1, 16], "INT32"))
        inputs[-1].set_data_from_numpy(left, binary_data=binary)
    return left, InferRequest(model_name=model, infer_inputs=inputs, request_id=request_id)


def verify(left, answer):
    outputs = {output.name: output.as_numpy().reshape(1, 16) for output in answer.outputs}
    np.testing.assert_array_equal(outputs["OUTPUT0"], left + left)
    np.testing.assert_array_equal(outputs["OUTPUT1"], left - left)
    expect(answer.id, "kserve")
    expect(answer.model_name, "simple")


@check
async def grpc_probes(client, _):
    expect(await client.is_server_live(), True)
    expect(await client.is_server_ready(), True)
    expect(await client.is_model_ready("simple"), True)


@check
async def grpc_infer(client, _):
    for binary in (True, False):
        left, infer_request = request(binary)
        verify(left, await client.infer(infer_request))


@check
async def grpc_strings(client, _):
    words = np.array([[b"a", b"\xc3\xa4"]], dtype=np.object_)
    tensor = InferInput("INPUT", [1, 2], "BYTES")
    tensor.set_data_from_numpy(words, binary_data=True)
    answer = await client.infer(InferRequest(model_name="flat_bytes", infer_inputs=[tensor]))
    expect(answer.outputs[0].as_numpy().ravel().tolist(), [b"a", b"\xc3\xa4"])


@check
async def grpc_errors(client, _):
    _, infer_request = request(True, model="nobody")
    try:
        await client.infer(infer_request)
    except Exception as error:
        expect_in("nobody", str(error))
    else:
        raise AssertionError("an unknown model answered")


@check
async def rest_probes(_, client):
    expect(await client.is_server_live(BASE), True)
    expect(await client.is_server_ready(BASE), True)
    expect(await client.is_model_ready(BASE, "simple"), True)


@check
async def rest_infer(_, client):
    for binary in (True, False):
        left, infer_request = request(binary)
        verify(left, await client.infer(BASE, infer_request, model_name="simple"))


@check
async def rest_infer_from_a_dictionary(_, client):
    data = {
        "id": "kserve",
        "inputs": [
            {"name": name, "shape": [1, 16], "datatype": "INT32", "data": [list(range(16))]}
            for name in ("INPUT0", "INPUT1")
        ],
    }
    answer = await client.infer(BASE, data, model_name="simple")
    verify(np.arange(16, dtype=np.int32).reshape(1, 16), answer)


@check
async def rest_errors(_, client):
    _, infer_request = request(False, model="nobody")
    try:
        await client.infer(BASE, infer_request, model_name="nobody")
    except httpx.HTTPStatusError as error:
        expect(error.response.status_code, 404)
    else:
        raise AssertionError("an unknown model answered")


async def main():
    grpc_client = InferenceGRPCClient(args.grpc)
    rest_client = InferenceRESTClient(RESTConfig(protocol="v2"))
    try:
        await run_async(grpc_client, rest_client)
    finally:
        await grpc_client.close()
        await rest_client.close()


asyncio.run(main())
