"""How a request's tokens are chosen, and when they end: vLLM's `SamplingParams`, field by field.

Each field is supported, or refused with an error that names it (`REFUSED`). Values are checked when
the object is made; what depends on the model, by `check_for_model`.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn, Self

from fornax.config.errors import EngineError
from fornax.llm.outputs import RequestOutputKind

__all__ = [
    "MAX_BIASES",
    "REFUSED",
    "RepetitionDetectionParams",
    "SamplingParams",
    "StructuredOutputsParams",
]

REFUSED = {
    "prompt_logprob_token_ids": "use prompt_logprobs",
    "prompt_logprob_start": "use prompt_logprobs, which scores the whole prompt",
    "logprob_token_ids": "use logprobs, with the engine's max_logprobs raised if need be",
    "flat_logprobs": "read the dicts of logprobs",
    "extra_args": "there are no custom samplers to pass them to",
    "thinking_token_budget": "limit the completion with max_tokens",
    "routed_experts_prompt_start": "cut them from routed_experts, which has the whole prompt",
}
"""Fields of vLLM's class that are not supported, and what to do without them."""
MAX_N = 16384
"""Most completions of one request, as in vLLM."""
MAX_BIASES = 1024
"""Most tokens of one request's `logit_bias`, as in vLLM."""
GREEDY_BELOW = 1e-5
"""A temperature below this one means: always the most likely token."""

