"""The protocol over HTTP, for where gRPC does not get through: the same messages, as JSON and bytes."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import json
import math
import selectors
import socket
import ssl
import threading
import zlib
from concurrent.futures import Future
from typing import Any, Callable, Dict, List, Optional, Tuple, Type
from urllib.parse import quote

import grpc
from google.protobuf import json_format

from . import _wire
from ._request import Parameter, set_parameter
from ._settings import Deadline, Settings
from ._tensors import as_datatype, encode
from ._timeline import Timeline, parse_server_timing
from ._wire import Message, Method
from .errors import ProtocolError, ServerError, error_of, from_status

KEPT = 16
"""Connections that are kept for the next calls."""

PIECE = 1 << 20
"""Bytes that are read at a time: a deadline is looked at between two of them."""

_HEADER_LENGTH = "Inference-Header-Content-Length"

_ERROR_CODE = "Dormouse-Error-Code"
"""What an error is called over gRPC, where the server says so: 503 alone has several causes."""

# `select` takes no descriptor from 1024 on, except where there is nothing else.
_Selector: Type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.SelectSelector)

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.FAILED_PRECONDITION,
}

Answer = Tuple[Message, Optional[Timeline]]


class Exchange:
    """A call under way on a thread of its own."""

    def __init__(self) -> None:
        self.future: Future[Answer] = Future()
        # Nobody but `cancel` ends it early.
        self.future.set_running_or_notify_cancel()
        self._sock: Optional[socket.socket] = None
        self._lock = threading.Lock()
        self._over = False
        self.cancelled = False

    def goes_on(self, sock: Optional[socket.socket] = None) -> None:
        """Raises `RequestCancelled` when the call was given up, and says what to break off from now on."""
        with self._lock:
            if self.cancelled:
                raise _cancelled()
            self._sock = sock

    def ends(self) -> None:
        """It is too late to give the call up: its connection may be another one's next."""
        with self._lock:
            self._over = True
            self._sock = None

    def cancel(self) -> bool:
        """Breaks the connection off: the server stops working on it. False when it has ended."""
        with self._lock:
            if self._over or self.future.done():
                return False
            self.cancelled = True
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            return True


def _cancelled() -> ServerError:
    return from_status(grpc.StatusCode.CANCELLED, "the request was cancelled", None)


class _Secure(http.client.HTTPSConnection):
    """TLS to a server whose certificate may be for another name than its address has."""

    def __init__(self, target: str, context: ssl.SSLContext, name: Optional[str]) -> None:
        super().__init__(target, context=context)
        self._trusted, self._name = context, name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._trusted.wrap_socket(self.sock, server_hostname=self._name or self.host)


