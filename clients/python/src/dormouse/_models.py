"""What a server says about itself, its models and its repository."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from google.protobuf import json_format

from ._timeline import Timeline, from_message
from ._wire import Message


@dataclass(frozen=True)
class ServerMetadata:
    """Who the server is and what it can do beyond the protocol's core."""

    name: str
    version: str
    extensions: Tuple[str, ...]

    @classmethod
    def from_message(cls, told: Message) -> ServerMetadata:
        return cls(told.name, told.version, tuple(told.extensions))


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model; -1 stands for a dimension of any size."""

    name: str
    datatype: str
    shape: Tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.datatype}{list(self.shape)}"


@dataclass(frozen=True)
class ModelMetadata:
    """A model's versions and signature."""

    name: str
    versions: Tuple[str, ...]
    platform: str
    inputs: Tuple[TensorSpec, ...]
    outputs: Tuple[TensorSpec, ...]
    properties: Mapping[str, str]

    def input(self, name: str) -> Optional[TensorSpec]:
        """The input of this name, none when there is no such input."""
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> Optional[TensorSpec]:
        """The output of this name, none when there is no such output."""
        return next((spec for spec in self.outputs if spec.name == name), None)

    @classmethod
    def from_message(cls, told: Message) -> ModelMetadata:
        def specs(tensors: Any) -> Tuple[TensorSpec, ...]:
            return tuple(TensorSpec(t.name, t.datatype, tuple(t.shape)) for t in tensors)

        return cls(
            name=told.name,
            versions=tuple(told.versions),
            platform=told.platform,
            inputs=specs(told.inputs),
            outputs=specs(told.outputs),
            properties=dict(told.properties),
        )


@dataclass(frozen=True)
class IndexEntry:
    """One version of a model in the repository."""

    name: str
    version: str
    #: ``READY``, ``UNAVAILABLE``, ``LOADING``, ``UNLOADING`` or ``UNKNOWN``.
    state: str
    #: Why, or ``asleep`` for a model that wakes when it is called.
    reason: str

    @property
    def ready(self) -> bool:
        """Whether it can be called."""
        return self.state == "READY"


@dataclass(frozen=True)
class Total:
    """How often something happened and how long it took in all, in seconds."""

    count: int
    seconds: float

    @classmethod
    def from_message(cls, told: Message) -> Total:
        return cls(told.count, told.ns / 1e9)


@dataclass(frozen=True)
class BatchStatistics:
    """The runs of one batch size."""

    batch_size: int
    compute_input: Total
    compute_infer: Total
    compute_output: Total


@dataclass(frozen=True)
class ModelStatistics:
    """What one version of a model has done since the server started."""

    name: str
    version: str
    last_inference: Optional[datetime.datetime]
    inference_count: int
    execution_count: int
    success: Total
    fail: Total
    queue: Total
    compute_input: Total
    compute_infer: Total
    compute_output: Total
    batches: Tuple[BatchStatistics, ...]
    #: The latest cold starts, the last one last; empty when the server does not tell.
    cold_starts: Tuple[Timeline, ...]

    @classmethod
    def from_message(cls, told: Message) -> ModelStatistics:
        stats = told.inference_stats
        last = None
        if told.last_inference:
            last = datetime.datetime.fromtimestamp(told.last_inference / 1e3, tz=datetime.timezone.utc)
        return cls(
            name=told.name,
            version=told.version,
            last_inference=last,
            inference_count=told.inference_count,
            execution_count=told.execution_count,
            success=Total.from_message(stats.success),
            fail=Total.from_message(stats.fail),
            queue=Total.from_message(stats.queue),
            compute_input=Total.from_message(stats.compute_input),
            compute_infer=Total.from_message(stats.compute_infer),
            compute_output=Total.from_message(stats.compute_output),
            batches=tuple(
                BatchStatistics(
                    batch.batch_size,
                    Total.from_message(batch.compute_input),
                    Total.from_message(batch.compute_infer),
                    Total.from_message(batch.compute_output),
                )
                for batch in told.batch_stats
            ),
            cold_starts=tuple(from_message(cold) for cold in told.cold_starts),
        )


def index_from_message(told: Message) -> List[IndexEntry]:
    """The repository's models as the server lists them."""
    return [IndexEntry(m.name, m.version, m.state, m.reason) for m in told.models]


def config_from_message(told: Message) -> Dict[str, Any]:
    """A model's whole configuration under the names of ``config.pbtxt``."""
    config: Dict[str, Any] = json_format.MessageToDict(told.config, preserving_proto_field_name=True)
    return config
