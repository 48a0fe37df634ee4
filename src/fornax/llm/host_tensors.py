"""A V2 request to a language model: its tensors as Triton's vLLM backend names them, read strictly.

BYTES `text_input` [n] is the prompts. BYTES `sampling_parameters` [1] is a JSON object of fields of
`SamplingParams`, which may stand among the request's parameters as well; numbers and lists may be
JSON in a string, as some clients send no others. `text_output` begins with its prompt unless BOOL
`exclude_input_in_output` [1] is true. BOOL `stream` [1] asks for the text in pieces, without the
prompt.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fornax.config import ServingCode, ServingError
from fornax.llm.outputs import RequestOutputKind
from fornax.llm.sampling_params import SamplingParams

__all__ = ["INPUTS", "OUTPUTS", "GenerateRequest", "bytes_array", "read_request"]

INPUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "text_input": ("BYTES", (-1,)),
    "stream": ("BOOL", (1,)),
    "sampling_parameters": ("BYTES", (1,)),
    "exclude_input_in_output": ("BOOL", (1,)),
}
OUTPUTS: dict[str, tuple[str, tuple[int, ...]]] = {"text_output": ("BYTES", (-1,))}

_FIELDS = {
    field.name for field in dataclasses.fields(SamplingParams) if field.name != "output_kind"
}
_TEXTS = frozenset({"stop", "bad_words"})
"""Fields for which a string is a value."""
_OTHER_NAMES = {"stop_words": "stop"}
"""What clients of TensorRT-LLM's backend call a field. They send [""] for none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A V2 request as the engine takes it."""

    prompts: tuple[str, ...]
    params: SamplingParams
    echo: bool
    """Whether outputs begin with their prompt."""
    stream: bool
    """Whether the text is wanted in pieces."""


def read_request(
    inputs: Mapping[str, np.ndarray],
    parameters: Mapping[str, object],
    defaults: Mapping[str, Any],
    *,
    in_pieces: bool = False,
) -> GenerateRequest:
    """Read a request's tensors and parameters.

    Args:
      defaults: fields of SamplingParams where the request has none.
      in_pieces: whether the answer may come so.

    Raises:
      ServingError: a tensor or field that is missing, unknown, or of another type or shape.
      EngineError: a field's value is out of range.
    """
    if "text_input" not in inputs:
        raise _refuse("text_input is missing; send the prompts as a BYTES tensor")
    prompts = tuple(_texts("text_input", inputs["text_input"]))
    if not prompts:
        raise _refuse("text_input has no prompt; send one at least")
    stream = _flag(inputs, "stream")
    if stream and not in_pieces:
        raise _refuse(
            "stream=true takes a call that streams: POST …/generate_stream, gRPC's "
            "ModelStreamInfer, or POST /v1/completions"
        )
    if stream and len(prompts) > 1:
        raise _refuse(
            f"text_input has {len(prompts)} prompts; with stream=true send one per request"
        )
    echo = not _flag(inputs, "exclude_input_in_output", stream)
    if stream and echo:
        raise _refuse(
            "exclude_input_in_output=false does not go with stream=true, whose pieces have no "
            "prompt; leave it out"
        )
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    params = _params(inputs, parameters, {**defaults, "output_kind": kind}, len(prompts))
    return GenerateRequest(prompts=prompts, params=params, echo=echo, stream=stream)


def bytes_array(texts: list[str]) -> np.ndarray:
    """Texts as a BYTES tensor, [n]."""
    array = np.empty(len(texts), np.object_)
    array[:] = [text.encode() for text in texts]
    return array


def _params(
    inputs: Mapping[str, np.ndarray],
    parameters: Mapping[str, object],
    defaults: Mapping[str, Any],
    prompts: int,
) -> SamplingParams:
    given: dict[str, Any] = {}
    if "sampling_parameters" in inputs:
        (text,) = _only("sampling_parameters", inputs["sampling_parameters"])
        try:
            given = json.loads(text)
        except ValueError as error:
            raise _refuse(f"sampling_parameters is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise _refuse("sampling_parameters is not a JSON object")
    given = {_OTHER_NAMES.get(name, name): value for name, value in {**parameters, **given}.items()}
    unknown = sorted(given.keys() - _FIELDS)
    if unknown:
        raise _refuse(
            f"{unknown[0]} is not a field of a request; it may have {', '.join(sorted(_FIELDS))}"
        )
    given = {name: _value(name, value) for name, value in given.items()}
    try:
        params = SamplingParams(**{**defaults, **given})
    except TypeError as error:
        raise _refuse(f"a sampling parameter is of another type: {error}") from None
    if params.n > 1 and prompts > 1:
        raise _refuse(f"n={params.n} goes with one prompt, and text_input has {prompts}")
    return params


def _value(name: str, value: object) -> Any:
    """A field's value, out of the string that a client may have had to put it into."""
    if name in _TEXTS:
        return [text for text in value if text != ""] if isinstance(value, list) else value
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise _refuse(f"{name}={value[:40]!r} is not a number, list or truth value") from None


def _texts(name: str, array: np.ndarray) -> list[str]:
    if array.dtype != np.object_:
        raise _refuse(f"{name} is {array.dtype}; send a BYTES tensor")
    try:
        return [bytes(item).decode() for item in array.ravel()]
    except UnicodeDecodeError as error:
        raise _refuse(f"{name} is not UTF-8: {error}") from None


def _only(name: str, array: np.ndarray) -> list[str]:
    texts = _texts(name, array)
    if len(texts) != 1:
        raise _refuse(f"{name} has {len(texts)} elements; send one")
    return texts


def _flag(inputs: Mapping[str, np.ndarray], name: str, default: bool = False) -> bool:
    array = inputs.get(name)
    if array is None:
        return default
    if array.dtype != np.bool_ or array.size != 1:
        raise _refuse(f"{name} is {array.dtype} of shape {list(array.shape)}; send one BOOL")
    return bool(array.ravel()[0])


def _refuse(message: str) -> ServingError:
    return ServingError(ServingCode.INVALID_ARGUMENT, message)
