"""Both clients over HTTP, against a live server and one that answers as it is told."""

import asyncio
import contextlib
import http.client
import http.server
import json
import os
import resource
import threading
import time
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import pytest
from test_live import ARRAYS

import dormouse

INPUTS = {"INPUT0": np.full((1, 16), 5, np.int32), "INPUT1": np.ones((1, 16), np.int32)}
QUICK = dormouse.RetryPolicy(first_wait=0.001)


@pytest.fixture(scope="session")
def http_url() -> str:
    address = os.environ.get("DORMOUSE_TEST_HTTP")
    if not address:
        pytest.skip("DORMOUSE_TEST_HTTP names no server")
    return address


@pytest.fixture
def client(http_url: str) -> Iterator[dormouse.Client]:
    with dormouse.Client(http_url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("kind", sorted(ARRAYS))
def test_every_datatype_comes_back_as_it_went(client: dormouse.Client, kind: str) -> None:
    output = client.infer(f"identity_{kind}", {"INPUT": ARRAYS[kind]}, id="7", outputs=["OUTPUT"])
    assert (output.id, output.model_version) == ("7", "1")
    np.testing.assert_array_equal(output["OUTPUT"], ARRAYS[kind])
    assert output["OUTPUT"].dtype == ARRAYS[kind].dtype


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_requests_may_be_compressed(http_url: str, compression: str) -> None:
    with dormouse.Client(http_url, compression=compression) as client:
        assert client.infer("simple", INPUTS)["OUTPUT0"].tolist() == [[6] * 16]


def test_management(client: dormouse.Client) -> None:
    assert client.is_live() and client.is_ready() and client.is_model_ready("simple")
    assert "binary_tensor_data" in client.server_metadata().extensions
    metadata = client.model_metadata("simple", "1")
    assert metadata.inputs[0] == dormouse.TensorSpec("INPUT0", "INT32", (-1, 16))
    assert client.model_config("simple")["max_batch_size"] > 0
    client.infer("simple", INPUTS)
    statistics = client.statistics("simple")[0]
    assert statistics.inference_count > 0 and statistics.success.count > 0
    assert any(statistics.name == "simple" for statistics in client.statistics())
    client.unload("flat_uint16")
    assert not client.is_model_ready("flat_uint16") and not client.is_model_ready("nobody")
    client.load("flat_uint16")
    assert "flat_uint16" in {entry.name for entry in client.index(ready=True)}


def test_files_of_a_load_request(client: dormouse.Client) -> None:
    with pytest.raises(dormouse.ServerError, match="ONNX"):
        client.load("brought", config={"backend": "onnxruntime"}, files={"1/model.onnx": b"none"})


def test_a_cold_start_is_told(client: dormouse.Client) -> None:
    off = {"parameters": {"dormouse.keep_alive": {"string_value": "off"}}}
    client.load("scalar", config=off)
    metadata = client.model_metadata("scalar").inputs
    inputs = {spec.name: np.ones([max(1, n) for n in spec.shape], np.float32) for spec in metadata}
    told = [client.infer("scalar", inputs).timeline for _ in range(3)]
    assert any(timeline is not None and timeline.stages for timeline in told)


def test_errors_are_those_of_grpc(client: dormouse.Client) -> None:
    with pytest.raises(dormouse.NotFoundError, match="nobody"):
        client.infer("nobody", INPUTS)
    with pytest.raises(dormouse.InvalidRequestError, match="INPUT1"):
        client.infer("simple", {"INPUT0": INPUTS["INPUT0"]})
    with pytest.raises(dormouse.InvalidInput, match="streams need gRPC"):
        client.stream()
    with pytest.raises(dormouse.DeadlineError):
        client.infer("slow", {"ITERATIONS": [10**9]}, timeout=0.3)


def test_a_request_can_be_given_up(client: dormouse.Client) -> None:
    assert client.submit("simple", INPUTS).result(60)["OUTPUT0"].tolist() == [[6] * 16]
    pending = client.submit("slow", {"ITERATIONS": [10**9]})
    with pytest.raises(TimeoutError, match="still waited for"):
        pending.result(0.05)
    assert pending.cancel()
    with pytest.raises(dormouse.RequestCancelled):
        pending.result(60)
    assert pending.done() and not pending.cancel()


def test_many_threads_and_tasks(http_url: str) -> None:
    async def body() -> None:
        async with dormouse.AsyncClient(http_url, timeout=60) as client:
            calls = (client.infer("simple", INPUTS, id=str(n)) for n in range(20))
            results = await asyncio.gather(*calls)
            assert [result.id for result in results] == [str(n) for n in range(20)]
            with pytest.raises(dormouse.NotFoundError):
                await client.infer("nobody", INPUTS)
            task = asyncio.create_task(client.infer("slow", {"ITERATIONS": [10**9]}))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(body(), 120))


