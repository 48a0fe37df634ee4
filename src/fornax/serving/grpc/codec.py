"""Requests and results between the protocol's messages and numpy arrays.

A tensor comes raw, as typed contents, or through a region of shared memory; it goes raw or through
shared memory. Raw tensors are views of the message's bytes.
"""

from collections.abc import Mapping, MutableMapping, Sequence

import numpy as np

from fornax.config.errors import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.grpc import inference_pb2 as pb
from fornax.serving.types import InferRequest, InferResult
from fornax.serving.v2.datatypes import (
    Raw,
    count,
    datatype_of,
    decode_raw,
    dtype_of,
    encode_raw,
    refuse,
)
from fornax.serving.v2.parameters import (
    MAX_NAME,
    OutputOptions,
    SharedSpan,
    check_shared,
    common_parameters,
    function_of,
    none_left,
    output_options,
    shared_span,
)
from fornax.serving.v2.response import classify
from fornax.serving.v2.shared_memory import SharedMemory

__all__ = ["decode", "encode", "parameter_values", "set_parameters"]

_FINAL = "triton_enable_empty_final_response"
_CONTENTS: dict[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of InferTensorContents for each datatype."""

_Input = pb.ModelInferRequest.InferInputTensor
_Output = pb.ModelInferRequest.InferRequestedOutputTensor
Value = bool | int | float | str | bytes
"""A parameter's value."""
_Parameter = pb.InferParameter | pb.ModelRepositoryParameter | pb.LogSettingsRequest.SettingValue


def decode(
    message: pb.ModelInferRequest, received: float, memory: SharedMemory, limits: Limits
) -> tuple[InferRequest, dict[str, OutputOptions]]:
    """The request in a ModelInferRequest, and the options of its outputs, by name.

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
    outputs, options_by_output = _decode_outputs(message.outputs, memory, limits)
    model, function = function_of(message.model_name, common.function)
    request = InferRequest(
        model=model,
        inputs=inputs,
        version=message.model_version,
        function=function,
        id=message.id,
        outputs=outputs,
        priority=common.priority,
        deadline=common.deadline(received, limits.request_timeout),
        parameters=common.others,
        received=received,
    )
    return request, options_by_output


def _decode_inputs(
    message: pb.ModelInferRequest, memory: SharedMemory, limits: Limits
) -> dict[str, np.ndarray]:
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
            inputs[name] = _decode_contents(tensor, limits.max_tensor_bytes)
            continue
        inputs[name] = decode_raw(name, tensor.datatype, tuple(tensor.shape), data)
    if used != len(raw):
        raise refuse(
            f"raw_input_contents has {len(raw)} entries where {used} inputs take one; send as many "
            "as there are inputs outside of shared memory"
        )
    return inputs


def _no_contents(tensor: _Input, where: str) -> None:
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
    outputs: Sequence[_Output], memory: SharedMemory, limits: Limits
) -> tuple[tuple[str, ...], dict[str, OutputOptions]]:
    if not outputs:
        return (), {}
    if len(outputs) > limits.max_tensors:
        raise refuse(f"{len(outputs)} outputs; at most {limits.max_tensors} are allowed")
    names = tuple(output.name for output in outputs)
    if len(set(names)) != len(names):
        raise refuse("an output is asked for twice; ask for each output once")
    return names, {
        each.name: output_options(
            f"output {each.name[:80]!r}", parameter_values(each.parameters), memory
        )
        for each in outputs
        if each.parameters
    }


def _span(tensor: _Input) -> SharedSpan | None:
    """The span of shared memory that an input is in; None: it is in the message."""
    what = f"input {tensor.name[:80]!r}"
    values = parameter_values(tensor.parameters)
    span = shared_span(what, values)
    none_left(what, values)
    return span


def encode(
    result: InferResult,
    options_by_output: Mapping[str, OutputOptions],
    response: pb.ModelInferResponse | None = None,
) -> pb.ModelInferResponse:
    """Fill a ModelInferResponse with a result; outputs wanted in shared memory are put there.

    Raises:
      ServingError: an output does not fit its place, its region is gone, or it has no classes.
    """
    response = pb.ModelInferResponse() if response is None else response
    response.model_name, response.model_version = result.model, result.version
    response.id = result.id
    set_parameters(response.parameters, result.parameters)
    outputs, raw = response.outputs, response.raw_output_contents
    for name, array in result.outputs.items():
        options = options_by_output.get(name) if options_by_output else None
        if options and options.classes:
            array = classify(name, array, options.classes)
        tensor = outputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        data = encode_raw(array)
        if options and options.span:
            set_parameters(tensor.parameters, options.share(name, data))
            data = b""  # clients count on an entry for each output
        raw.append(data if isinstance(data, bytes) else bytes(data))
    return response


def _decode_contents(tensor: _Input, max_bytes: int) -> np.ndarray:
    """The array of an input with typed contents.

    Raises:
      ServingError: a datatype that has no contents (FP16, BF16), contents of another datatype, not
        as many elements as the shape has, a number outside of the datatype's range.
    """
    name, datatype = tensor.name, tensor.datatype
    dtype = dtype_of(name, datatype)
    shape = tuple(tensor.shape)
    elements = count(name, shape)
    field = _CONTENTS.get(datatype)
    if field is None:
        raise refuse(f"input {name[:80]!r}: {datatype} has no typed contents; send it raw")
    for other, _ in tensor.contents.ListFields():
        if other.name != field:
            raise refuse(f"input {name[:80]!r}: {datatype} goes in {field}, not in {other.name}")
    values = getattr(tensor.contents, field)
    if len(values) != elements:
        raise refuse(
            f"input {name[:80]!r}: {field} has {len(values)} elements where shape {list(shape)} "
            f"has {elements}"
        )
    size = sum(map(len, values)) if datatype == "BYTES" else elements * dtype.itemsize
    if size > max_bytes:
        raise ServingError(
            ServingCode.TOO_LARGE,
            f"input {name[:80]!r} has {size} bytes; at most {max_bytes} are allowed",
        )
    if datatype == "BYTES":
        array = np.empty(elements, np.object_)
        array[:] = list(values)
        return array.reshape(shape)
    if field in ("int_contents", "uint_contents") and dtype.itemsize < 4 and elements:
        _check_range(name, datatype, dtype, values)
    return np.array(values, dtype).reshape(shape)


def _check_range(name: str, datatype: str, dtype: np.dtype, values: Sequence[int]) -> None:
    info = np.iinfo(dtype)
    low, high = min(values), max(values)
    if low < info.min or high > info.max:
        wrong = low if low < info.min else high
        raise refuse(
            f"input {name[:80]!r}: {wrong} is no {datatype}; its range is {info.min} to {info.max}"
        )


def parameter_values(parameters: Mapping[str, _Parameter]) -> dict[str, object]:
    """The values of a map of parameters; ServingError for one without a value."""
    values = {}
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise refuse(f"parameter {key[:80]!r} has no value; give it one, or leave it out")
        values[key] = getattr(parameter, kind)
    return values


def set_parameters(
    parameters: MutableMapping[str, pb.InferParameter], values: Mapping[str, object]
) -> None:
    """Fill a map of parameters; values that are neither numbers nor booleans become strings."""
    for key, value in values.items():
        parameter = parameters[key]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int) and value < 2**63:
            parameter.int64_param = value
        elif isinstance(value, int):
            parameter.uint64_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            parameter.string_param = str(value)
