"""The client for asyncio against a live server and a fake one."""

import asyncio
from typing import Any, Awaitable, Callable

import grpc
import numpy as np
import pytest
from conftest import Fake

import dormouse
from dormouse import AsyncClient

INPUTS = {"INPUT0": np.full((1, 16), 5, np.int32), "INPUT1": np.ones((1, 16), np.int32)}


def run(url: str, body: Callable[[AsyncClient], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        async with AsyncClient(url, timeout=60, **options) as client:
            await body(client)

    asyncio.run(asyncio.wait_for(whole(), 120))


def test_many_requests_at_a_time(url: str) -> None:
    async def body(client: AsyncClient) -> None:
        results = await asyncio.gather(*(client.infer("simple", INPUTS, id=str(n)) for n in range(50)))
        assert [result.id for result in results] == [str(n) for n in range(50)]
        assert all(result["OUTPUT0"][0, 0] == 6 for result in results)

    run(url, body)


def test_every_call_of_the_other_client_is_here(url: str) -> None:
    async def body(client: AsyncClient) -> None:
        assert await client.is_live() and await client.is_ready()
        assert (await client.server_metadata()).extensions
        assert (await client.model_metadata("simple")).outputs[1].name == "OUTPUT1"
        assert (await client.model_config("simple"))["name"] == "simple"
        await client.unload("flat_uint8")
        assert not await client.is_model_ready("flat_uint8")
        await client.load("flat_uint8")
        assert "flat_uint8" in {entry.name for entry in await client.index(ready=True)}
        assert (await client.statistics("simple"))[0].version == "1"

    run(url, body)


def test_errors_are_the_same(url: str) -> None:
    async def body(client: AsyncClient) -> None:
        with pytest.raises(dormouse.NotFoundError):
            await client.infer("nobody", INPUTS)
        with pytest.raises(dormouse.InvalidInput):
            await client.infer("simple", {"INPUT0": np.ones((1, 16))})
        with pytest.raises(dormouse.InvalidRequestError):
            await client.infer("simple", {"INPUT0": INPUTS["INPUT0"]})

    run(url, body)


def test_a_cold_start_is_told(url: str) -> None:
    async def body(client: AsyncClient) -> None:
        off = {"parameters": {"dormouse.keep_alive": {"string_value": "off"}}}
        await client.load("no_input", config=off)
        told = [(await client.infer("no_input", {})).timeline for _ in range(3)]
        assert any(timeline is not None and timeline.stages for timeline in told)

    run(url, body)


def test_a_stream(url: str) -> None:
    async def body(client: AsyncClient) -> None:
        async with client.stream(timeout=60) as stream:
            for n in range(50):
                await stream.send("simple", INPUTS, id=str(n))
            await stream.send("simple", {"INPUT0": INPUTS["INPUT0"]}, id="bad")
            await stream.finish()
            seen = set()
            while True:
                try:
                    async for result in stream:
                        seen.add(result.id)
                    break
                except dormouse.RequestFailed as error:
                    assert error.id == "bad"
                    seen.add("failed")
            assert seen == {str(n) for n in range(50)} | {"failed"}
            with pytest.raises(dormouse.StreamClosed):
                await stream.send("simple", INPUTS)

    run(url, body)


def test_a_stream_ends_with_its_deadline(url: str) -> None:
    async def body(client: AsyncClient) -> None:
        async with client.stream(timeout=0.05) as stream:
            with pytest.raises(dormouse.DeadlineError):
                await stream.__anext__()

    run(url, body)


def test_a_stream_that_was_cancelled_says_so(url: str) -> None:
    async def body(client: AsyncClient) -> None:
        async with client.stream(timeout=60) as stream:
            reader = asyncio.create_task(stream.__anext__())
            await asyncio.sleep(0.05)
            stream.cancel()
            with pytest.raises(dormouse.RequestCancelled):
                await reader
            assert not reader.cancelled()

    run(url, body)


def test_cancelling_the_task_cancels_the_call(fake: Fake) -> None:
    def wait(request: Any, context: grpc.ServicerContext) -> Any:
        context.add_callback(fake.cancelled.set)
        fake.cancelled.wait(60)
        raise AssertionError("nobody waits for this answer")

    fake.answer("ModelInfer", wait)

    async def body(client: AsyncClient) -> None:
        task = asyncio.create_task(client.infer("m", INPUTS))
        while "ModelInfer" not in fake.calls:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.cancelled.wait, 60)

    run(fake.url, body, check=False)


def test_refusals_are_tried_again(fake: Fake) -> None:
    def refuse(request: Any, context: grpc.ServicerContext) -> Any:
        if fake.calls.count("ServerReady") < 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return dormouse._wire.SERVER_READY.response(ready=True)

    fake.answer("ServerReady", refuse)

    async def body(client: AsyncClient) -> None:
        assert await client.is_ready()

    run(fake.url, body, retry=dormouse.RetryPolicy(first_wait=0.001))
    assert fake.calls.count("ServerReady") == 3
