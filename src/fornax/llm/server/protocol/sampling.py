"""The fields that completions and chats share: how to sample, when to stop, what to return."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fornax.llm.server.protocol.base import (
    INT64,
    Body,
    Listed,
    Mapped,
    Refused,
    StreamOptions,
    TokenId,
)
from fornax.llm.server.protocol.formats import ResponseFormat, StructuredOutputs

__all__ = ["GenerationBody"]

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
    logit_bias: Mapped[float] | None = None
    """Added to the logits of token ids."""
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    """Completions per prompt."""
    presence_penalty: float | None = None
    """Subtracted from the logit of a token that was made before."""
    response_format: ResponseFormat | None = None
    """What the text must be."""
    seed: Annotated[int, INT64] | None = None
    """Makes sampling repeatable, whatever runs beside it."""
    stop: str | Annotated[Listed[str], Field(max_length=64)] | None = None
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
    """Keeps so many tokens; 0 or -1 keeps all."""
    min_p: float | None = None
    """Keeps tokens of at least this share of the greatest probability."""
    repetition_penalty: float | None = None
    """Divides the logit of a token of the prompt or completion."""
    stop_token_ids: Listed[TokenId] | None = None
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
    """Keeps so many tokens of the prompt; -1 as many as the context has room for."""
    truncation_side: Literal["left", "right"] | None = None
    """Which end of a truncated prompt is cut off; left without it."""
    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = None
    """Log probabilities of the prompt's tokens, and of so many others at each place."""
    allowed_token_ids: Listed[TokenId] | None = None
    """The only tokens that may be made."""
    bad_words: Listed[str] | None = None
    """Texts that are not made."""
    logprob_token_ids: Annotated[Listed[TokenId], Field(min_length=1)] | None = None
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
        "routed_experts_prompt_start": Refused("routing is not returned", (0,)),
        "return_token_offsets": Refused("use /tokenize", (False,)),
        "return_mm_kwargs": Refused("input is text only", (True,)),
    }
