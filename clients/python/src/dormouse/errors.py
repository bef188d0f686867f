"""Why a call got no answer."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Optional, Tuple, Type

import grpc
from google.protobuf.message import DecodeError

from ._wire import RetryInfo, Status

__all__ = [
    "DeadlineError",
    "DormouseError",
    "InvalidInput",
    "InvalidRequestError",
    "NotAllowedError",
    "NotFoundError",
    "OverloadedError",
    "ProtocolError",
    "RequestCancelled",
    "RequestFailed",
    "ServerError",
    "StreamClosed",
    "UnavailableError",
]


class DormouseError(Exception):
    """Everything this package raises on its own account."""


class InvalidInput(DormouseError, ValueError):
    """The request does not fit the model's signature, or a setting makes no sense. Nothing was sent."""


class ProtocolError(DormouseError):
    """The server's answer contradicts itself."""


class StreamClosed(DormouseError):
    """The stream has ended, so nothing more can be sent on it."""


class RequestFailed(DormouseError):
    """One request of a stream failed; the stream goes on."""

    def __init__(self, id: str, message: str) -> None:
        super().__init__(message)
        #: The request's id, empty when the server did not tell.
        self.id = id
        self.message = message


class ServerError(DormouseError):
    """The server answered with an error, or could not be reached."""

    def __init__(self, code: grpc.StatusCode, message: str, retry_after: Optional[float] = None) -> None:
        super().__init__(f"{message or 'the server gave no reason'} ({code.name})")
        self.code = code
        self.message = message
        #: Seconds after which the server says that trying again makes sense.
        self.retry_after = retry_after


class InvalidRequestError(ServerError, ValueError):
    """The server found the request wrong: ``INVALID_ARGUMENT`` or ``OUT_OF_RANGE``."""


class NotFoundError(ServerError):
    """There is no such model, version or method here: ``NOT_FOUND`` or ``UNIMPLEMENTED``."""


class UnavailableError(ServerError):
    """The server or the model cannot answer now: ``UNAVAILABLE``."""


class OverloadedError(ServerError):
    """There is no room, or the message is too large: ``RESOURCE_EXHAUSTED``."""


class DeadlineError(ServerError, TimeoutError):
    """The deadline passed, or the server said that it cannot be met: ``DEADLINE_EXCEEDED``."""


class NotAllowedError(ServerError):
    """The token is missing, wrong or not enough: ``UNAUTHENTICATED`` or ``PERMISSION_DENIED``."""


class RequestCancelled(ServerError):
    """The call was cancelled: ``CANCELLED``."""


_BY_CODE: Dict[grpc.StatusCode, Type[ServerError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.UNIMPLEMENTED: NotFoundError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowedError,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowedError,
    grpc.StatusCode.CANCELLED: RequestCancelled,
}

Metadata = Iterable[Tuple[str, Any]]


def from_status(code: grpc.StatusCode, message: Optional[str], trailers: Optional[Metadata]) -> ServerError:
    """The error for a status and the metadata it came with."""
    return error_of(code, message or "", retry_after(trailers))


def error_of(code: grpc.StatusCode, message: str, wait: Optional[float]) -> ServerError:
    """The error for a status and the seconds after which trying again makes sense."""
    return _BY_CODE.get(code, ServerError)(code, message, wait)


def retry_after(trailers: Optional[Metadata]) -> Optional[float]:
    """The seconds of the ``google.rpc.RetryInfo`` among the details of a status, if there is one."""
    for key, value in trailers or ():
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        try:
            for detail in Status.FromString(value).details:
                if detail.type_url.endswith("/google.rpc.RetryInfo"):
                    delay = RetryInfo.FromString(detail.value).delay
                    seconds = float(delay.seconds + delay.nanos / 1e9)
                    return seconds if seconds >= 0 else None
        except DecodeError:
            continue
    return None
