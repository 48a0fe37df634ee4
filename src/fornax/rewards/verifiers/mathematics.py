"""Is the answer of a solution equal to the reference, as mathematics? By math-verify and sympy."""

import functools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fornax.config.errors import ConfigError
from fornax.rewards.verifiers.extract import answer_text
from fornax.rewards.verifiers.quantity import agree, quantity, several

__all__ = ["TABLE", "MathOptions", "equal"]

_LIMIT = 2000


@dataclass(frozen=True, kw_only=True)
class MathOptions:
    """What the verifier `math` compares with."""

    column: str = "answer"
    r"""The column of the reference: a bare answer, or a solution that ends in \boxed{} or ####."""
    digits: int = 6
    """Decimal places that must agree where the reference is a decimal fraction or irrational."""


def _math(options: MathOptions) -> tuple[Callable[..., float], tuple[str, ...]]:
    _library()
    if options.digits < 1:
        raise ConfigError(f"digits={options.digits} must be 1 or more")

    def verify(prompt: object, completion: str, **record: object) -> float:
        del prompt
        reference = str(record[options.column])
        marked = "####" in reference or "boxed" in reference
        wanted = answer_text(reference) if marked else reference.strip()
        found = answer_text(completion)
        if not found or not wanted:
            return 0.0
        return float(equal(wanted, found, options.digits))

    return verify, (options.column,)


def equal(wanted: str, found: str, digits: int = 6) -> bool:
    """Whether two answers are equal as text, as numbers, or as expressions, sets and intervals.

    What cannot be parsed is equal to nothing but itself.
    """
    if _plain(wanted) == _plain(found):
        return True
    numbers = quantity(wanted), quantity(found)
    if numbers[0] is not None and numbers[1] is not None:
        return agree(numbers[0], numbers[1], digits)
    if numbers != (None, None) and (several(wanted) or several(found)):
        return False  # "1 2" and "1,2" are two numbers, which the parser would join
    if len(found) > _LIMIT:  # parsing takes time that grows fast
        return False
    verify = _library()[1]
    gold, answer = _parsed(wanted), _parsed(found)
    if not gold or not answer:
        return False
    return bool(verify(list(gold), list(answer), float_rounding=digits, timeout_seconds=None))


@functools.cache
def _library() -> tuple[Callable[..., Any], Callable[..., Any], list[Any]]:
    """`parse` and `verify` of math-verify, and the forms to look for."""
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the verifier math needs math-verify: pip install 'fornax-ai[tune]'"
        ) from error
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # that it has no time limit: the pool has
    return parse, verify, [LatexExtractionConfig(), ExprExtractionConfig()]


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[Any, ...]:
    parse, _, forms = _library()
    found = parse(f"${text}$", forms, parsing_timeout=None)
    return tuple(found)


def _plain(text: str) -> str:
    """Text without white space, but for that between digits, which parts numbers."""
    spaced = re.sub(r"\s+|\\[,;!]|\$", " ", text).strip()
    return re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r" +", " ", spaced)).rstrip(".").casefold()


TABLE = {"math": (MathOptions, _math)}
