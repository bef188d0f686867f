"""The client for asyncio: as `dormouse.Client`, with coroutines.

Cancelling the task that awaits a call cancels the call, and the server stops working on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    AsyncIterator,
    Dict,
    List,
    Mapping,
    Optional,
    Type,
    TypeVar,
    Union,
)

import grpc
import grpc.aio

from . import _calls, _wire
from ._http import Answer, Transport
from ._models import IndexEntry, ModelMetadata, ModelStatistics, ServerMetadata
from ._request import Inputs, Request, RequestOptions
from ._result import InferResult
from ._retry import NEVER, RetryPolicy
from ._settings import ClientOptions, Deadline, Settings
from ._signatures import Signatures
from ._stream import NO_STREAMS, answer
from ._wire import Message, Method
from .errors import InvalidInput, ServerError, StreamClosed, from_status

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AsyncClient", "AsyncStream"]

T = TypeVar("T")


class AsyncClient:
    """Calls a server of the KServe v2 protocol, over gRPC or, at ``http://`` and ``https://``, over
    HTTP, from one event loop."""

    def __init__(self, url: str = "localhost:8001", **options: Unpack[ClientOptions]) -> None:
        self._settings = Settings.of(url, options)
        self._signatures = Signatures()
        self._http = Transport(self._settings) if self._settings.http else None
        self._opened: Any = None
        self._methods: Dict[str, Any] = {}

    def _channel(self) -> Any:
        # Made with the first call: a channel belongs to the loop that runs when it is made.
        if self._opened is None:
            settings = self._settings
            if settings.tls is None:
                self._opened = grpc.aio.insecure_channel(
                    settings.target, settings.channel_options(), settings.compression
                )
            else:
                self._opened = grpc.aio.secure_channel(
                    settings.target,
                    settings.tls.credentials(),
                    settings.channel_options(),
                    settings.compression,
                )
            for method in _wire.UNARY:
                self._methods[method.path] = self._opened.unary_unary(
                    method.path, method.request.SerializeToString, method.response.FromString
                )
        return self._opened

    async def close(self) -> None:
        """Ends the connection and, over gRPC, what is under way."""
        if self._http is not None:
            self._http.close()
        if self._opened is not None:
            await self._opened.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        await self.close()

    async def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout: Optional[float] = None,
        **options: Unpack[RequestOptions],
    ) -> InferResult:
        """Runs a model and waits for its answer; see `dormouse.Client.infer`."""
        request = Request.of(model, inputs, options)
        deadline = self._settings.deadline(timeout)
        message = await self._checked(request, deadline)
        retry = NEVER if request.in_sequence else self._settings.retry
        response, timeline = await self._send(_wire.MODEL_INFER, message, deadline, retry)
        return InferResult(response, timeline)

    def stream(self, *, timeout: Optional[float] = None) -> AsyncStream:
        """Opens a stream: many requests and answers over one call, all within ``timeout``."""
        if self._http is not None:
            raise InvalidInput(NO_STREAMS)
        left = None if timeout is None else self._settings.deadline(timeout).left()
        method = self._channel().stream_stream(
            _wire.MODEL_STREAM_INFER.path,
            _wire.MODEL_STREAM_INFER.request.SerializeToString,
            _wire.MODEL_STREAM_INFER.response.FromString,
        )
        call = method(timeout=left, metadata=self._settings.call_metadata())
        return AsyncStream(call, self)

    async def is_live(self, *, timeout: Optional[float] = None) -> bool:
        """Whether the server runs."""
        return await self._run(_calls.server_live(), timeout)

    async def is_ready(self, *, timeout: Optional[float] = None) -> bool:
        """Whether the server takes requests."""
        return await self._run(_calls.server_ready(), timeout)

    async def is_model_ready(self, model: str, version: str = "", *, timeout: Optional[float] = None) -> bool:
        """Whether a model can be called; one that sleeps can."""
        return await self._run(_calls.model_ready(model, version), timeout)

    async def server_metadata(self, *, timeout: Optional[float] = None) -> ServerMetadata:
        """Who the server is and what it can do."""
        return await self._run(_calls.server_metadata(), timeout)

    async def model_metadata(
        self, model: str, version: str = "", *, timeout: Optional[float] = None
    ) -> ModelMetadata:
        """A model's versions and signature."""
        return await self._run(_calls.model_metadata(model, version), timeout)

    async def model_config(
        self, model: str, version: str = "", *, timeout: Optional[float] = None
    ) -> Dict[str, Any]:
        """A model's whole configuration, completed by the server."""
        return await self._run(_calls.model_config(model, version), timeout)

    async def statistics(
        self, model: str = "", version: str = "", *, timeout: Optional[float] = None
    ) -> List[ModelStatistics]:
        """What models have done, their latest cold starts included; all models unless one is named."""
        return await self._run(_calls.statistics(model, version), timeout)

    async def index(self, *, ready: bool = False, timeout: Optional[float] = None) -> List[IndexEntry]:
        """The models of the repository, or those of them that are ready."""
        return await self._run(_calls.index(ready), timeout)

    async def load(
        self,
        model: str,
        *,
        config: Union[str, Mapping[str, Any], None] = None,
        files: Optional[Mapping[str, bytes]] = None,
        timeout: Optional[float] = None,
    ) -> None:
        """Loads a model, or loads it again; see `dormouse.Client.load`."""
        await self._run(_calls.load(model, config, files), timeout)
        self._signatures.forget(model)

    async def unload(self, model: str, *, dependents: bool = False, timeout: Optional[float] = None) -> None:
        """Unloads a model."""
        await self._run(_calls.unload(model, dependents), timeout)
        self._signatures.forget(model)

    async def _run(self, call: _calls.Call[T], timeout: Optional[float]) -> T:
        deadline = self._settings.deadline(timeout)
        response, _ = await self._send(call.method, call.request, deadline, self._settings.retry)
        return call.read(response)

    async def _send(self, method: Method, message: Message, deadline: Deadline, retry: RetryPolicy) -> Answer:
        """Makes a call until it is answered, or refused for good."""
        attempt = 1
        while True:
            try:
                return await self._attempt(method, message, deadline)
            except ServerError as error:
                wait = retry.wait_after(attempt, error)
                if wait is None or not deadline.allows(wait):
                    raise
            await asyncio.sleep(wait)
            attempt += 1

    async def _attempt(self, method: Method, message: Message, deadline: Deadline) -> Answer:
        if self._http is not None:
            exchange = self._http.start(method, message, deadline)
            try:
                return await asyncio.wrap_future(exchange.future)
            except asyncio.CancelledError:
                exchange.cancel()
                raise
        self._channel()
        call = self._methods[method.path](
            message, timeout=deadline.left(), metadata=self._settings.call_metadata()
        )
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from None
        return response, _calls.timeline(await call.initial_metadata(), await call.trailing_metadata())

    async def _checked(self, request: Request, deadline: Deadline) -> Message:
        """The message of a request that fits the model, as far as can be told from here."""
        if not self._settings.check:
            return request.message(None)
        known = self._signatures.get(request.model, request.version)
        if known is not None:
            try:
                return request.message(known)
            except InvalidInput:
                # The model may have been reloaded since.
                pass
        call = _calls.model_metadata(request.model, request.version)
        response, _ = await self._send(call.method, call.request, deadline, self._settings.retry)
        signature = call.read(response)
        self._signatures.put(request.model, request.version, signature)
        return request.message(signature)

    async def _checked_for_stream(self, request: Request) -> Message:
        return await self._checked(request, self._settings.deadline(None))


