"""Requests and results between the protocol's messages and numpy arrays.

A tensor comes raw, as typed contents, or through a region of shared memory; it goes raw or through
shared memory. Raw tensors are views of the message's bytes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fornax.serving.access import Limits
from fornax.serving.grpc.contents import decode_contents
from fornax.serving.grpc.messages import METHODS
from fornax.serving.types import InferRequest, InferResult
from fornax.serving.v2.classify import classify
from fornax.serving.v2.datatypes import Raw, datatype_of, decode_raw, encode_raw, refuse
from fornax.serving.v2.parameters import read_options
from fornax.serving.v2.shared_memory import SharedMemory

__all__ = ["Delivery", "Place", "decode", "encode", "parameter_values"]

_Response = METHODS["ModelInfer"].response
_REGION = "shared_memory_region"
_SIZE = "shared_memory_byte_size"
_OFFSET = "shared_memory_offset"


class Place(NamedTuple):
    """Where in shared memory a tensor lies."""

    region: str
    byte_size: int
    offset: int


class Delivery(NamedTuple):
    """What a client wants of an output, beside itself."""

    classes: int
    """As this many classes, where it is not 0."""
    place: Place | None
    """In shared memory, where it is not None."""


def parameter_values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a map of the protocol's parameters; ServingError for one without a value."""
    values = {}
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise refuse(f"parameter {key[:80]!r} has no value; give it one, or leave it out")
        values[key] = getattr(parameter, kind)
    return values


def decode(
    message: Any, received: float, memory: SharedMemory, limits: Limits
) -> tuple[InferRequest, dict[str, Delivery]]:
    """The request in a ModelInferRequest, and what is wanted of outputs beside themselves.

    Raises:
      ServingError: a tensor that is not what its datatype and shape say, twice the same name, too
        many or too large tensors, a parameter that is not known or not of its type.
    """
    options = read_options(parameter_values(message.parameters), received)
    inputs = _decode_inputs(message, memory, limits)
    outputs, deliveries = _decode_outputs(message.outputs, limits)
    request = InferRequest(
        model=message.model_name,
        inputs=inputs,
        version=message.model_version,
        function=options.function,
        id=message.id,
        outputs=outputs,
        priority=options.priority,
        deadline=options.deadline,
        parameters=options.parameters,
        received=received,
    )
    return request, deliveries


def _decode_inputs(message: Any, memory: SharedMemory, limits: Limits) -> dict[str, np.ndarray]:
    raw = message.raw_input_contents
    if len(message.inputs) > limits.max_tensors:
        raise refuse(f"{len(message.inputs)} inputs; at most {limits.max_tensors} are allowed")
    inputs: dict[str, np.ndarray] = {}
    used = 0
    for tensor in message.inputs:
        name = tensor.name
        if name in inputs:
            raise refuse(f"input {name[:80]!r} was sent twice; send each input once")
        if tensor.parameters and (source := _source(tensor)):
            _no_contents(tensor, "in shared memory")
            _check_size(name, source.byte_size, limits)
            data: Raw = memory.get(source.region).read(source.offset, source.byte_size)
        elif raw:
            _no_contents(tensor, "in raw_input_contents")
            if used == len(raw):
                raise refuse(
                    f"input {name[:80]!r} has no entry in raw_input_contents, which has {used}; "
                    "every input that is not in shared memory needs one, in the inputs' order"
                )
            data = raw[used]
            used += 1
            _check_size(name, len(data), limits)
        else:
            inputs[name] = decode_contents(tensor, limits.max_tensor_bytes)
            continue
        inputs[name] = decode_raw(name, tensor.datatype, tuple(tensor.shape), data)
    if used != len(raw):
        raise refuse(
            f"raw_input_contents has {len(raw)} entries where {used} inputs take one; send as many "
            "as there are inputs outside of shared memory"
        )
    return inputs


def _no_contents(tensor: Any, where: str) -> None:
    if tensor.HasField("contents") and tensor.contents.ListFields():
        raise refuse(
            f"input {tensor.name[:80]!r} has contents beside data {where}; send its data once"
        )


def _check_size(name: str, size: int, limits: Limits) -> None:
    if size > limits.max_tensor_bytes:
        raise refuse(
            f"input {name[:80]!r} has {size} bytes; at most {limits.max_tensor_bytes} are allowed"
        )


