"""The protocol's messages and methods.

They are built from the descriptors beside this file in a pool of their own. Generated modules would
enter the process-wide pool, where another client of the same protocol (``tritonclient``,
``kserve``) may already have registered messages of the same names, and would tie the package to one
release of the protobuf runtime.
"""

from __future__ import annotations

import pkgutil
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"

Message = Any
"""A protobuf message or message class: their fields are checked when they are set, not before."""


def _pool() -> Any:
    described = pkgutil.get_data(__package__ or "dormouse", "inference.binpb")
    if described is None:
        raise ImportError("the package has lost its file inference.binpb: install it again")
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(described).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL: Any = _pool()


def message(name: str) -> Message:
    """The class of the message ``name`` of the package ``inference``."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{name}"))


ModelInferRequest = message("ModelInferRequest")
ModelInferResponse = message("ModelInferResponse")
ModelStreamInferResponse = message("ModelStreamInferResponse")
InferInputTensor = message("ModelInferRequest.InferInputTensor")
InferRequestedOutputTensor = message("ModelInferRequest.InferRequestedOutputTensor")


def _status_details() -> Any:
    """``google.rpc.Status`` and ``RetryInfo``, as far as they are needed: their generated modules
    are in a package that nothing else here needs."""
    file = descriptor_pb2.FileDescriptorProto(name="dormouse/status.proto", package="status", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    for name, fields in {
        "Detail": [("type_url", 1, field.TYPE_STRING, ""), ("value", 2, field.TYPE_BYTES, "")],
        "Status": [("details", 3, field.TYPE_MESSAGE, "Detail")],
        "Delay": [("seconds", 1, field.TYPE_INT64, ""), ("nanos", 2, field.TYPE_INT32, "")],
        "RetryInfo": [("delay", 1, field.TYPE_MESSAGE, "Delay")],
    }.items():
        described = file.message_type.add(name=name)
        for field_name, number, kind, of in fields:
            repeated = field_name == "details"
            described.field.add(
                name=field_name,
                number=number,
                type=kind,
                type_name=f".status.{of}" if of else None,
                label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


_STATUS_POOL: Any = _status_details()
Status: Message = message_factory.GetMessageClass(_STATUS_POOL.FindMessageTypeByName("status.Status"))
RetryInfo: Message = message_factory.GetMessageClass(_STATUS_POOL.FindMessageTypeByName("status.RetryInfo"))


class Method:
    """One call of the service: its path on the wire and its messages."""

    def __init__(self, name: str) -> None:
        found = _POOL.FindServiceByName(SERVICE).FindMethodByName(name)
        self.path = f"/{SERVICE}/{name}"
        self.request: Message = message_factory.GetMessageClass(found.input_type)
        self.response: Message = message_factory.GetMessageClass(found.output_type)


SERVER_LIVE = Method("ServerLive")
SERVER_READY = Method("ServerReady")
MODEL_READY = Method("ModelReady")
SERVER_METADATA = Method("ServerMetadata")
MODEL_METADATA = Method("ModelMetadata")
MODEL_CONFIG = Method("ModelConfig")
MODEL_STATISTICS = Method("ModelStatistics")
MODEL_INFER = Method("ModelInfer")
MODEL_STREAM_INFER = Method("ModelStreamInfer")
REPOSITORY_INDEX = Method("RepositoryIndex")
REPOSITORY_MODEL_LOAD = Method("RepositoryModelLoad")
REPOSITORY_MODEL_UNLOAD = Method("RepositoryModelUnload")

UNARY = (
    SERVER_LIVE,
    SERVER_READY,
    MODEL_READY,
    SERVER_METADATA,
    MODEL_METADATA,
    MODEL_CONFIG,
    MODEL_STATISTICS,
    MODEL_INFER,
    REPOSITORY_INDEX,
    REPOSITORY_MODEL_LOAD,
    REPOSITORY_MODEL_UNLOAD,
)
