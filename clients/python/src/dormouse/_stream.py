"""Many requests and answers over one call, for threads."""

from __future__ import annotations

import contextlib
import queue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional, Type

import grpc

from ._request import Inputs, Request, RequestOptions
from ._result import InferResult
from ._wire import Message
from .errors import RequestFailed, StreamClosed, from_status

if TYPE_CHECKING:
    from typing_extensions import Unpack

UNSENT = 64
"""Requests that may wait to be sent before `Stream.send` waits."""

NO_STREAMS = "streams need gRPC, and the client's address is HTTP's: HOST:PORT or grpc://HOST:PORT"

LOOK_AGAIN = 0.1
"""Seconds after which a sender that waits looks whether the stream has ended meanwhile."""


class Stream(Iterator[InferResult]):
    """An open stream: requests go in, answers come out, in an order of the server's choice.

    Iterating gives the answers and ends when all requests were answered after `finish`. A request
    that fails raises `RequestFailed` there and the stream goes on: iterate again. Any other error
    ends it. Leaving the ``with`` block cancels what is under way. One thread may send while
    another one receives; who sends without receiving will be held up at some point.
    """

    def __init__(
        self, open: Callable[[Iterator[Message]], Any], checked: Callable[[Request], Message]
    ) -> None:
        unsent: queue.Queue[Optional[Message]] = queue.Queue(UNSENT)
        self._unsent = unsent
        self._checked = checked
        self._finished = False
        self._call = open(iter(unsent.get, None))
        # However the call ends: gRPC's thread that sends must not wait for requests for ever.
        if not self._call.add_callback(lambda: _release(unsent)):
            _release(unsent)

    def send(self, model: str, inputs: Inputs, **options: Unpack[RequestOptions]) -> None:
        """Sends a request; ``id`` tells its answer from others."""
        if self._finished:
            raise StreamClosed("nothing can be sent after finish()")
        self._put(self._checked(Request.of(model, inputs, options)))

    def finish(self) -> None:
        """Says that no more requests follow; answers still come."""
        if not self._finished:
            self._finished = True
            with contextlib.suppress(StreamClosed):
                self._put(None)

    def cancel(self) -> None:
        """Gives up what is under way and ends the stream."""
        self._call.cancel()
        self.finish()

    def __next__(self) -> InferResult:
        try:
            told = next(self._call)
        except StopIteration:
            raise
        except grpc.RpcError:
            code = self._call.code()
            raise from_status(code, self._call.details(), self._call.trailing_metadata()) from None
        return answer(told)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.cancel()

    def _put(self, message: Optional[Message]) -> None:
        while True:
            if self._call.done():
                raise StreamClosed("the stream has ended: read its answers to see why")
            try:
                self._unsent.put(message, timeout=LOOK_AGAIN)
                return
            except queue.Full:
                continue


def _release(unsent: queue.Queue[Optional[Message]]) -> None:
    """Ends the thread that takes requests from the queue; what it has not sent is of no use."""
    while True:
        try:
            unsent.put_nowait(None)
            return
        except queue.Full:
            with contextlib.suppress(queue.Empty):
                unsent.get_nowait()


def answer(told: Message) -> InferResult:
    """An answer of a stream; raises what the server says went wrong with its request."""
    if told.error_message:
        raise RequestFailed(told.infer_response.id, told.error_message)
    return InferResult(told.infer_response)
