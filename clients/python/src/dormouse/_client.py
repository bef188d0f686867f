"""The client for threads."""

from __future__ import annotations

import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    Optional,
    Type,
    TypeVar,
    Union,
)

import grpc

from . import _calls, _wire
from ._http import Answer, Exchange, Transport
from ._models import IndexEntry, ModelMetadata, ModelStatistics, ServerMetadata
from ._request import Inputs, Request, RequestOptions
from ._result import InferResult
from ._retry import NEVER, RetryPolicy
from ._settings import ClientOptions, Deadline, Settings
from ._signatures import Signatures
from ._stream import NO_STREAMS, Stream
from ._timeline import Timeline
from ._wire import Message, Method
from .errors import DormouseError, InvalidInput, ServerError, from_status

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class Pending:
    """A request under way. Its answer can be waited for, or given up."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def result(self, timeout: Optional[float] = None) -> InferResult:
        """Waits for the answer, at most so many seconds; the request goes on if they pass."""
        try:
            response = self._call.result(timeout)
        except grpc.FutureTimeoutError:
            raise TimeoutError(f"no answer within {timeout} seconds, it is still waited for") from None
        except grpc.FutureCancelledError:
            raise from_status(grpc.StatusCode.CANCELLED, "the request was cancelled", None) from None
        except grpc.RpcError as error:
            raise _failure(error) from None
        return InferResult(response, _timeline(self._call))

    def cancel(self) -> bool:
        """Gives the request up; the server stops working on it. False when it has ended."""
        return bool(self._call.cancel())

    def done(self) -> bool:
        """Whether there is an answer or an error."""
        return bool(self._call.done())

    def add_done_callback(self, callback: Callable[[Pending], None]) -> None:
        """Calls back once there is an answer or an error, on a thread of gRPC's."""
        self._call.add_done_callback(lambda _: callback(self))


