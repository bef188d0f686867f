"""One answer."""

from __future__ import annotations

from typing import Any, Dict, Iterator, Mapping, Optional, Union

from google.protobuf import json_format

from ._request import Parameter
from ._tensors import Array, decode, decode_contents
from ._timeline import Timeline
from ._wire import Message
from .errors import ProtocolError


class InferResult(Mapping[str, Array]):
    """An answer: the outputs by name, as numpy arrays.

    ``as_numpy``, ``get_output`` and ``get_response`` are those of ``tritonclient``'s
    ``InferResult``. Arrays of fixed-size elements are read-only views of the answer: ``.copy()``
    one to change it.
    """

    def __init__(self, response: Message, timeline: Optional[Timeline] = None) -> None:
        self._response = response
        self._timeline = timeline
        self._places = {output.name: i for i, output in enumerate(response.outputs)}
        self._arrays: Dict[str, Array] = {}
        raw = len(response.raw_output_contents)
        if raw and raw != len(response.outputs):
            raise ProtocolError(
                f"the answer names {len(response.outputs)} outputs and has the bytes of {raw}"
            )

    @property
    def model_name(self) -> str:
        """The model that answered."""
        return str(self._response.model_name)

    @property
    def model_version(self) -> str:
        """The version that answered."""
        return str(self._response.model_version)

    @property
    def id(self) -> str:
        """The request's id."""
        return str(self._response.id)

    @property
    def parameters(self) -> Dict[str, Parameter]:
        """What the server says beside the outputs."""
        return {
            key: getattr(value, value.WhichOneof("parameter_choice") or "bool_param")
            for key, value in self._response.parameters.items()
        }

    @property
    def final(self) -> bool:
        """On a stream: whether this is the last answer to its request, as far as the server tells."""
        return bool(self.parameters.get("triton_final_response", True))

    @property
    def timeline(self) -> Optional[Timeline]:
        """How the time was spent if the model had to wake for this request; none if it was awake."""
        return self._timeline

    def __getitem__(self, name: str) -> Array:
        array = self._arrays.get(name)
        if array is None:
            place = self._places[name]
            output = self._response.outputs[place]
            shape = tuple(output.shape)
            if "shared_memory_region" in output.parameters:
                raise KeyError(f"{name} is in shared memory")
            if self._response.raw_output_contents:
                raw = self._response.raw_output_contents[place]
                array = decode(name, output.datatype, shape, raw)
            else:
                array = decode_contents(name, output.datatype, shape, output.contents)
            self._arrays[name] = array
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        outputs = ", ".join(
            f"{output.name}: {output.datatype}{list(output.shape)}" for output in self._response.outputs
        )
        return f"<InferResult of {self.model_name} {self.model_version}: {outputs}>"

    def as_numpy(self, name: str) -> Optional[Array]:
        """An output as an array, none when the answer does not have it."""
        return self.get(name)

    def get_output(self, name: str, as_json: bool = False) -> Any:
        """An output as its message, or as a dictionary; none when the answer does not have it."""
        place = self._places.get(name)
        if place is None:
            return None
        output = self._response.outputs[place]
        return _dictionary(output) if as_json else output

    def get_response(self, as_json: bool = False) -> Union[Message, Dict[str, Any]]:
        """The whole answer as its message, or as a dictionary."""
        return _dictionary(self._response) if as_json else self._response

    def to_triton(self) -> Any:
        """The same answer as ``tritonclient``'s own ``InferResult``, if that is installed."""
        from tritonclient.grpc import InferResult as TritonResult
        from tritonclient.grpc import service_pb2

        message = service_pb2.ModelInferResponse.FromString(self._response.SerializeToString())
        return TritonResult(message)


def _dictionary(message: Message) -> Dict[str, Any]:
    told: Dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return told
