"""One request: what is asked, checked against the model's signature, as a message."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import (
    Any,
    Dict,
    Iterable,
    Mapping,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    TypedDict,
    Union,
)

import numpy as np

from . import _wire
from ._models import ModelMetadata, TensorSpec
from ._tensors import Array, as_datatype, datatype_of, encode, is_array, numpy_dtype
from ._wire import Message
from .errors import InvalidInput

Parameter = Union[bool, int, float, str]


class TritonInput(Protocol):
    """What ``tritonclient``'s ``InferInput`` has, over gRPC or HTTP."""

    def name(self) -> str: ...
    def datatype(self) -> str: ...
    def _get_tensor(self) -> Any: ...


class TritonOutput(Protocol):
    """What ``tritonclient``'s ``InferRequestedOutput`` has, over gRPC or HTTP."""

    def name(self) -> str: ...
    def _get_tensor(self) -> Any: ...


Inputs = Union[Mapping[str, Any], Sequence[TritonInput]]
"""Arrays by name, or ``tritonclient``'s ``InferInput`` objects."""

Outputs = Iterable[Union[str, TritonOutput]]
"""Names, or ``tritonclient``'s ``InferRequestedOutput`` objects."""


class RequestOptions(TypedDict, total=False):
    """What a request may say beside its model and inputs."""

    #: The outputs to answer; all of them unless set.
    outputs: Optional[Outputs]
    #: The model's version; the server's choice unless set.
    version: str
    #: Comes back with the answer.
    id: str
    #: The place in the model's queue, for models with priority levels: 1 is the highest.
    priority: int
    #: Seconds the request may wait in the model's queue, if the model allows setting it.
    queue_timeout: float
    #: Makes the request a part of a sequence. It is then never sent twice.
    sequence_id: Union[int, str]
    sequence_start: bool
    sequence_end: bool
    #: On a stream, asks for an empty last answer that says that there are no more.
    empty_final_response: bool
    #: For the server or the model.
    parameters: Mapping[str, Parameter]


@dataclass(frozen=True)
class Request:
    """A request before it is checked and sent."""

    model: str
    inputs: Inputs
    outputs: Optional[Outputs] = None
    version: str = ""
    id: str = ""
    priority: Optional[int] = None
    queue_timeout: Optional[float] = None
    sequence_id: Union[int, str, None] = None
    sequence_start: bool = False
    sequence_end: bool = False
    empty_final_response: bool = False
    parameters: Mapping[str, Parameter] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, model: str, inputs: Inputs, options: RequestOptions) -> Request:
        """Raises ``TypeError`` for an option that there is not."""
        known = RequestOptions.__annotations__
        for option in options:
            if option not in known:
                raise TypeError(f"there is no option {option!r}; there are {', '.join(known)}")
        outputs = options.get("outputs")
        if isinstance(outputs, str):
            raise TypeError("outputs takes a list of names, not one name")
        request = cls(model, inputs, **options)
        # Gone through once for each attempt to make a message: a generator would be empty then.
        return request if outputs is None else dataclasses.replace(request, outputs=tuple(outputs))

    @property
    def in_sequence(self) -> bool:
        """Whether the model would see a difference if this arrived twice."""
        return self.sequence_id is not None or "sequence_id" in self.parameters

    def message(self, signature: Optional[ModelMetadata]) -> Message:
        """The message to send; raises `InvalidInput` where it does not fit ``signature``."""
        message = _wire.ModelInferRequest(model_name=self.model, model_version=self.version, id=self.id)
        for key, value in self._parameters().items():
            set_parameter(message.parameters[key], key, value)
        self._add_inputs(message, signature)
        for output in self.outputs or ():
            message.outputs.append(_output(self.model, output, signature))
        return message

    def _parameters(self) -> Dict[str, Parameter]:
        parameters: Dict[str, Parameter] = dict(self.parameters)
        if self.priority is not None:
            parameters["priority"] = self.priority
        if self.queue_timeout is not None:
            parameters["timeout"] = round(self.queue_timeout * 1e6)
        if self.sequence_id is not None:
            parameters["sequence_id"] = self.sequence_id
            parameters["sequence_start"] = self.sequence_start
            parameters["sequence_end"] = self.sequence_end
        if self.empty_final_response:
            parameters["triton_enable_empty_final_response"] = True
        return parameters

    def _add_inputs(self, message: Message, signature: Optional[ModelMetadata]) -> None:
        if isinstance(self.inputs, Mapping):
            for name, value in self.inputs.items():
                spec = None if signature is None else _spec(self.model, name, signature)
                tensor, raw = _tensor(self.model, name, value, spec)
                message.inputs.append(tensor)
                message.raw_input_contents.append(raw)
            return
        for given in self.inputs:
            if not hasattr(given, "_get_tensor"):
                raise InvalidInput(
                    "inputs are a dictionary of arrays by name, or a list of tritonclient's "
                    f"InferInput objects; this list has a {type(given).__name__}"
                )
            tensor, content = _from_triton(given)
            if signature is not None:
                spec = _spec(self.model, tensor.name, signature)
                _check(self.model, spec, tensor.datatype, tuple(tensor.shape))
            message.inputs.append(tensor)
            # Inputs in shared memory have no bytes of their own here.
            if content is not None:
                message.raw_input_contents.append(content)


