"""What values sampling parameters may have; the messages name field, value and remedy."""

import math
import numbers
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

from fornax.config.errors import EngineError

__all__ = [
    "REFUSED",
    "check",
    "check_limits",
    "check_repetition",
    "check_structured",
    "known_names",
    "normalized",
    "normalized_bias",
]

REFUSED = {
    "prompt_logprob_token_ids": "use prompt_logprobs",
    "prompt_logprob_start": "use prompt_logprobs, which scores the whole prompt",
    "logprob_token_ids": "use logprobs, with the engine's max_logprobs raised if need be",
    "flat_logprobs": "read the dicts of logprobs",
    "extra_args": "there are no custom samplers to pass them to",
    "thinking_token_budget": "limit the completion with max_tokens",
    "routed_experts_prompt_start": "no supported model routes tokens to experts",
}
"""Fields of vLLM's class that are not supported, and what to do without them."""

MAX_N = 16384
"""Most completions of one request, as in vLLM."""

MAX_BIASES = 1024
"""Most tokens of one request's `logit_bias`, as in vLLM."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_TUPLES = (
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "trace_decode_token_ids",
)
_TOKENS = ("stop_token_ids", "allowed_token_ids", "trace_decode_token_ids", "logit_bias")


def fail(name: str, value: Any, constraint: str) -> NoReturn:
    """Raise the error of one field."""
    shown = repr(value)
    if len(shown) > 200:
        shown = f"{shown[:200]}…"
    raise EngineError(f"{name}={shown} {constraint}")


def normalized(params: Any) -> dict[str, Any]:
    """The fields whose given value stands for another one: None, single strings, lists, -1."""
    changed: dict[str, Any] = {}
    stop = params.stop
    changed["stop"] = (stop,) if isinstance(stop, str) else _tuple("stop", stop)
    for name in _TUPLES:
        value = getattr(params, name)
        if value is not None or name in ("stop_token_ids", "bad_words"):
            changed[name] = _tuple(name, value)
    for name in ("stop_token_ids", "bad_words"):
        changed[name] = tuple(dict.fromkeys(changed[name]))
    for name in ("logprobs", "prompt_logprobs"):
        if isinstance(getattr(params, name), bool):
            changed[name] = 1 if getattr(params, name) else None
    for name, unset in (("seed", -1), ("thinking_token_budget", -1), ("top_k", -1)):
        if getattr(params, name) == unset:
            changed[name] = 0 if name == "top_k" else None
    if params.skip_reading_prefix_cache is None:
        changed["skip_reading_prefix_cache"] = params.prompt_logprobs is not None
    if params.logit_bias is not None:
        changed["logit_bias"] = dict(params.logit_bias)
    return changed


def check(params: Any) -> None:
    """Check every field of `SamplingParams` and their combinations."""
    _check_refused(params)
    _check_numbers(params)
    _check_counts(params)
    _check_texts(params)
    _check_tokens(params)
    _check_combinations(params)


def check_structured(params: Any) -> None:
    """Check `StructuredOutputsParams`: exactly one kind of constraint."""
    given = [name for name in _KINDS if getattr(params, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise EngineError(
            f"structured_outputs takes exactly one of {', '.join(_KINDS)}; {found} given"
        )
    if params.choice is not None and (not params.choice or isinstance(params.choice, str)):
        fail("choice", params.choice, "must be a list of at least one text")


def check_repetition(params: Any) -> None:
    """Check `RepetitionDetectionParams`: sizes that fit together."""
    for name in ("max_pattern_size", "min_pattern_size", "min_count"):
        _integer(params, name, least=0)
    if params.min_pattern_size > params.max_pattern_size:
        fail(
            "min_pattern_size",
            params.min_pattern_size,
            f"must be at most max_pattern_size={params.max_pattern_size}",
        )
    if params.max_pattern_size and params.min_count < 2:
        fail("min_count", params.min_count, "must be at least 2 for a pattern to repeat")


def check_limits(params: Any, vocab_size: int, max_logprobs: int) -> None:
    """Check token ids against the vocabulary and counts of log probabilities."""
    most = vocab_size if max_logprobs == -1 else max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and (vocab_size if value == -1 else value) > most:
            fail(name, value, f"must be at most {most}; the engine's max_logprobs allows no more")
    for name in _TOKENS:
        wrong = [token for token in getattr(params, name) or () if token >= vocab_size]
        if wrong:
            fail(name, wrong, f"must be tokens of the vocabulary, below {vocab_size}")


def known_names(given: Iterable[str], names: Collection[str]) -> None:
    """Refuse names that are no fields of `SamplingParams`."""
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise EngineError(
            f"{', '.join(unknown)}: no sampling parameter of that name; allowed are "
            f"{', '.join(sorted(names))}"
        )


def normalized_bias(bias: Mapping[Any, Any]) -> dict[int, float]:
    """Logit bias as JSON has it, with text for keys: ids as integers, values in [-100, 100]."""
    result = {}
    for token, value in bias.items():
        try:
            number = float(value)
            result[int(token)] = number if math.isnan(number) else min(100.0, max(-100.0, number))
        except (TypeError, ValueError):
            fail("logit_bias", {token: value}, "must map token ids to numbers")
    return result


def _tuple(name: str, value: Any) -> tuple:
    if isinstance(value, str | bytes | Mapping):
        fail(name, value, "must be a list")
    try:
        return tuple(value or ())
    except TypeError:
        fail(name, value, "must be a list")


def _check_refused(params: Any) -> None:
    for name, remedy in REFUSED.items():
        value = getattr(params, name)
        if value:
            fail(name, value, f"is not supported; {remedy}")


def _check_numbers(params: Any) -> None:
    for name, low, high in (
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("temperature", 0.0, 2.0),
        ("min_p", 0.0, 1.0),
        ("top_p", 0.0, 1.0),
    ):
        value = _finite(name, getattr(params, name))
        if not low <= value <= high:
            fail(name, value, f"must be from {low:g} to {high:g}")
    if params.top_p == 0:
        fail("top_p", params.top_p, "must be above 0; temperature=0 takes the most likely token")
    if _finite("repetition_penalty", params.repetition_penalty) <= 0:
        fail("repetition_penalty", params.repetition_penalty, "must be above 0; 1 changes nothing")


def _check_counts(params: Any) -> None:
    _integer(params, "n", least=1, most=MAX_N)
    _integer(params, "top_k", least=0, hint="; 0 keeps all tokens")
    _integer(params, "min_tokens", least=0)
    for name, least in (
        ("max_tokens", 1),
        ("stream_interval", 1),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("seed", -(2**63)),
    ):
        if getattr(params, name) is not None:
            _integer(params, name, least=least, most=2**63 - 1 if name == "seed" else None)


def _check_texts(params: Any) -> None:
    for name in ("stop", "bad_words"):
        value = getattr(params, name)
        if not all(isinstance(text, str) and text for text in value):
            fail(name, value, "must hold texts, none of them empty")
    if params.stop and not params.detokenize:
        fail("stop", params.stop, "needs text to look for; set detokenize=True")


def _check_tokens(params: Any) -> None:
    for name in _TOKENS:
        tokens = getattr(params, name) or ()
        if not all(_is_integer(token) and token >= 0 for token in tokens):
            fail(name, tokens, "must hold token ids: integers of at least 0")
    if params.allowed_token_ids == ():
        fail("allowed_token_ids", [], "must hold at least one token; None allows all")
    bias = params.logit_bias or {}
    if len(bias) > MAX_BIASES:
        fail("logit_bias", bias, f"must name at most {MAX_BIASES} tokens, not {len(bias)}")
    for token, value in bias.items():
        _finite(f"logit_bias[{token}]", value)


def _check_combinations(params: Any) -> None:
    if params.n > 1 and params.greedy:
        fail("n", params.n, "must be 1 at temperature=0, where all completions are the same")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        fail("min_tokens", params.min_tokens, f"must be at most max_tokens={params.max_tokens}")
    trace = params.trace_decode_token_ids
    if trace is None:
        return
    if not trace:
        fail("trace_decode_token_ids", [], "must hold at least one token")
    if params.n != 1:
        fail("n", params.n, "must be 1 with trace_decode_token_ids")
    for name in (
        "structured_outputs",
        "bad_words",
        "allowed_token_ids",
        "repetition_detection",
        "min_tokens",
    ):
        if getattr(params, name):
            fail(name, getattr(params, name), "does not go together with trace_decode_token_ids")


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _integer(
    params: Any, name: str, *, least: int, most: int | None = None, hint: str = ""
) -> None:
    value = getattr(params, name)
    if not _is_integer(value):
        fail(name, value, "must be an integer")
    if value < least:
        fail(name, value, f"must be at least {least}{hint}")
    if most is not None and value > most:
        fail(name, value, f"must be at most {most}")


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        fail(name, value, "must be a finite number")
    return float(value)
