"""Requests and results between the protocol's messages and numpy arrays.

A tensor comes raw, as typed contents, or through a region of shared memory; it goes raw or through
shared memory. Raw tensors are views of the message's bytes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fornax.config.errors import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.grpc.contents import decode_contents
from fornax.serving.grpc.parameters import parameter_values, set_parameters
from fornax.serving.types import InferRequest, InferResult
from fornax.serving.v2.classify import classify
from fornax.serving.v2.datatypes import Raw, datatype_of, decode_raw, encode_raw, refuse
from fornax.serving.v2.parameters import (
    MAX_NAME,
    SharedSpan,
    check_shared,
    common_parameters,
    function_of,
    none_left,
    shared_span,
)
from fornax.serving.v2.shared_memory import Region, SharedMemory

__all__ = ["Delivery", "decode", "encode"]

_FINAL = "triton_enable_empty_final_response"


class Delivery(NamedTuple):
    """How a client wants an output, if not plainly."""

    classes: int
    """As this many classes, where it is not 0."""
    share: tuple[SharedSpan, Region] | None
    """In shared memory, where it is not None."""


def decode(
    message: Any, received: float, memory: SharedMemory, limits: Limits
) -> tuple[InferRequest, dict[str, Delivery]]:
    """The request in a ModelInferRequest, and what is wanted of outputs beside themselves.

    Raises:
      ServingError: a tensor that is not what its datatype and shape say, twice the same name, too
        many or too large tensors, a parameter that is not known or not of its type.
    """
    if max(len(message.id), len(message.model_name), len(message.model_version)) > MAX_NAME:
        raise refuse(f"id, model_name or model_version is longer than {MAX_NAME} characters")
    values = parameter_values(message.parameters) if message.parameters else {}
    # A request's last answer, or last piece of it, is never empty: nothing to switch on.
    if not isinstance(values.pop(_FINAL, False), bool):
        raise refuse(f"parameter {_FINAL} is true or false")
    common = common_parameters(values)
    inputs = _decode_inputs(message, memory, limits)
    outputs, deliveries = _decode_outputs(message.outputs, memory, limits)
    model, function = function_of(message.model_name, common.function)
    request = InferRequest(
        model=model,
        inputs=inputs,
        version=message.model_version,
        function=function,
        id=message.id,
        outputs=outputs,
        priority=common.priority,
        deadline=received + common.timeout if common.timeout else None,
        parameters=common.others,
        received=received,
    )
    return request, deliveries


def _decode_inputs(message: Any, memory: SharedMemory, limits: Limits) -> dict[str, np.ndarray]:
    raw = message.raw_input_contents
    if len(message.inputs) > limits.max_tensors:
        raise refuse(f"{len(message.inputs)} inputs; at most {limits.max_tensors} are allowed")
    inputs: dict[str, np.ndarray] = {}
    used, shared = 0, 0
    for tensor in message.inputs:
        name = tensor.name
        if name in inputs:
            raise refuse(f"input {name[:80]!r} was sent twice; send each input once")
        if tensor.parameters and (span := _span(tensor)):
            _no_contents(tensor, "in shared memory")
            _check_size(name, span.byte_size, limits)
            shared += span.byte_size
            check_shared(shared, limits.max_body_bytes)
            data: Raw = memory.get(span.region).read(span.offset, span.byte_size)
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
        raise ServingError(
            ServingCode.TOO_LARGE,
            f"input {name[:80]!r} has {size} bytes; at most {limits.max_tensor_bytes} are allowed",
        )


def _decode_outputs(
    outputs: Any, memory: SharedMemory, limits: Limits
) -> tuple[tuple[str, ...], dict[str, Delivery]]:
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
            deliveries[output.name] = _delivery(output, memory)
    return names, deliveries


def _delivery(output: Any, memory: SharedMemory) -> Delivery:
    what = f"output {output.name[:80]!r}"
    values = parameter_values(output.parameters)
    classes = values.pop("classification", 0)
    if type(classes) is not int or not 0 <= classes < 2**31:
        raise refuse(f"{what}: classification={str(classes)[:80]!r} is no number of classes")
    span = shared_span(what, values)
    none_left(what, values)
    if span is not None and classes:
        raise refuse(f"{what}: classification cannot go to shared memory")
    return Delivery(classes, None if span is None else (span, memory.get(span.region)))


def _span(tensor: Any) -> SharedSpan | None:
    """Where in shared memory an input lies."""
    what = f"input {tensor.name[:80]!r}"
    values = parameter_values(tensor.parameters)
    span = shared_span(what, values)
    none_left(what, values)
    return span


def encode(result: InferResult, deliveries: Mapping[str, Delivery], response: Any) -> Any:
    """Fill a ModelInferResponse with a result; outputs wanted in shared memory are put there.

    Raises:
      ServingError: an output does not fit its place, its region is gone, or it has no classes.
    """
    response.model_name, response.model_version = result.model, result.version
    response.id = result.id
    set_parameters(response.parameters, result.parameters)
    outputs, raw = response.outputs, response.raw_output_contents
    for name, array in result.outputs.items():
        delivery = deliveries.get(name) if deliveries else None
        if delivery and delivery.classes:
            array = classify(name, array, delivery.classes)
        tensor = outputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        data = encode_raw(array)
        if delivery and delivery.share:
            _share(name, data, *delivery.share, tensor.parameters)
            data = b""  # clients count on an entry for each output
        raw.append(data if isinstance(data, bytes) else bytes(data))
    return response


def _share(name: str, data: Raw, span: SharedSpan, region: Region, parameters: Any) -> None:
    """Put an output into shared memory, and say so in its parameters."""
    if len(data) > span.byte_size:
        raise refuse(
            f"output {name!r} has {len(data)} bytes; shared_memory_byte_size leaves it "
            f"{span.byte_size}"
        )
    region.write(span.offset, data)
    parameters["shared_memory_region"].string_param = span.region
    parameters["shared_memory_byte_size"].int64_param = len(data)
    if span.offset:
        parameters["shared_memory_offset"].int64_param = span.offset