class _PendingHttp(Pending):
    """The same over HTTP."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.future)
        self._exchange = exchange

    def result(self, timeout: Optional[float] = None) -> InferResult:
        try:
            return InferResult(*self._exchange.future.result(timeout))
        # Two kinds before Python 3.11; a deadline that passed is a `TimeoutError` too.
        except (TimeoutError, FutureTimeoutError) as error:
            if isinstance(error, DormouseError):
                raise
            raise TimeoutError(f"no answer within {timeout} seconds, it is still waited for") from None

    def cancel(self) -> bool:
        return self._exchange.cancel()


class Client:
    """Calls a server of the KServe v2 protocol, over gRPC or, at ``http://`` and ``https://``, over
    HTTP. May be used from several threads.

    >>> with Client("localhost:8001") as client:                        # doctest: +SKIP
    ...     client.infer("simple", {"INPUT0": a, "INPUT1": b})["OUTPUT0"]
    """

    def __init__(self, url: str = "localhost:8001", **options: Unpack[ClientOptions]) -> None:
        self._settings = Settings.of(url, options)
        self._signatures = Signatures()
        settings = self._settings
        self._http = Transport(settings) if settings.http else None
        self._channel: Any = None
        self._methods: Dict[str, Any] = {}
        if settings.http:
            return
        if settings.tls is None:
            self._channel = grpc.insecure_channel(
                settings.target, settings.channel_options(), settings.compression
            )
        else:
            self._channel = grpc.secure_channel(
                settings.target,
                settings.tls.credentials(),
                settings.channel_options(),
                settings.compression,
            )
        self._methods = {
            method.path: self._channel.unary_unary(
                method.path, method.request.SerializeToString, method.response.FromString
            )
            for method in _wire.UNARY
        }

    def close(self) -> None:
        """Ends the connection and, over gRPC, what is under way."""
        if self._http is not None:
            self._http.close()
        else:
            self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout: Optional[float] = None,
        **options: Unpack[RequestOptions],
    ) -> InferResult:
        """Runs a model and waits for its answer.

        ``inputs`` are arrays by name, checked against the model's signature: arrays must have its
        type, lists and scalars are converted to it. ``tritonclient``'s ``InferInput`` objects are
        taken too. ``timeout`` is in seconds and holds for everything: waking the model, waiting,
        running, trying again.
        """
        request = Request.of(model, inputs, options)
        deadline = self._settings.deadline(timeout)
        message = self._checked(request, deadline)
        retry = NEVER if request.in_sequence else self._settings.retry
        response, timeline = self._send(_wire.MODEL_INFER, message, deadline, retry)
        return InferResult(response, timeline)

    def submit(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout: Optional[float] = None,
        **options: Unpack[RequestOptions],
    ) -> Pending:
        """Sends a request, once, and returns without waiting for its answer."""
        request = Request.of(model, inputs, options)
        deadline = self._settings.deadline(timeout)
        message = self._checked(request, deadline)
        if self._http is not None:
            return _PendingHttp(self._http.start(_wire.MODEL_INFER, message, deadline))
        method = self._methods[_wire.MODEL_INFER.path]
        return Pending(
            method.future(message, timeout=deadline.left(), metadata=self._settings.call_metadata())
        )

    def stream(self, *, timeout: Optional[float] = None) -> Stream:
        """Opens a stream: many requests and answers over one call, all within ``timeout``."""
        if self._http is not None:
            raise InvalidInput(NO_STREAMS)
        left = None if timeout is None else self._settings.deadline(timeout).left()
        method = self._channel.stream_stream(
            _wire.MODEL_STREAM_INFER.path,
            _wire.MODEL_STREAM_INFER.request.SerializeToString,
            _wire.MODEL_STREAM_INFER.response.FromString,
        )

        def checked(request: Request) -> Message:
            return self._checked(request, self._settings.deadline(None))

        metadata = self._settings.call_metadata()
        return Stream(lambda requests: method(requests, timeout=left, metadata=metadata), checked)

    def is_live(self, *, timeout: Optional[float] = None) -> bool:
        """Whether the server runs."""
        return self._run(_calls.server_live(), timeout)

    def is_ready(self, *, timeout: Optional[float] = None) -> bool:
        """Whether the server takes requests."""
        return self._run(_calls.server_ready(), timeout)

    def is_model_ready(self, model: str, version: str = "", *, timeout: Optional[float] = None) -> bool:
        """Whether a model can be called; one that sleeps can."""
        return self._run(_calls.model_ready(model, version), timeout)

    def server_metadata(self, *, timeout: Optional[float] = None) -> ServerMetadata:
        """Who the server is and what it can do."""
        return self._run(_calls.server_metadata(), timeout)

    def model_metadata(
        self, model: str, version: str = "", *, timeout: Optional[float] = None
    ) -> ModelMetadata:
        """A model's versions and signature."""
        return self._run(_calls.model_metadata(model, version), timeout)

    def model_config(
        self, model: str, version: str = "", *, timeout: Optional[float] = None
    ) -> Dict[str, Any]:
        """A model's whole configuration, completed by the server."""
        return self._run(_calls.model_config(model, version), timeout)

    def statistics(
        self, model: str = "", version: str = "", *, timeout: Optional[float] = None
    ) -> List[ModelStatistics]:
        """What models have done, their latest cold starts included; all models unless one is named."""
        return self._run(_calls.statistics(model, version), timeout)

    def index(self, *, ready: bool = False, timeout: Optional[float] = None) -> List[IndexEntry]:
        """The models of the repository, or those of them that are ready."""
        return self._run(_calls.index(ready), timeout)

    def load(
        self,
        model: str,
        *,
        config: Union[str, Mapping[str, Any], None] = None,
        files: Optional[Mapping[str, bytes]] = None,
        timeout: Optional[float] = None,
    ) -> None:
        """Loads a model, or loads it again; returns when it can answer.

        ``config`` (JSON or a dictionary) and ``files`` (by their path in the model's folder) take
        the place of what the repository has.
        """
        self._run(_calls.load(model, config, files), timeout)
        self._signatures.forget(model)

    def unload(self, model: str, *, dependents: bool = False, timeout: Optional[float] = None) -> None:
        """Unloads a model."""
        self._run(_calls.unload(model, dependents), timeout)
        self._signatures.forget(model)

    def _run(self, call: _calls.Call[T], timeout: Optional[float]) -> T:
        deadline = self._settings.deadline(timeout)
        response, _ = self._send(call.method, call.request, deadline, self._settings.retry)
        return call.read(response)

    def _send(self, method: Method, message: Message, deadline: Deadline, retry: RetryPolicy) -> Answer:
        """Makes a call until it is answered, or refused for good."""
        attempt = 1
        while True:
            try:
                return self._attempt(method, message, deadline)
            except ServerError as error:
                wait = retry.wait_after(attempt, error)
                if wait is None or not deadline.allows(wait):
                    raise
            time.sleep(wait)
            attempt += 1

    def _attempt(self, method: Method, message: Message, deadline: Deadline) -> Answer:
        if self._http is not None:
            return self._http.call(method, message, deadline)
        try:
            response, call = self._methods[method.path].with_call(
                message, timeout=deadline.left(), metadata=self._settings.call_metadata()
            )
        except grpc.RpcError as error:
            raise _failure(error) from None
        return response, _timeline(call)

    def _checked(self, request: Request, deadline: Deadline) -> Message:
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
        response, _ = self._send(call.method, call.request, deadline, self._settings.retry)
        signature = call.read(response)
        self._signatures.put(request.model, request.version, signature)
        return request.message(signature)


def _timeline(call: Any) -> Optional[Timeline]:
    return _calls.timeline(call.initial_metadata(), call.trailing_metadata())


def _failure(error: Any) -> ServerError:
    return from_status(error.code(), error.details(), error.trailing_metadata())