def _spec(model: str, name: str, signature: ModelMetadata) -> TensorSpec:
    spec = signature.input(name)
    if spec is None:
        names = ", ".join(spec.name for spec in signature.inputs) or "no inputs"
        raise InvalidInput(f"model {model!r} has no input {name!r}; it has {names}")
    return spec


def _tensor(model: str, name: str, value: Any, spec: Optional[TensorSpec]) -> Tuple[Message, bytes]:
    array, datatype = _array(model, name, value, spec)
    if spec is not None:
        _check(model, spec, datatype, array.shape)
    tensor = _wire.InferInputTensor(name=name, datatype=datatype, shape=array.shape)
    try:
        return tensor, encode(array, datatype)
    except InvalidInput as error:
        raise InvalidInput(f"input {name!r} of model {model!r}: {error}") from None


def _array(model: str, name: str, value: Any, spec: Optional[TensorSpec]) -> Tuple[Array, str]:
    """The value as an array and its datatype. Lists become what the model wants, arrays stay as
    they are: whoever made one chose its type."""
    if spec is not None and not is_array(value):
        try:
            return as_datatype(value, spec.datatype), spec.datatype
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidInput(f"input {name!r} of model {model!r} is {spec.datatype}: {error}") from None
    try:
        array: Array = np.asarray(value)
    except ValueError as error:
        raise InvalidInput(f"input {name!r} of model {model!r} is no array: {error}") from None
    datatype = datatype_of(array.dtype)
    if datatype is None:
        raise InvalidInput(
            f"input {name!r} of model {model!r} is an array of {array.dtype}, "
            "which the protocol does not have"
        )
    if spec is not None and spec.datatype == "BF16" and datatype == "UINT16":
        return array, "BF16"
    return array, datatype


def _check(model: str, spec: TensorSpec, datatype: str, shape: Tuple[int, ...]) -> None:
    if datatype != spec.datatype:
        wanted = numpy_dtype(spec.datatype)
        raise InvalidInput(
            f"input {spec.name!r} of model {model!r} is {spec.datatype}, given {datatype}: "
            f"convert it to numpy's {wanted.name}"
        )
    fits = len(shape) == len(spec.shape) and all(
        wanted in (-1, found) for wanted, found in zip(spec.shape, shape)
    )
    if not fits:
        raise InvalidInput(
            f"input {spec.name!r} of model {model!r} has the shape {list(spec.shape)}, given {list(shape)}"
        )


def _output(model: str, given: Union[str, TritonOutput], signature: Optional[ModelMetadata]) -> Message:
    if isinstance(given, str):
        output = _wire.InferRequestedOutputTensor(name=given)
    else:
        output = _triton_message(given._get_tensor(), _wire.InferRequestedOutputTensor)
    if signature is not None and signature.outputs and signature.output(output.name) is None:
        names = ", ".join(spec.name for spec in signature.outputs)
        raise InvalidInput(f"model {model!r} has no output {output.name!r}; it has {names}")
    return output


def _from_triton(given: TritonInput) -> Tuple[Message, Optional[bytes]]:
    """An ``InferInput`` of ``tritonclient.grpc`` or ``tritonclient.http``: tensor and bytes."""
    told = given._get_tensor()
    tensor = _triton_message(told, _wire.InferInputTensor)
    if "shared_memory_region" in tensor.parameters:
        return tensor, None
    content = getattr(given, "_get_content", None) or getattr(given, "_get_binary_data", None)
    raw = content() if callable(content) else None
    if raw is None and isinstance(told, dict) and told.get("data") is not None:
        # Of `set_data_from_numpy(…, binary_data=False)`: JSON's values, flat.
        array = as_datatype(told["data"], tensor.datatype)
        raw = encode(array, tensor.datatype)
    if raw is None:
        raise InvalidInput(f"input {tensor.name!r} has no data: call set_data_from_numpy first")
    return tensor, bytes(raw)


def _triton_message(told: Any, kind: Message) -> Message:
    """A tensor of ``tritonclient``'s as ours: its messages are the same on the wire, or JSON."""
    if not isinstance(told, dict):
        return kind.FromString(told.SerializeToString())
    message = kind(name=told["name"])
    if "datatype" in told:
        message.datatype = told["datatype"]
        message.shape.extend(told["shape"])
    for key, value in (told.get("parameters") or {}).items():
        if not key.startswith("binary_data"):
            set_parameter(message.parameters[key], key, value)
    return message


_UNSIGNED = ("priority", "sequence_id")


def set_parameter(into: Message, key: str, value: Parameter) -> None:
    """Sets a parameter of a request by the type of its value."""
    if isinstance(value, bool):
        into.bool_param = value
    elif isinstance(value, (int, np.integer)):
        number = int(value)
        if not -(1 << 63) <= number < 1 << 64:
            raise InvalidInput(f"parameter {key!r} is {number}, which takes more than 64 bits")
        if number >= 1 << 63 or (key in _UNSIGNED and number >= 0):
            into.uint64_param = number
        else:
            into.int64_param = number
    elif isinstance(value, (float, np.floating)):
        into.double_param = float(value)
    elif isinstance(value, str):
        into.string_param = value
    else:
        raise InvalidInput(
            f"parameter {key!r} is of type {type(value).__name__}; there are bool, int, float and str"
        )
