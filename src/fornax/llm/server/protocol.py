"""What the bodies of requests and answers share.

Strictness, fields that are refused by name, how to sample, what the text must be, usage, and how
the OpenAPI document describes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from fornax.llm.server.errors import ApiError

__all__ = [
    "INT64",
    "Body",
    "BoundedDict",
    "ErrorAnswer",
    "FailFastList",
    "GenerationBody",
    "JsonObject",
    "PositionLogprob",
    "Refused",
    "Reply",
    "ResponseFormat",
    "StreamOptions",
    "StructuredOutputs",
    "TokenId",
    "Usage",
    "failures",
    "one_by_one",
    "stream_of",
]


JsonObject = dict[str, Any]
INT64 = Field(ge=-(2**63), le=2**63 - 1)
T = TypeVar("T")
FailFastList = Annotated[list[T], Field(fail_fast=True)]
"""A list that is read up to its first error: to describe 100,000 of them takes seconds."""
_MAX_FIELDS = 256
"""Fields of an object, known or not: each unknown one would be described."""
_MAX_NAMES = 1024


def one_by_one(given: Any) -> list[str] | list[list[int]]:
    """The texts or token lists of a field that is one of them, or a list of them; not empty."""
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


def _few(value: object) -> object:
    """Refuse an object of too many names before its values, as each wrong one is described."""
    if isinstance(value, dict) and len(value) > _MAX_NAMES:
        message = "it has {size} names; at most {most} are taken"
        raise PydanticCustomError("too_many", message, {"size": len(value), "most": _MAX_NAMES})
    return value


BoundedDict = Annotated[dict[str, T], BeforeValidator(_few)]
"""An object of any names, up to 1,024 of them: as many as `logit_bias` may have."""


@dataclass(frozen=True)
class Refused:
    """A field that OpenAI or vLLM know and Fornax does not support."""

    reason: str
    """Why, and what to do instead."""
    neutral: tuple[object, ...] = ()
    """Values without effect: these and null pass."""

    def check(self, name: str, value: object) -> None:
        """400 naming the field when its value asks for something."""
        if value is None or any(value == n and type(value) is type(n) for n in self.neutral):
            return
        raise ApiError(400, f"{name} is not supported: {self.reason}", param=name)


class Body(BaseModel):
    """A request's body: plain JSON types, no unknown fields, finite numbers."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    refused: ClassVar[Mapping[str, Refused]] = {}
    """Known fields that get 400 unless their value has no effect."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_FIELDS:
            message = f"an object of the body has {len(data)} fields; send at most {_MAX_FIELDS}"
            raise ApiError(400, message)
        if not cls.refused:
            return data
        for name in data.keys() & cls.refused.keys():
            cls.refused[name].check(name, data[name])
        return {name: value for name, value in data.items() if name not in cls.refused}


class Reply(BaseModel):
    """An answer's body, as the OpenAPI document describes it."""

    model_config = ConfigDict(protected_namespaces=())


class StreamOptions(Body):
    """What a stream carries besides its text."""

    include_usage: bool | None = False
    """Whether a last chunk has the usage."""
    continuous_usage_stats: bool | None = False
    """Whether every chunk has the usage so far."""

    refused: ClassVar[Mapping[str, Refused]] = {
        "include_obfuscation": Refused("chunks are not padded", (False,)),
    }


class PromptTokensDetails(Reply):
    cached_tokens: int


class Usage(Reply):
    """Tokens that a request took."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None


class _Error(Reply):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(Reply):
    """What every failure answers."""

    error: _Error


TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class PositionLogprob(Reply):
    logprob: float
    rank: int
    decoded_token: str | None


_MEANINGS = {
    400: "The request is not one that is supported; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not of the type that is taken.",
    429: "Too many requests; Retry-After says when to try again.",
    500: "The server failed.",
    503: "The engine is not ready, sleeps, stops or died.",
    504: "The request took too long.",
}


def failures(*statuses: int, body: bool = True) -> dict[int | str, JsonObject]:
    """The OpenAPI document's part on failures; those of any request with a body come besides."""
    every = {401, 500, *statuses, *((400, 408, 413) if body else ())}
    return {
        status: {"model": ErrorAnswer, "description": _MEANINGS[status]} for status in sorted(every)
    }


