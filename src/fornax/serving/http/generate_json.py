"""The generate extension's JSON: a model's tensors by their names, beside parameters.

`{"text_input": "…", "parameters": {"max_tokens": 8}}` asks, `{"model_name": "lm", "model_version":
"1", "text_output": "…"}` answers. A key that names an input is that tensor, also among the
parameters; any other is a parameter. Tensors of one element are bare, outputs of more are flat.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.entry import stream_of
from fornax.serving.http.heads import Head
from fornax.serving.types import InferRequest, InferResult, TensorMetadata
from fornax.serving.v2.datatypes import refuse
from fornax.serving.v2.json_tensors import from_json, to_json
from fornax.serving.v2.parameters import MAX_NAME, common_parameters, function_of
from fornax.serving.v2.reading import object_in, parse

__all__ = ["read_generate", "write_generate"]

_STREAM = "stream"
_OWN = frozenset({"model_name", "model_version", "id", "parameters", "done", "error"})
"""Keys of an answer that are no outputs."""


def read_generate(
    body: bytes, head: Head, host: Any, limits: Limits, received: float, *, streams: bool
) -> InferRequest:
    """The request in `body`.

    `streams`: whether the answer may come in pieces. Then a model that can answer so does, unless
    its input `stream` is there and false.

    Raises ServingError with what is wrong.
    """
    given = parse(body)
    name = given.pop("id", head.id)
    if type(name) is not str or len(name) > MAX_NAME:
        raise refuse(f"id is no string of at most {MAX_NAME} characters")
    own = object_in("parameters", given.pop("parameters", None))
    if twice := given.keys() & own.keys():
        raise refuse(f"{min(twice)[:80]!r} is there twice, also under parameters; send it once")
    given |= own
    model, function = function_of(head.model, _function(given))
    asked = f"{model}:{function}" if function else model
    tensors = {spec.name: spec for spec in host.metadata(asked, head.version).inputs}
    if streams and _STREAM in tensors and stream_of(host.entries.get(model)) is not None:
        given.setdefault(_STREAM, True)
    inputs = {key: _tensor(tensors[key], given.pop(key), limits) for key in tensors if key in given}
    common = common_parameters(given)
    if common.binary:
        raise refuse("binary_data_output: generate answers in JSON; ask infer for binary tensors")
    seconds, limit = common.timeout, limits.request_timeout
    seconds = min(seconds, limit) if seconds and limit else seconds or limit
    return InferRequest(
        model,
        inputs,
        head.version,
        function,
        name,
        priority=common.priority,
        deadline=received + seconds if seconds else None,
        parameters=common.others,
        received=received,
        trace=head.trace,
    )


def _function(given: Mapping[str, Any]) -> str:
    """What parameter `function` names; what is no name is refused with the other parameters."""
    function = given.get("function", "")
    return function if isinstance(function, str) else ""


def _tensor(spec: TensorMetadata, value: object, limits: Limits) -> np.ndarray:
    """An input: a bare element, or lists; sizes that are missing in front are 1."""
    shape: list[int] = []
    level = value
    while isinstance(level, list) and len(shape) < len(spec.shape):
        shape.append(len(level))
        level = level[0] if level else None
    for _ in range(len(spec.shape) - len(shape)):
        shape.insert(0, 1)
        value = [value]
    array = from_json(spec.name, spec.datatype, shape, value)
    if array.nbytes > limits.max_tensor_bytes:
        raise ServingError(
            ServingCode.TOO_LARGE,
            f"input {spec.name!r} has {array.nbytes} bytes; this server takes "
            f"{limits.max_tensor_bytes} a tensor",
        )
    return array


def write_generate(result: InferResult, *, done: bool | None = None) -> bytes:
    """An answer, or a piece of one; `done`: whether it is the last, None: there is only one.

    Raises ServingError for outputs that are not for JSON, or named as the answer's own keys.
    """
    document: dict[str, Any] = {"model_name": result.model, "model_version": result.version}
    if result.id:
        document["id"] = result.id
    if result.parameters:
        document["parameters"] = dict(result.parameters)
    if done is not None:
        document["done"] = done
    for name, array in result.outputs.items():
        if name in _OWN:
            raise ServingError(
                ServingCode.UNIMPLEMENTED,
                f"output {name!r} has the name of a key of the answer; ask infer for it",
            )
        values = to_json(name, array)
        document[name] = values[0] if array.size == 1 else values
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