class Transport:
    """Makes calls. May be used from several threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._context = None if settings.tls is None else settings.tls.context()
        self._free: List[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Ends the connections that nobody uses."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for connection in free:
            connection.close()

    def start(self, method: Method, message: Message, deadline: Deadline) -> Exchange:
        """Begins a call that is waited for elsewhere."""
        exchange = Exchange()

        def work() -> None:
            try:
                exchange.future.set_result(self.call(method, message, deadline, exchange))
            except BaseException as error:
                exchange.future.set_exception(error)

        threading.Thread(target=work, name="dormouse-http", daemon=True).start()
        return exchange

    def call(
        self, method: Method, message: Message, deadline: Deadline, exchange: Optional[Exchange] = None
    ) -> Answer:
        """Makes a call once."""
        exchange = exchange or Exchange()
        verb, path, body, headers = _plan(method, message, deadline)
        headers.update(self._settings.call_metadata())
        if body and self._settings.compression is not None:
            packed = self._settings.compression is grpc.Compression.Gzip
            headers["Content-Encoding"] = "gzip" if packed else "deflate"
            body = gzip.compress(body, 1) if packed else zlib.compress(body, 1)
        if len(body) > self._settings.max_message_size:
            raise from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the request has {len(body)} bytes", None)
        connection = self._connection()
        try:
            if connection.sock is None:
                exchange.goes_on()
                _patience(connection, deadline)
                connection.connect()
            # Nothing could be broken off before; from here on nothing is sent for nobody.
            exchange.goes_on(connection.sock)
            _patience(connection, deadline)
            connection.request(verb, path, body or None, headers)
            response = connection.getresponse()
            content = self._read(connection, response, deadline)
        except ServerError:
            connection.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._failure(error, exchange) from None
        finally:
            exchange.ends()
        if exchange.cancelled:
            connection.close()
            raise _cancelled()
        if response.will_close:
            connection.close()
        else:
            self._keep(connection)
        return _answer(method, response, content, deadline)

    def _connection(self) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                if self._closed:
                    raise from_status(grpc.StatusCode.CANCELLED, "the client is closed", None)
                connection = self._free.pop() if self._free else None
            if connection is None:
                break
            # One that the server has closed, or says something on that nobody asked for, is of no use.
            if connection.sock is not None and _is_silent(connection.sock):
                return connection
            connection.close()
        target = self._settings.target
        if self._context is None or self._settings.tls is None:
            return http.client.HTTPConnection(target)
        return _Secure(target, self._context, self._settings.tls.server_name)

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed and len(self._free) < KEPT:
                self._free.append(connection)
                return
        connection.close()

    def _read(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: Deadline
    ) -> bytes:
        pieces: List[bytes] = []
        left = self._settings.max_message_size
        while True:
            _patience(connection, deadline)
            piece = response.read(PIECE)
            if not piece:
                return b"".join(pieces)
            left -= len(piece)
            if left < 0:
                raise from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "the answer is too large", None)
            pieces.append(piece)

    def _failure(self, error: Exception, exchange: Exchange) -> ServerError:
        if exchange.cancelled:
            return _cancelled()
        # Two kinds before Python 3.10.
        if isinstance(error, (TimeoutError, socket.timeout)):
            return from_status(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer came in time", None)
        said = f"{self._settings.target}: {error or type(error).__name__}"
        return from_status(grpc.StatusCode.UNAVAILABLE, said, None)


def _is_silent(sock: socket.socket) -> bool:
    with _Selector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return not selector.select(0)


def _patience(connection: http.client.HTTPConnection, deadline: Deadline) -> None:
    left = deadline.left()
    if left is not None and left <= 0:
        raise from_status(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer came in time", None)
    connection.timeout = left
    if connection.sock is not None:
        connection.sock.settimeout(left)


Plan = Tuple[str, str, bytes, Dict[str, str]]


def _plan(method: Method, message: Message, deadline: Deadline) -> Plan:
    """How a call is made over HTTP: verb, path, body, headers."""
    if method is _wire.MODEL_INFER:
        return _infer(message, deadline)
    if method is _wire.REPOSITORY_INDEX:
        return _posted("/v2/repository/index", {"ready": message.ready})
    if method in (_wire.REPOSITORY_MODEL_LOAD, _wire.REPOSITORY_MODEL_UNLOAD):
        verb = "load" if method is _wire.REPOSITORY_MODEL_LOAD else "unload"
        told = {key: _plain(value) for key, value in message.parameters.items()}
        parameters = {
            key: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for key, value in told.items()
        }
        path = f"/v2/repository/models/{quote(message.model_name, safe='')}/{verb}"
        return _posted(path, {"parameters": parameters})
    if method is _wire.MODEL_STATISTICS and not message.name:
        return "GET", "/v2/models/stats", b"", {}
    return "GET", _PATHS[method.path](message), b"", {}


def _model(message: Message, name: str) -> str:
    version = f"/versions/{quote(message.version, safe='')}" if message.version else ""
    return f"/v2/models/{quote(name, safe='')}{version}"


_PATHS: Dict[str, Callable[[Message], str]] = {
    _wire.SERVER_LIVE.path: lambda _: "/v2/health/live",
    _wire.SERVER_READY.path: lambda _: "/v2/health/ready",
    _wire.SERVER_METADATA.path: lambda _: "/v2",
    _wire.MODEL_READY.path: lambda asked: _model(asked, asked.name) + "/ready",
    _wire.MODEL_METADATA.path: lambda asked: _model(asked, asked.name),
    _wire.MODEL_CONFIG.path: lambda asked: _model(asked, asked.name) + "/config",
    _wire.MODEL_STATISTICS.path: lambda asked: _model(asked, asked.name) + "/stats",
}

_PROBES = {_wire.SERVER_LIVE.path: "live", _wire.SERVER_READY.path: "ready", _wire.MODEL_READY.path: "ready"}


def _posted(path: str, told: Dict[str, Any]) -> Plan:
    return "POST", path, json.dumps(told).encode(), {"Content-Type": "application/json"}


def _plain(parameter: Message) -> Any:
    return getattr(parameter, parameter.WhichOneof("parameter_choice") or "string_param")


def _infer(message: Message, deadline: Deadline) -> Plan:
    """An inference: a header in JSON, and behind it the tensors as they are."""
    parameters = {key: _plain(value) for key, value in message.parameters.items()}
    left = deadline.left()
    if left is not None:
        # gRPC tells it by itself.
        parameters.setdefault("timeout", max(1, math.ceil(left * 1e6)))
    parameters["binary_data_output"] = True
    raw = iter(message.raw_input_contents)
    tail: List[bytes] = []
    inputs = []
    for tensor in message.inputs:
        own = {key: _plain(value) for key, value in tensor.parameters.items()}
        if "shared_memory_region" not in own:
            tail.append(next(raw))
            own["binary_data_size"] = len(tail[-1])
        inputs.append(_described(tensor, own, datatype=tensor.datatype, shape=list(tensor.shape)))
    head: Dict[str, Any] = {"parameters": parameters, "inputs": inputs}
    if message.id:
        head["id"] = message.id
    if message.outputs:
        head["outputs"] = [
            _described(tensor, {key: _plain(value) for key, value in tensor.parameters.items()})
            for tensor in message.outputs
        ]
    text = json.dumps(head).encode()
    path = f"/v2/models/{quote(message.model_name, safe='')}"
    if message.model_version:
        path += f"/versions/{quote(message.model_version, safe='')}"
    headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(len(text))}
    return "POST", f"{path}/infer", b"".join([text, *tail]), headers


def _described(tensor: Message, parameters: Dict[str, Parameter], **more: Any) -> Dict[str, Any]:
    return {"name": tensor.name, **more, **({"parameters": parameters} if parameters else {})}


def _answer(method: Method, response: http.client.HTTPResponse, content: bytes, deadline: Deadline) -> Answer:
    probed = _PROBES.get(method.path)
    # As over gRPC, a model that is not there is not ready.
    if probed is not None and response.status in (200, 400, 404, 503):
        return method.response(**{probed: response.status == 200}), None
    if response.status != 200:
        raise _refusal(response, content, deadline)
    timing = response.getheader("server-timing")
    try:
        if method is _wire.MODEL_INFER:
            message = _outputs(content, response.getheader(_HEADER_LENGTH))
            return message, None if timing is None else parse_server_timing(timing)
        told = json.loads(content) if content else {}
        if method is _wire.REPOSITORY_INDEX:
            told = {"models": told}
        elif method is _wire.MODEL_CONFIG:
            told = {"config": told}
        return json_format.ParseDict(told, method.response(), ignore_unknown_fields=True), None
    except (ValueError, TypeError, KeyError, AttributeError, json_format.ParseError) as error:
        raise ProtocolError(f"the server's answer is not the protocol's: {error}") from None


def _refusal(response: http.client.HTTPResponse, content: bytes, deadline: Deadline) -> ServerError:
    code = grpc.StatusCode.__members__.get(response.getheader(_ERROR_CODE) or "")
    left = deadline.left()
    if code is not None:
        pass
    elif response.status == 503 and left is not None and left <= 0:
        code = grpc.StatusCode.DEADLINE_EXCEEDED
    elif response.status in _CODES:
        code = _CODES[response.status]
    else:
        known = 400 <= response.status < 500
        code = grpc.StatusCode.INVALID_ARGUMENT if known else grpc.StatusCode.INTERNAL
    try:
        message = str(json.loads(content)["error"])
    except (ValueError, TypeError, KeyError):
        message = f"the server answered {response.status} {response.reason}"
    try:
        wait = float(response.getheader("retry-after") or "")
    except ValueError:
        wait = -1.0
    return error_of(code, message, wait if math.isfinite(wait) and wait >= 0 else None)


def _outputs(content: bytes, header_length: Optional[str]) -> Message:
    """The answer to an inference."""
    length = len(content) if header_length is None else int(header_length)
    told = json.loads(content[:length])
    message = _wire.ModelInferResponse(
        model_name=told["model_name"], model_version=str(told.get("model_version", "")), id=told.get("id", "")
    )
    for key, value in (told.get("parameters") or {}).items():
        set_parameter(message.parameters[key], key, value)
    for output in told["outputs"]:
        tensor = message.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        own = dict(output.get("parameters") or {})
        size = own.pop("binary_data_size", None)
        for key, value in own.items():
            set_parameter(tensor.parameters[key], key, value)
        raw = b""
        if size is not None:
            raw = content[length : length + size]
            length += size
        elif "data" in output:
            raw = encode(as_datatype(output["data"], tensor.datatype), tensor.datatype)
        else:
            # Whoever asked for it knows where it is.
            tensor.parameters["shared_memory_region"].string_param = ""
        message.raw_output_contents.append(raw)
    return message
