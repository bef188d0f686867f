"""tritonclient.grpc.aio and tritonclient.http.aio."""

import asyncio

import numpy as np
import tritonclient.grpc.aio as aio_grpc
import tritonclient.http.aio as aio_http
from checks import arguments, cases, check, expect, expect_in, run_async
from tensors import NUMPY, example, same, v2
from tritonclient.utils import InferenceServerException

args = arguments()


def add_sub_inputs(module, value):
    array = np.full((1, 16), value, np.int32)
    tensors = []
    for name in ("INPUT0", "INPUT1"):
        tensors.append(module.InferInput(name, [1, 16], "INT32"))
        tensors[-1].set_data_from_numpy(array)
    return tensors


PROTOCOLS = [("grpc", aio_grpc), ("http", aio_http)]


@cases(PROTOCOLS)
async def management(clients, protocol):
    name, _ = protocol
    client = clients[name]
    expect(await client.is_server_live(), True)
    expect(await client.is_server_ready(), True)
    expect(await client.is_model_ready("simple"), True)
    for answer in (
        await client.get_server_metadata(),
        await client.get_model_metadata("simple"),
        await client.get_model_config("simple"),
        await client.get_inference_statistics("simple"),
        await client.get_model_repository_index(),
    ):
        assert answer, name


@cases(PROTOCOLS)
async def every_type(clients, protocol):
    name, module = protocol
    for kind in NUMPY:
        array = example(kind)
        tensor = module.InferInput("INPUT", list(array.shape), v2(kind))
        tensor.set_data_from_numpy(array)
        answer = await clients[name].infer(f"flat_{kind}", [tensor])
        same(answer.as_numpy("OUTPUT"), array)


@cases(PROTOCOLS)
async def many_at_once(clients, protocol):
    name, module = protocol

    async def one(i):
        answer = await clients[name].infer("simple", add_sub_inputs(module, i), request_id=str(i))
        same(answer.as_numpy("OUTPUT0"), np.full((1, 16), 2 * i, np.int32))

    await asyncio.gather(*(one(i) for i in range(100)))


@cases(PROTOCOLS)
async def errors(clients, protocol):
    name, module = protocol
    try:
        await clients[name].infer("nobody", add_sub_inputs(module, 1))
    except InferenceServerException as error:
        expect_in("nobody", error.message())
    else:
        raise AssertionError("an unknown model answered")


@check
async def grpc_deadline_and_cancellation(clients):
    client = clients["grpc"]
    tensor = aio_grpc.InferInput("ITERATIONS", [1], "INT64")
    tensor.set_data_from_numpy(np.array([100_000_000]))
    try:
        await client.infer("slow", [tensor], client_timeout=0.2)
    except InferenceServerException as error:
        expect_in("DEADLINE_EXCEEDED", error.status())
    else:
        raise AssertionError("an endless run ended")
    call = asyncio.ensure_future(client.infer("slow", [tensor]))
    await asyncio.sleep(0.1)
    call.cancel()
    tensor.set_data_from_numpy(np.array([3]))
    same((await client.infer("slow", [tensor])).as_numpy("COUNT"), np.array([3]))


@check
async def grpc_stream(clients):
    async def requests():
        for i in range(20):
            yield {
                "model_name": "simple",
                "inputs": add_sub_inputs(aio_grpc, i),
                "request_id": str(i),
            }

    seen = set()
    async for result, error in clients["grpc"].stream_infer(requests()):
        expect(error, None)
        i = int(result.get_response().id)
        same(result.as_numpy("OUTPUT0"), np.full((1, 16), 2 * i, np.int32))
        seen.add(i)
    expect(seen, set(range(20)))


@check
async def http_compression(clients):
    for algorithm in ("gzip", "deflate"):
        answer = await clients["http"].infer(
            "simple",
            add_sub_inputs(aio_http, 4),
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        same(answer.as_numpy("OUTPUT0"), np.full((1, 16), 8, np.int32))


async def main():
    clients = {
        "grpc": aio_grpc.InferenceServerClient(args.grpc),
        "http": aio_http.InferenceServerClient(args.http),
    }
    try:
        await run_async(clients)
    finally:
        for client in clients.values():
            await client.close()


asyncio.run(main())
