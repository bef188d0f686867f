"""The live server that most tests call, and a fake one for what a real one will not do on demand."""

import os
import threading
from concurrent import futures
from typing import Any, Callable, Dict, Iterator, List, Optional

import grpc
import pytest

import dormouse
from dormouse import _wire


@pytest.fixture(scope="session")
def url() -> str:
    """Where the live server listens for gRPC, as whoever started the tests says."""
    address = os.environ.get("DORMOUSE_TEST_GRPC")
    if not address:
        pytest.skip("DORMOUSE_TEST_GRPC names no server")
    return address


@pytest.fixture
def client(url: str) -> Iterator[dormouse.Client]:
    with dormouse.Client(url, timeout=60) as client:
        yield client


class Fake:
    """A server that answers as it is told and notes what it was asked."""

    def __init__(self, credentials: Optional[grpc.ServerCredentials] = None) -> None:
        self.answers: Dict[str, Callable[[Any, grpc.ServicerContext], Any]] = {}
        self.calls: List[str] = []
        self.metadata: List[Dict[str, Any]] = []
        self.cancelled = threading.Event()
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        self.server.add_generic_rpc_handlers((_Handler(self),))
        if credentials is None:
            port = self.server.add_insecure_port("127.0.0.1:0")
        else:
            port = self.server.add_secure_port("127.0.0.1:0", credentials)
        self.url = f"127.0.0.1:{port}"
        self.server.start()

    def answer(self, method: str, with_: Callable[[Any, grpc.ServicerContext], Any]) -> None:
        self.answers[f"/{_wire.SERVICE}/{method}"] = with_


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, fake: Fake) -> None:
        self.fake = fake

    def service(self, details: Any) -> Any:
        fake = self.fake
        method = next((m for m in _wire.UNARY if m.path == details.method), None)
        if method is None:
            return None

        def called(request: Any, context: grpc.ServicerContext) -> Any:
            fake.calls.append(details.method.rpartition("/")[2])
            fake.metadata.append(dict(context.invocation_metadata()))
            with_ = fake.answers.get(details.method)
            return method.response() if with_ is None else with_(request, context)

        return grpc.unary_unary_rpc_method_handler(
            called, method.request.FromString, method.response.SerializeToString
        )


@pytest.fixture
def fake() -> Iterator[Fake]:
    fake = Fake()
    yield fake
    fake.server.stop(0)