class AsyncStream(AsyncIterator[InferResult]):
    """An open stream: requests go in, answers come out, in an order of the server's choice.

    As `dormouse.Stream`: a request that fails raises `RequestFailed` where answers are read, and
    the stream goes on; any other error ends it.
    """

    def __init__(self, call: Any, client: AsyncClient) -> None:
        self._call = call
        self._client = client
        self._finished = False
        self._cancelled = False

    async def send(self, model: str, inputs: Inputs, **options: Unpack[RequestOptions]) -> None:
        """Sends a request; ``id`` tells its answer from others."""
        if self._finished:
            raise StreamClosed("nothing can be sent after finish()")
        message = await self._client._checked_for_stream(Request.of(model, inputs, options))
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            raise StreamClosed("the stream has ended: read its answers to see why") from None

    async def finish(self) -> None:
        """Says that no more requests follow; answers still come."""
        if not self._finished:
            self._finished = True
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.done_writing()

    def cancel(self) -> None:
        """Gives up what is under way and ends the stream."""
        self._finished = True
        self._cancelled = True
        self._call.cancel()

    async def __anext__(self) -> InferResult:
        try:
            told = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from None
        except asyncio.CancelledError:
            # gRPC says so of a call that was cancelled too, and the task that reads was not.
            if not self._cancelled or _is_cancelling():
                raise
            raise from_status(grpc.StatusCode.CANCELLED, "the stream was cancelled", None) from None
        if told is grpc.aio.EOF:
            raise StopAsyncIteration
        return answer(told)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.cancel()


def _is_cancelling() -> bool:
    """Whether somebody cancels the task that runs; older Pythons do not tell."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is not None and bool(cancelling())


def _failure(error: grpc.aio.AioRpcError) -> ServerError:
    return from_status(error.code(), error.details(), error.trailing_metadata())
