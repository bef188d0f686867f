"""The service's calls: what is sent, and what their answers mean. Both clients share them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import (
    Any,
    Callable,
    Dict,
    Generic,
    Iterable,
    List,
    Mapping,
    Optional,
    Tuple,
    TypeVar,
    Union,
)

from . import _wire
from ._models import (
    IndexEntry,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
    config_from_message,
    index_from_message,
)
from ._timeline import Timeline, parse_server_timing
from ._wire import Message, Method

T = TypeVar("T")


@dataclass(frozen=True)
class Call(Generic[T]):
    """A call to make and how to read its answer."""

    method: Method
    request: Message
    read: Callable[[Message], T]


def server_live() -> Call[bool]:
    return Call(_wire.SERVER_LIVE, _wire.SERVER_LIVE.request(), lambda told: bool(told.live))


def server_ready() -> Call[bool]:
    return Call(_wire.SERVER_READY, _wire.SERVER_READY.request(), lambda told: bool(told.ready))


def model_ready(model: str, version: str) -> Call[bool]:
    request = _wire.MODEL_READY.request(name=model, version=version)
    return Call(_wire.MODEL_READY, request, lambda told: bool(told.ready))


def server_metadata() -> Call[ServerMetadata]:
    request = _wire.SERVER_METADATA.request()
    return Call(_wire.SERVER_METADATA, request, ServerMetadata.from_message)


def model_metadata(model: str, version: str) -> Call[ModelMetadata]:
    request = _wire.MODEL_METADATA.request(name=model, version=version)
    return Call(_wire.MODEL_METADATA, request, ModelMetadata.from_message)


def model_config(model: str, version: str) -> Call[Dict[str, Any]]:
    request = _wire.MODEL_CONFIG.request(name=model, version=version)
    return Call(_wire.MODEL_CONFIG, request, config_from_message)


def statistics(model: str, version: str) -> Call[List[ModelStatistics]]:
    request = _wire.MODEL_STATISTICS.request(name=model, version=version)
    return Call(
        _wire.MODEL_STATISTICS,
        request,
        lambda told: [ModelStatistics.from_message(stats) for stats in told.model_stats],
    )


def index(ready: bool) -> Call[List[IndexEntry]]:
    request = _wire.REPOSITORY_INDEX.request(ready=ready)
    return Call(_wire.REPOSITORY_INDEX, request, index_from_message)


def load(
    model: str, config: Union[str, Mapping[str, Any], None], files: Optional[Mapping[str, bytes]]
) -> Call[None]:
    request = _wire.REPOSITORY_MODEL_LOAD.request(model_name=model)
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        request.parameters["config"].string_param = text
    for path, content in (files or {}).items():
        request.parameters[f"file:{path}"].bytes_param = content
    return Call(_wire.REPOSITORY_MODEL_LOAD, request, lambda told: None)


def unload(model: str, dependents: bool) -> Call[None]:
    request = _wire.REPOSITORY_MODEL_UNLOAD.request(model_name=model)
    if dependents:
        request.parameters["unload_dependents"].bool_param = True
    return Call(_wire.REPOSITORY_MODEL_UNLOAD, request, lambda told: None)


def timeline(*metadata: Optional[Iterable[Tuple[str, Any]]]) -> Optional[Timeline]:
    """The cold start that an answer's headers or trailers tell of."""
    for pairs in metadata:
        for key, value in pairs or ():
            if key == "server-timing" and isinstance(value, str):
                return parse_server_timing(value)
    return None
