"""A request's fields as SamplingParams: the request's, then the model's, then OpenAI's defaults."""

import json
from collections.abc import Mapping
from typing import Any

from fornax.llm.outputs import RequestOutputKind
from fornax.llm.sampling_params import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol.formats import ResponseFormat, StructuredOutputs
from fornax.llm.server.protocol.sampling import GenerationBody

__all__ = ["sampling_params"]

_COPIED = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "thinking_token_budget",
)
"""Fields whose name and meaning are the same on both sides."""

_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields for which the model's generation_config.json may have a default."""


def sampling_params(
    body: GenerationBody,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    structured: StructuredOutputsParams | None = None,
    special_tokens: bool = False,
) -> SamplingParams:
    """The parameters of a request. `structured` stands for the constraints of its body, and
    `special_tokens` keeps them in the text.

    Raises `ApiError` or, from `SamplingParams`, `EngineError` for what cannot be honoured.
    """
    values = {name: defaults[name] for name in _MODEL_DEFAULTS if defaults.get(name) is not None}
    values |= {name: value for name in _COPIED if (value := getattr(body, name)) is not None}
    if prompt_logprobs is not None:
        values["prompt_logprobs"] = prompt_logprobs
    if body.stream and values.get("prompt_logprobs") is not None and body.prompt_logprobs:
        raise ApiError(400, "prompt_logprobs needs stream=false", param="prompt_logprobs")
    if special_tokens:
        values["skip_special_tokens"] = False
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        logit_bias=_logit_bias(body.logit_bias),
        repetition_detection=_repetition(body),
        structured_outputs=structured or _structured(body),
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    )


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise ApiError(
            400, 'logit_bias: its keys are token ids, such as {"50256": -100}', param="logit_bias"
        ) from None


def _repetition(body: GenerationBody) -> RepetitionDetectionParams | None:
    found = body.repetition_detection
    return None if found is None else RepetitionDetectionParams(**found.model_dump())


def _structured(body: GenerationBody) -> StructuredOutputsParams | None:
    """The constraint of `response_format` or `structured_outputs`."""
    form, own = body.response_format, body.structured_outputs
    if form is not None and form.type != "text":
        if own is not None:
            raise ApiError(
                400,
                "response_format and structured_outputs are both given; give one",
                param="structured_outputs",
            )
        return _from_format(form)
    return None if own is None else _from_own(own)


def _from_format(form: ResponseFormat) -> StructuredOutputsParams:
    if form.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if form.json_schema is not None:
        return StructuredOutputsParams(json=form.json_schema.json_schema)
    tag = form.model_dump(exclude_none=True, exclude={"json_schema"})
    return StructuredOutputsParams(structural_tag=json.dumps(tag))


def _from_own(own: StructuredOutputs) -> StructuredOutputsParams:
    values = own.model_dump(exclude_unset=True, by_alias=True)
    return StructuredOutputsParams(**values)