def stream_of(description: str) -> JsonObject:
    """The OpenAPI document's part on an answer that may be a stream."""
    return {
        "description": f"{description}; with `stream`, server-sent events that end with `[DONE]`.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }


class JsonSchema(Body):
    """A JSON schema with a name."""

    name: str
    description: str | None = None
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON, and vLLM's for a structural tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: JsonObject | None = None
    structures: FailFastList[JsonObject] | None = None
    triggers: FailFastList[str] | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if self.type == "json_schema" and (
            self.json_schema is None or self.json_schema.json_schema is None
        ):
            raise ApiError(
                400,
                "response_format.type=json_schema needs json_schema with a schema",
                param="response_format",
            )
        return self


class StructuredOutputs(Body):
    """vLLM's way: exactly one constraint."""

    json_: str | JsonObject | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: FailFastList[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    refused: ClassVar[Mapping[str, Refused]] = {
        "disable_fallback": Refused("there is one backend, llguidance", (False, True)),
    }


_TRANSFER = Refused("keys and values are not moved between servers", ({},))


class RepetitionDetection(Body):
    """What counts as a repetition."""

    max_pattern_size: Annotated[int, Field(ge=0)] = 0
    min_pattern_size: Annotated[int, Field(ge=0)] = 0
    min_count: Annotated[int, Field(ge=0)] = 0


class GenerationBody(Body):
    """A request that makes tokens."""

    model: str | None = None
    """Name of the model or adapter; without it the model."""
    frequency_penalty: float | None = None
    """Subtracted from a token's logit for each time it was made."""
    logit_bias: BoundedDict[float] | None = None
    """Added to the logits of token ids."""
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    """Completions per prompt."""
    presence_penalty: float | None = None
    """Subtracted from the logit of a token that was made before."""
    response_format: ResponseFormat | None = None
    """What the text must be."""
    seed: Annotated[int, INT64] | None = None
    """Makes sampling repeatable, whatever runs beside it."""
    stop: str | Annotated[FailFastList[str], Field(max_length=64)] | None = None
    """Texts that end a completion."""
    stream: bool | None = False
    """Whether the answer comes as server-sent events."""
    stream_options: StreamOptions | None = None
    """What the stream carries besides; only with stream."""
    temperature: float | None = None
    """Divides the logits; 0 takes the most likely token."""
    top_p: float | None = None
    """Keeps the smallest set of tokens of at least this probability."""
    user: str | None = None
    """Written to the access log."""

    top_k: int | None = None
    """Keeps this many tokens; 0 or -1 keeps all."""
    min_p: float | None = None
    """Keeps tokens of at least this share of the greatest probability."""
    repetition_penalty: float | None = None
    """Divides the logit of a token of the prompt or completion."""
    stop_token_ids: FailFastList[TokenId] | None = None
    """Tokens that end a completion."""
    include_stop_str_in_output: bool = False
    """Whether the stop text is part of the text."""
    ignore_eos: bool = False
    """Whether the end-of-text token is a token like others."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens before a completion may end."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    spaces_between_special_tokens: bool = True
    """Whether spaces stand between special tokens in the text."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    """Keeps this many tokens of the prompt; -1 as many as the context has room for."""
    truncation_side: Literal["left", "right"] | None = None
    """Which end of a truncated prompt is cut off; left without it."""
    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = None
    """Log probabilities of the prompt's tokens, and of this many others at each place."""
    allowed_token_ids: FailFastList[TokenId] | None = None
    """The only tokens that may be made."""
    bad_words: FailFastList[str] | None = None
    """Texts that are not made."""
    logprob_token_ids: Annotated[FailFastList[TokenId], Field(min_length=1)] | None = None
    """Tokens whose log probabilities are returned."""
    structured_outputs: StructuredOutputs | None = None
    """What the text must be: JSON, a regular expression, a choice, a grammar."""
    repetition_detection: RepetitionDetection | None = None
    """Ends a completion that repeats itself."""
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    """Most tokens of reasoning."""
    stream_interval: Annotated[int, Field(ge=1)] | None = None
    """Tokens per chunk of a stream; the first and last come at once."""
    priority: Annotated[int, INT64] = 0
    """Lower is served earlier, with the scheduling policy `priority`."""
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Becomes part of the answer's id."""
    session_id: str | None = None
    """Written to the access log."""
    return_tokens_as_token_ids: bool | None = None
    """Whether logprobs name tokens as token_id:N."""
    return_token_ids: bool | None = None
    """Whether the answer has the token ids of prompt and completion."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Shares cached prefixes only among requests with the same salt."""

    refused: ClassVar[Mapping[str, Refused]] = {
        "best_of": Refused("use n and choose among the choices", (1,)),
        "use_beam_search": Refused("beam search is not built in; use n", (False,)),
        "length_penalty": Refused("it belongs to beam search; use n", (1, 1.0)),
        "watermarking": Refused("text is not watermarked", (False,)),
        "kv_transfer_params": _TRANSFER,
        "ec_transfer_params": _TRANSFER,
        "vllm_xargs": Refused("there are no extensions to read it", ({},)),
        "logits_processors": Refused("use logit_bias, bad_words or structured_outputs", ([],)),
        "guided_json": Refused("use structured_outputs.json"),
        "guided_regex": Refused("use structured_outputs.regex"),
        "guided_choice": Refused("use structured_outputs.choice"),
        "guided_grammar": Refused("use structured_outputs.grammar"),
        "guided_decoding_backend": Refused("there is one backend, llguidance"),
        "routed_experts_prompt_start": Refused(
            "cut them from routed_experts, which has the whole prompt", (0,)
        ),
        "return_token_offsets": Refused("use /tokenize", (False,)),
        "return_mm_kwargs": Refused("input is text only", (True,)),
    }

    @model_validator(mode="after")
    def _stream_options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        return self