class Told(http.server.ThreadingHTTPServer):
    """Answers as it is told, and notes what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: List[Tuple[int, Dict[str, str], bytes]] = []
        self.asked: List[Tuple[str, Dict[str, str], bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        told = self.server
        assert isinstance(told, Told)
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        told.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        status, headers, content = told.answers.pop(0)
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = answer  # noqa: N815

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.shutdown()
    told.server_close()


def test_a_refusal_is_tried_again_when_the_server_says_so(told: Told) -> None:
    told.answers = [(503, {"Retry-After": "0"}, b'{"error": "busy"}'), (200, {}, b"")]
    with dormouse.Client(told.url, retry=QUICK, token="secret") as client:
        client.load("a/b c")
    path, headers, _ = told.asked[1]
    assert path == "/v2/repository/models/a%2Fb%20c/load"
    assert headers["authorization"] == "Bearer secret"
    told.answers = [(503, {"Retry-After": "1"}, b'{"error": "busy"}')]
    with (
        dormouse.Client(told.url, retry=False) as client,
        pytest.raises(dormouse.UnavailableError, match="busy") as refused,
    ):
        client.index()
    assert refused.value.retry_after == 1.0


def test_a_server_that_cannot_be_in_time_is_not_asked_again(told: Told) -> None:
    told.answers = [(503, {"Dormouse-Error-Code": "DEADLINE_EXCEEDED"}, b'{"error": "30 ms are left"}')]
    with (
        dormouse.Client(told.url, retry=QUICK) as client,
        pytest.raises(dormouse.DeadlineError, match="30 ms are left"),
    ):
        client.index()
    assert len(told.asked) == 1


def test_a_request_given_up_before_it_is_connected_is_never_sent(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = http.client.HTTPConnection.connect
    begun, given_up = threading.Event(), threading.Event()

    def late(connection: http.client.HTTPConnection) -> None:
        begun.set()
        assert given_up.wait(60)
        connect(connection)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", late)
    with dormouse.Client(told.url, check=False) as client:
        pending = client.submit("m", {"x": np.ones(1)})
        assert begun.wait(60) and pending.cancel()
        given_up.set()
        with pytest.raises(dormouse.RequestCancelled):
            pending.result(60)
    assert not told.asked


def test_a_process_may_have_thousands_of_files_open(told: Told) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    told.answers = [(200, {}, b"")] * 3
    with contextlib.ExitStack() as files, dormouse.Client(told.url, retry=False) as client:
        for _ in range(min(1100, most - 200)):
            files.enter_context(open(os.devnull))
        assert all(client.is_live() for _ in range(3))


def test_answers_of_servers_that_send_json_only(told: Told) -> None:
    answer = {
        "model_name": "m",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [2], "data": [0.5, 2]},
            {"name": "s", "datatype": "BYTES", "shape": [1], "data": ["a"]},
        ],
    }
    told.answers = [(200, {}, json.dumps(answer).encode())]
    with dormouse.Client(told.url, check=False) as client:
        result = client.infer("m", {"x": np.ones(2, np.float32)}, sequence_id=3, sequence_start=True)
    assert result["y"].tolist() == [0.5, 2.0] and result["s"].tolist() == [b"a"]
    _, headers, body = told.asked[0]
    length = int(headers["inference-header-content-length"])
    sent = json.loads(body[:length])
    assert sent["parameters"]["sequence_id"] == 3 and sent["parameters"]["timeout"] > 0
    assert body[length:] == np.ones(2, np.float32).tobytes()


@pytest.mark.parametrize(
    "content", [b"<html>", b"[]", b'{"model_name": "m", "outputs": [{"name": "y"}]}', b'{"outputs": 3}']
)
def test_answers_that_make_no_sense_are_told(told: Told, content: bytes) -> None:
    told.answers = [(200, {}, content)]
    with (
        dormouse.Client(told.url, check=False) as client,
        pytest.raises(dormouse.ProtocolError, match="not the protocol's"),
    ):
        client.infer("m", {"x": np.ones(1)})


def test_a_connection_that_was_closed_is_not_used_again(told: Told) -> None:
    live: Tuple[int, Dict[str, str], bytes] = (200, {}, b"")
    told.answers = [live, live, (200, {"Connection": "close"}, b""), live]
    with dormouse.Client(told.url, retry=False) as client:
        for _ in range(4):
            assert client.is_live()
            time.sleep(0.01)
    with pytest.raises(dormouse.RequestCancelled, match="closed"):
        client.is_live()


def test_nobody_there_is_said_so() -> None:
    with (
        dormouse.Client("http://127.0.0.1:1", retry=False) as client,
        pytest.raises(dormouse.UnavailableError, match=r"127[.]0[.]0[.]1:1"),
    ):
        client.is_live()
