"""A client of Dormouse and of any other server of the KServe v2 / Triton protocol.

>>> import dormouse                                                      # doctest: +SKIP
>>> client = dormouse.Client("localhost:8001")
>>> result = client.infer("simple", {"INPUT0": a, "INPUT1": b})
>>> result["OUTPUT0"]

`AsyncClient` (in `dormouse.aio`) is the same for asyncio.
"""

from ._client import Client, Pending
from ._models import (
    BatchStatistics,
    IndexEntry,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
    TensorSpec,
    Total,
)
from ._request import Inputs, Outputs, Parameter, RequestOptions
from ._result import InferResult
from ._retry import RetryPolicy
from ._settings import TLS, ClientOptions, Token
from ._stream import Stream
from ._timeline import RequestTiming, Stage, Timeline
from .aio import AsyncClient, AsyncStream
from .errors import (
    DeadlineError,
    DormouseError,
    InvalidInput,
    InvalidRequestError,
    NotAllowedError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    RequestCancelled,
    RequestFailed,
    ServerError,
    StreamClosed,
    UnavailableError,
)

__version__ = "0.1.0"

__all__ = [
    "TLS",
    "AsyncClient",
    "AsyncStream",
    "BatchStatistics",
    "Client",
    "ClientOptions",
    "DeadlineError",
    "DormouseError",
    "IndexEntry",
    "InferResult",
    "Inputs",
    "InvalidInput",
    "InvalidRequestError",
    "ModelMetadata",
    "ModelStatistics",
    "NotAllowedError",
    "NotFoundError",
    "Outputs",
    "OverloadedError",
    "Parameter",
    "Pending",
    "ProtocolError",
    "RequestCancelled",
    "RequestFailed",
    "RequestOptions",
    "RequestTiming",
    "RetryPolicy",
    "ServerError",
    "ServerMetadata",
    "Stage",
    "Stream",
    "StreamClosed",
    "TensorSpec",
    "Timeline",
    "Token",
    "Total",
    "UnavailableError",
]