def _decode_outputs(outputs: Any, limits: Limits) -> tuple[tuple[str, ...], dict[str, Delivery]]:
    if not outputs:
        return (), {}
    if len(outputs) > limits.max_tensors:
        raise refuse(f"{len(outputs)} outputs; at most {limits.max_tensors} are allowed")
    names = tuple(output.name for output in outputs)
    if len(set(names)) != len(names):
        raise refuse("an output is asked for twice; ask for each output once")
    deliveries: dict[str, Delivery] = {}
    for output in outputs:
        if output.parameters:
            values = parameter_values(output.parameters)
            classes = values.pop("classification", 0)
            if type(classes) is not int or not 0 <= classes < 2**31:
                raise refuse(
                    f"output {output.name[:80]!r}: classification={str(classes)[:80]!r} is no "
                    "number of classes; give an integer from 1"
                )
            deliveries[output.name] = Delivery(classes, _place(output.name, values))
    return names, deliveries


def _source(tensor: Any) -> Place | None:
    return _place(tensor.name, parameter_values(tensor.parameters))


def _place(name: str, values: dict[str, Any]) -> Place | None:
    """The place in shared memory that a tensor's parameters name."""
    region = values.pop(_REGION, None)
    size, offset = values.pop(_SIZE, None), values.pop(_OFFSET, 0)
    if values:
        raise refuse(
            f"tensor {name[:80]!r}: parameter {min(values)[:80]!r} is not known; a tensor's are "
            f"{_REGION}, {_SIZE} and {_OFFSET}, and an output's classification"
        )
    if region is None and size is None and not offset:
        return None
    if not isinstance(region, str) or type(size) is not int or type(offset) is not int:
        raise refuse(
            f"tensor {name[:80]!r}: shared memory takes {_REGION} (a string), {_SIZE} and "
            f"{_OFFSET} (integers)"
        )
    if size < 0 or offset < 0:
        raise refuse(f"tensor {name[:80]!r}: {_SIZE}={size} and {_OFFSET}={offset} count from 0")
    return Place(region, size, offset)


def encode(result: InferResult, deliveries: Mapping[str, Delivery], memory: SharedMemory) -> Any:
    """The ModelInferResponse of a result; outputs with a place in shared memory are written there.

    Raises:
      ServingError: an output does not fit its place, its region is gone, or it has no classes.
    """
    response = _Response(model_name=result.model, model_version=result.version, id=result.id)
    for key, value in result.parameters.items():
        _set_parameter(response.parameters[key], value)
    outputs, raw = response.outputs, response.raw_output_contents
    for name, array in result.outputs.items():
        delivery = deliveries.get(name)
        if delivery and delivery.classes:
            array = classify(name, array, delivery.classes)
        tensor = outputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        data = encode_raw(array)
        if delivery and (place := delivery.place):
            _write(name, place, data, memory)
            tensor.parameters[_REGION].string_param = place.region
            tensor.parameters[_SIZE].int64_param = len(data)
            tensor.parameters[_OFFSET].int64_param = place.offset
            data = b""  # each output has its entry, as clients count them
        raw.append(data if isinstance(data, bytes) else bytes(data))
    return response


def _write(name: str, place: Place, data: Raw, memory: SharedMemory) -> None:
    size = memoryview(data).nbytes
    if size > place.byte_size:
        raise refuse(
            f"output {name!r} has {size} bytes, of which {place.byte_size} fit the place in shared "
            f"memory region {place.region!r}; give it {_SIZE} of at least {size}"
        )
    memory.get(place.region).write(place.offset, data)


def _set_parameter(parameter: Any, value: Any) -> None:
    for kind, setter in _SETTERS:
        if isinstance(value, kind):
            setter(parameter, value)
            return
    parameter.string_param = str(value)


def _integer(parameter: Any, value: int) -> None:
    if value < 2**63:
        parameter.int64_param = value
    else:
        parameter.uint64_param = value


_SETTERS: tuple[tuple[type, Callable[[Any, Any], None]], ...] = (
    (bool, lambda parameter, value: setattr(parameter, "bool_param", value)),
    (int, _integer),
    (float, lambda parameter, value: setattr(parameter, "double_param", value)),
)
