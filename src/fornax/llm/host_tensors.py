"""A V2 request to a language model: its tensors as Triton's vLLM backend names them, read strictly.

BYTES `text_input` [n] is the prompts. BYTES `sampling_parameters` [1] is a JSON object of fields of
`SamplingParams`, which may stand among the request's parameters as well. `text_output` begins with
its prompt unless BOOL `exclude_input_in_output` [1] is true. BOOL `stream` [1] can only be false.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fornax.config import ServingCode, ServingError
from fornax.llm.outputs import RequestOutputKind
from fornax.llm.sampling_params import SamplingParams

__all__ = ["INPUTS", "OUTPUTS", "Asked", "bytes_array", "read_request"]

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks for."""

    prompts: tuple[str, ...]
    params: SamplingParams
    echo: bool
    """Whether outputs begin with their prompt."""


def read_request(
    inputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Asked:
    """Read a request's tensors and parameters.

    Args:
      defaults: fields of SamplingParams where the request has none.

    Raises:
      ServingError: a tensor or field that is missing, unknown, or of another type or shape.
      EngineError: a field's value is out of range.
    """
    if "text_input" not in inputs:
        raise _refuse("text_input is missing; send the prompts as a BYTES tensor")
    prompts = tuple(_texts("text_input", inputs["text_input"]))
    if not prompts:
        raise _refuse("text_input has no prompt; send one at least")
    if _flag(inputs, "stream"):
        raise _refuse(
            "stream=true is not answered by infer; POST /v1/completions with stream=true streams"
        )
    return Asked(
        prompts=prompts,
        params=_params(inputs, parameters, defaults, len(prompts)),
        echo=not _flag(inputs, "exclude_input_in_output"),
    )


def bytes_array(texts: list[str]) -> np.ndarray:
    """Texts as a BYTES tensor, [n]."""
    array = np.empty(len(texts), np.object_)
    array[:] = [text.encode() for text in texts]
    return array


def _params(
    inputs: Mapping[str, np.ndarray],
    parameters: Mapping[str, Any],
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
            raise _refuse("sampling_parameters is no JSON object")
    given = {**parameters, **given}
    unknown = sorted(given.keys() - _FIELDS)
    if unknown:
        raise _refuse(
            f"{unknown[0]} is no field of a request; it may have {', '.join(sorted(_FIELDS))}"
        )
    try:
        params = SamplingParams(**{**defaults, **given}, output_kind=RequestOutputKind.FINAL_ONLY)
    except TypeError as error:
        raise _refuse(f"a sampling parameter is of another type: {error}") from None
    if params.n > 1 and prompts > 1:
        raise _refuse(f"n={params.n} goes with one prompt, and text_input has {prompts}")
    return params


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


def _flag(inputs: Mapping[str, np.ndarray], name: str) -> bool:
    array = inputs.get(name)
    if array is None:
        return False
    if array.dtype != np.bool_ or array.size != 1:
        raise _refuse(f"{name} is {array.dtype} of shape {list(array.shape)}; send one BOOL")
    return bool(array.ravel()[0])


def _refuse(message: str) -> ServingError:
    return ServingError(ServingCode.INVALID_ARGUMENT, message)
