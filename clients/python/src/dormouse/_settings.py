"""Where a server is and how it is called."""

from __future__ import annotations

import math
import os
import ssl
import time
from dataclasses import dataclass
from typing import Callable, List, Mapping, Optional, Tuple, TypedDict, Union

import grpc

from ._retry import RetryPolicy, policy
from .errors import InvalidInput

Token = Union[str, Callable[[], str]]
"""A bearer token, or what gives one for each call: tokens may be renewed while a client lives."""


@dataclass(frozen=True)
class TLS:
    """Whom to trust and, for mutual TLS, who to be. Files in PEM."""

    #: The authorities to trust instead of the system's.
    ca_file: Union[str, os.PathLike[str], None] = None
    #: The client's own certificate and its key.
    cert_file: Union[str, os.PathLike[str], None] = None
    key_file: Union[str, os.PathLike[str], None] = None
    #: The name that the server's certificate is for, where the address has another.
    server_name: Optional[str] = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files, for gRPC."""
        self._check()
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_file),
            private_key=_read(self.key_file),
            certificate_chain=_read(self.cert_file),
        )

    def context(self) -> ssl.SSLContext:
        """Reads the files, for HTTP."""
        self._check()
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context

    def _check(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidInput("cert_file and key_file belong together")


def _read(path: Union[str, os.PathLike[str], None]) -> Optional[bytes]:
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()


class ClientOptions(TypedDict, total=False):
    """How a client calls its server."""

    #: Encrypt: the system's authorities with ``True``, others with `TLS`. ``grpcs://`` and ``https://``
    #: ask for it too.
    tls: Union[TLS, bool, None]
    #: Sent as ``Authorization: Bearer …``.
    token: Optional[Token]
    #: Seconds that a call may take, repetitions included; 300 unless set, ``None`` for ever.
    timeout: Optional[float]
    #: When refused calls are sent again; ``False`` for never.
    retry: Union[RetryPolicy, bool]
    #: Sent with every call.
    metadata: Optional[Mapping[str, str]]
    #: Of requests: ``gzip`` or ``deflate``.
    compression: Optional[str]
    #: Bytes of the largest message that is sent or accepted.
    max_message_size: int
    #: Compare inputs with the model's signature before sending; it is asked for once per model.
    check: bool


_COMPRESSION = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}


@dataclass(frozen=True)
class Settings:
    """Everything about a client but its connection."""

    target: str
    #: Over HTTP, not gRPC.
    http: bool
    tls: Optional[TLS]
    token: Optional[Token]
    timeout: Optional[float]
    retry: RetryPolicy
    metadata: Tuple[Tuple[str, str], ...]
    compression: Optional[grpc.Compression]
    max_message_size: int
    check: bool

    @classmethod
    def of(cls, url: str, options: ClientOptions) -> Settings:
        """Raises `InvalidInput` for what makes no sense, ``TypeError`` for an option there is not."""
        for option in options:
            if option not in ClientOptions.__annotations__:
                known = ", ".join(ClientOptions.__annotations__)
                raise TypeError(f"there is no option {option!r}; there are {known}")
        target, asks_tls, http = _target(url)
        tls = options.get("tls")
        if asks_tls and tls is False:
            raise InvalidInput(f"{url!r} asks for TLS, and tls=False forbids it")
        if tls is None:
            tls = asks_tls
        compression = options.get("compression")
        if compression is not None and compression not in _COMPRESSION:
            raise InvalidInput(f"compression {compression!r}: there are 'gzip' and 'deflate'")
        metadata = options.get("metadata") or {}
        return cls(
            target=target,
            http=http,
            tls=TLS() if tls is True else (tls or None),
            token=options.get("token"),
            timeout=_seconds(options.get("timeout", 300.0)),
            retry=policy(options.get("retry", True)),
            metadata=tuple((key.lower(), value) for key, value in metadata.items()),
            compression=None if compression is None else _COMPRESSION[compression],
            max_message_size=options.get("max_message_size", 2**31 - 1),
            check=options.get("check", True),
        )

    def channel_options(self) -> List[Tuple[str, Union[int, str]]]:
        """gRPC's own settings."""
        options: List[Tuple[str, Union[int, str]]] = [
            ("grpc.max_send_message_length", self.max_message_size),
            ("grpc.max_receive_message_length", self.max_message_size),
            # A server that is started anew is looked for soon.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options

    def call_metadata(self) -> Tuple[Tuple[str, str], ...]:
        """What is sent with every call."""
        metadata = self.metadata
        if self.token is not None:
            token = self.token() if callable(self.token) else self.token
            metadata += (("authorization", f"Bearer {token}"),)
        return metadata

    def deadline(self, timeout: Optional[float]) -> Deadline:
        """The deadline of a call that begins now."""
        return Deadline(self.timeout if timeout is None else _seconds(timeout))


class Deadline:
    """The moment until which a call and its repetitions may take."""

    def __init__(self, seconds: Optional[float]) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> Optional[float]:
        """Seconds that are left, none for ever."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def allows(self, wait: float) -> bool:
        """Whether there is time to wait so long and try again."""
        left = self.left()
        return left is None or wait < left


def _seconds(timeout: Optional[float]) -> Optional[float]:
    if timeout is None or timeout == math.inf:
        return None
    if math.isnan(timeout) or timeout < 0:
        raise InvalidInput(f"a timeout of {timeout} seconds")
    return timeout


def _target(url: str) -> Tuple[str, bool, bool]:
    """The address that is called, whether it asks for TLS, and whether it is HTTP's."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url:
            raise InvalidInput("the address is empty; expected HOST:PORT")
        return url, False, False
    rest = rest.rstrip("/")
    if scheme in ("unix", "dns", "ipv4", "ipv6"):
        return url, False, False
    if scheme not in ("grpc", "http", "grpcs", "https"):
        raise InvalidInput(
            f"{url!r}: {scheme}:// is not spoken here; expected HOST:PORT, grpc://, grpcs://, http:// or https://"
        )
    if not rest or "/" in rest or "@" in rest:
        raise InvalidInput(f"{url!r}: expected {scheme}://HOST:PORT")
    return rest, scheme in ("grpcs", "https"), scheme in ("http", "https")