_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_TOKENS = ("stop_token_ids", "allowed_token_ids", "trace_decode_token_ids", "logit_bias")
_RANGES = {
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "top_p": (0.0, 1.0),
}
"""Least and greatest value."""
_COUNTS = {
    "n": (1, MAX_N),
    "top_k": (0, None),
    "min_tokens": (0, None),
    "max_tokens": (1, None),
    "stream_interval": (1, None),
    "logprobs": (-1, None),
    "prompt_logprobs": (-1, None),
    "seed": (-(2**63), 2**63 - 1),
}
"""Least and greatest value, where it is not None."""
_NOT_WITH_A_TRACE = (
    "structured_outputs",
    "bad_words",
    "allowed_token_ids",
    "repetition_detection",
    "min_tokens",
)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the generated text must conform to: one of json, regex, choice, grammar, json_object,
    structural_tag.

    Raises `EngineError` when none or several of these are given.
    """

    json: str | Mapping[str, object] | None = None
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
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise EngineError(
                f"structured_outputs takes exactly one of {', '.join(_CONSTRAINTS)}; "
                f"{' and '.join(given) or 'none'} given"
            )
        if self.choice is not None and (not self.choice or isinstance(self.choice, str)):
            _fail("choice", self.choice, "must be a list of at least one text")


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
    """How often in a row the pattern must be at the end; at least 2."""

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            _check_integer(name, getattr(self, name), 0)
        if self.min_pattern_size > self.max_pattern_size:
            limit = f"must be at most max_pattern_size={self.max_pattern_size}"
            _fail("min_pattern_size", self.min_pattern_size, limit)
        if self.max_pattern_size and self.min_count < 2:
            _fail("min_count", self.min_count, "must be at least 2 for a pattern to repeat")


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
    """Continues after the end-of-text token."""
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
    extra_args: Mapping[str, object] | None = None
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
        self._normalize()
        for name, remedy in REFUSED.items():
            if value := getattr(self, name):
                _fail(name, value, f"is not supported; {remedy}")
        for name, (low, high) in _RANGES.items():
            if not low <= _finite(name, getattr(self, name)) <= high:
                _fail(name, getattr(self, name), f"must be from {low:g} to {high:g}")
        for name, (least, most) in _COUNTS.items():
            if (value := getattr(self, name)) is not None or name in ("n", "top_k", "min_tokens"):
                hint = "; 0 keeps all tokens" if name == "top_k" else ""
                _check_integer(name, value, least, most, hint)
        if self.top_p == 0:
            _fail("top_p", 0, "must be above 0; temperature=0 takes the most likely token")
        if _finite("repetition_penalty", self.repetition_penalty) <= 0:
            _fail(
                "repetition_penalty", self.repetition_penalty, "must be above 0; 1 changes nothing"
            )
        for name in ("stop", "bad_words"):
            if not all(isinstance(text, str) and text for text in getattr(self, name)):
                _fail(name, getattr(self, name), "must hold texts, none of them empty")
        self._check_tokens()
        self._check_combinations()

    def _normalize(self) -> None:
        """Replace values that stand for another one: None, single strings, lists, -1."""
        changed: dict[str, object] = {}
        changed["stop"] = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        for name in ("stop_token_ids", "bad_words"):
            changed[name] = tuple(dict.fromkeys(_tuple(name, getattr(self, name))))
        for name in ("allowed_token_ids", "trace_decode_token_ids"):
            if (value := getattr(self, name)) is not None:
                changed[name] = _tuple(name, value)
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(value := getattr(self, name), bool):
                changed[name] = 1 if value else None
        for name, replacement in (("seed", None), ("thinking_token_budget", None), ("top_k", 0)):
            if getattr(self, name) == -1:
                changed[name] = replacement
        if self.skip_reading_prefix_cache is None:
            changed["skip_reading_prefix_cache"] = self.prompt_logprobs is not None
        if self.logit_bias is not None:
            changed["logit_bias"] = dict(self.logit_bias)
        for name, value in changed.items():
            object.__setattr__(self, name, value)

    def _check_tokens(self) -> None:
        for name in _TOKENS:
            tokens = getattr(self, name) or ()
            if not all(_is_integer(token) and token >= 0 for token in tokens):
                _fail(name, tokens, "must hold token ids: integers of at least 0")
        if self.allowed_token_ids == ():
            _fail("allowed_token_ids", [], "must hold at least one token; None allows all")
        if self.trace_decode_token_ids == ():
            _fail("trace_decode_token_ids", [], "must hold at least one token")
        bias = self.logit_bias or {}
        if len(bias) > MAX_BIASES:
            _fail("logit_bias", bias, f"must name at most {MAX_BIASES} tokens, not {len(bias)}")
        for token, value in bias.items():
            _finite(f"logit_bias[{token}]", value)

    def _check_combinations(self) -> None:
        if self.stop and not self.detokenize:
            _fail("stop", self.stop, "needs text to look for; set detokenize=True")
        if self.n > 1 and self.greedy:
            _fail("n", self.n, "must be 1 at temperature=0, where all completions are the same")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _fail("min_tokens", self.min_tokens, f"must be at most max_tokens={self.max_tokens}")
        if self.trace_decode_token_ids is None:
            return
        if self.n != 1:
            _fail("n", self.n, "must be 1 with trace_decode_token_ids")
        for name in _NOT_WITH_A_TRACE:
            if value := getattr(self, name):
                _fail(name, value, "does not go together with trace_decode_token_ids")

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """From a request's fields: None means the default (but max_tokens=None: no limit).

        The keys of `logit_bias` may be text, as JSON has them, and its values are brought into
        [-100, 100]. Raises `EngineError` like the constructor, and for names that are not fields.
        """
        names = {field.name for field in fields(cls)}
        if unknown := sorted(values.keys() - names):
            raise EngineError(
                f"{', '.join(unknown)}: no sampling parameter of that name; allowed are "
                f"{', '.join(sorted(names))}"
            )
        given = {
            name: value
            for name, value in values.items()
            if value is not None or name == "max_tokens"
        }
        if "logit_bias" in given:
            given["logit_bias"] = _read_bias(given["logit_bias"])
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
            max_logprobs: most log probabilities per token that the engine returns.

        Raises:
            EngineError: a token outside the vocabulary, or more log probabilities than allowed.
        """
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (vocab_size if value == -1 else value) > max_logprobs:
                reason = f"must be at most {max_logprobs}; the engine's max_logprobs allows no more"
                _fail(name, value, reason)
        for name in _TOKENS:
            wrong = [token for token in getattr(self, name) or () if token >= vocab_size]
            if wrong:
                _fail(name, wrong, f"must be tokens of the vocabulary, below {vocab_size}")


def _fail(name: str, value: object, constraint: str) -> NoReturn:
    shown = repr(value)
    if len(shown) > 200:
        shown = f"{shown[:200]}…"
    raise EngineError(f"{name}={shown} {constraint}")


def _read_bias(bias: Mapping[Any, Any]) -> dict[int, float]:
    """Logit bias as JSON has it, with text for keys: ids as integers, values in [-100, 100]."""
    found = {}
    for token, value in bias.items():
        try:
            number = float(value)
            if not math.isnan(number):
                number = min(100.0, max(-100.0, number))
            found[int(token)] = number
        except (TypeError, ValueError):
            _fail("logit_bias", {token: value}, "must map token ids to numbers")
    return found


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping):
        _fail(name, value, "must be a list")
    try:
        return tuple(value or ())
    except TypeError:
        _fail(name, value, "must be a list")


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check_integer(
    name: str, value: Any, least: int, most: int | None = None, hint: str = ""
) -> None:
    if not _is_integer(value):
        _fail(name, value, "must be an integer")
    if value < least:
        _fail(name, value, f"must be at least {least}{hint}")
    if most is not None and value > most:
        _fail(name, value, f"must be at most {most}")


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        _fail(name, value, "must be a finite number")
    return float(value)
