"""How a request's tokens are chosen, and when they end: vLLM's `SamplingParams`, field by field.

Each field is honoured, or refused with an error that names it (`REFUSED`). Values are checked when
the object is made; what depends on the model, by `check_for_model`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from fornax.llm.outputs import RequestOutputKind
from fornax.llm.sampling_checks import (
    REFUSED,
    check,
    check_limits,
    check_repetition,
    check_structured,
    known_names,
    normalized,
    normalized_bias,
)

__all__ = ["REFUSED", "RepetitionDetectionParams", "SamplingParams", "StructuredOutputsParams"]

GREEDY_BELOW = 1e-5
"""A temperature below this one means: always the most likely token."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the generated text must conform to: one of json, regex, choice, grammar, json_object,
    structural_tag.

    Raises `EngineError` when none or several of these are given.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema: text or mapping."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: Sequence[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar in Lark's syntax."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without white space between its tokens."""
    disable_additional_properties: bool = False
    """JSON objects hold no keys that the schema does not name."""
    whitespace_pattern: str | None = None
    """Regular expression of the white space allowed inside JSON."""
    structural_tag: str | None = None
    """JSON that describes text with constrained stretches between tags."""

    def __post_init__(self) -> None:
        check_structured(self)


@dataclass(frozen=True, kw_only=True)
class RepetitionDetectionParams:
    """Ends a completion whose last tokens are one pattern again and again.

    Raises `EngineError` for sizes that contradict each other.
    """

    max_pattern_size: int = 0
    """Longest pattern looked for, in tokens; 0 looks for none."""
    min_pattern_size: int = 0
    """Shortest pattern looked for, in tokens; 0 means 1."""
    min_count: int = 0
    """How often in a row the pattern must stand at the end; at least 2."""

    def __post_init__(self) -> None:
        check_repetition(self)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when they end.

    Lists given for a field are kept as tuples, a single `stop` string as a tuple of one. Immutable,
    so that one object may serve many requests.

    Raises `EngineError` for a value out of range and for a field that is not supported.
    """

    n: int = 1
    """Completions of the prompt. More than one needs a temperature above 0."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the output holds; from -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit once for every time the output holds it; from -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in the prompt or the output and multiplies negative
    ones; above 0, where 1 changes nothing."""
    temperature: float = 1.0
    """The logits are divided by it; from 0 to 2, where 0 means the most likely token."""
    top_p: float = 1.0
    """Keeps the most likely tokens that together reach this probability; above 0, up to 1."""
    top_k: int = 0
    """Keeps this many of the most likely tokens (and their equals); 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keeps tokens at least this share as likely as the most likely one; from 0 to 1."""
    seed: int | None = None
    """Fixes the random bits of each position; completion i of n draws with seed + i. None and -1
    draw a seed."""
    stop: Sequence[str] = ()
    """Text that ends the completion."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the completion."""
    ignore_eos: bool = False
    """Goes on after the end-of-text token."""
    max_tokens: int | None = 16
    """Longest completion in tokens; None stops at the model's context length."""
    min_tokens: int = 0
    """Neither the end-of-text token nor `stop_token_ids` are chosen before this many tokens."""
    logprobs: int | None = None
    """Returns this many most likely tokens, and the chosen one, with their log probabilities;
    -1: the whole vocabulary, where the engine's `max_logprobs` allows it."""
    prompt_logprobs: int | None = None
    """The same for each prompt token."""
    prompt_logprob_token_ids: Sequence[int] | None = None
    """Tokens to score at every position of the prompt."""
    prompt_logprob_start: int | None = None
    """First position of the prompt to score."""
    logprob_token_ids: Sequence[int] | None = None
    """Tokens whose log probabilities are returned in place of the most likely ones."""
    flat_logprobs: bool = False
    """Returns log probabilities as flat arrays."""
    detokenize: bool = True
    """Turns the tokens into text."""
    skip_special_tokens: bool = True
    """Leaves special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Puts spaces between special tokens in the text."""
    include_stop_str_in_output: bool = False
    """Keeps the stop string at the end of the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of a stream holds."""
    stream_interval: int | None = None
    """Tokens per output of a stream; the first and the last come at once."""
    skip_clone: bool = False
    """In vLLM, promises not to change the object; nobody can change this one."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must conform to."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens are chosen."""
    extra_args: Mapping[str, Any] | None = None
    """Arguments of custom samplers."""
    bad_words: Sequence[str] = ()
    """Words whose last token is not chosen where it would complete them."""
    skip_reading_prefix_cache: bool | None = None
    """Computes the whole prompt; None does so when prompt log probabilities are asked for."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning; None and -1 set no limit."""
    repetition_detection: RepetitionDetectionParams | None = None
    """Ends completions that repeat themselves."""
    routed_experts_prompt_start: int = 0
    """First prompt token whose experts are reported."""
    trace_decode_token_ids: Sequence[int] | None = None
    """Tokens to emit in place of sampled ones, with their log probabilities."""

    def __post_init__(self) -> None:
        for name, value in normalized(self).items():
            object.__setattr__(self, name, value)
        check(self)

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """From a request's fields: None means the default (but max_tokens=None: no limit).

        The keys of `logit_bias` may be text, as JSON has them, and its values are brought into
        [-100, 100]. Raises `EngineError` like the constructor, and for names that are no fields.
        """
        known_names(values, {field.name for field in fields(cls)})
        given = {
            name: value
            for name, value in values.items()
            if value is not None or name == "max_tokens"
        }
        if "logit_bias" in given:
            given["logit_bias"] = normalized_bias(given["logit_bias"])
        return cls(**given)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def reads_cache(self) -> bool:
        """Whether the prompt's beginning may come from the prefix cache."""
        return not self.skip_reading_prefix_cache

    @property
    def penalized(self) -> bool:
        """Whether what was generated so far changes the logits."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    def check_for_model(self, *, vocab_size: int, max_logprobs: int = 20) -> None:
        """Check what depends on the model.

        Args:
            vocab_size: width of the logits.
            max_logprobs: most log probabilities per token that the engine returns; -1: all.

        Raises:
            EngineError: a token outside the vocabulary, or more log probabilities than allowed.
        """
        check_limits(self, vocab_size, max_logprobs)
