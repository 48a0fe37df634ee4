"""What a reward is asked of, what it is asked about, and what it says."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fornax.config.errors import ConfigError

__all__ = ["Message", "RewardSpec", "Sample", "Score", "Verdict"]

Message = Mapping[str, Any]
"""A message of a chat, in OpenAI's form."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """One reward: a function of the user's or a built-in verifier, its weight, its limits.

    Raises `ConfigError` for numbers that make no sense.
    """

    function: str
    """FILE.py:NAME, a dotted MODULE:NAME, or a built-in verifier: math, code, json_schema, regex,
    python_parses, answers_signature."""
    weight: float = 1.0
    """What the total multiplies this reward with."""
    timeout_seconds: float = 10.0
    """The longest a call may take; a verifier of programs has limits of its own within this."""
    failure_score: float = 0.0
    """What counts in the total when the function crashes, hangs, raises or answers nonsense."""
    name: str = ""
    """What metrics call it (default: the function's own name)."""
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    """Settings of a built-in verifier, by name; a user's function takes none."""

    def __post_init__(self) -> None:
        if not self.function:
            raise ConfigError(
                "a reward names no function; give FILE.py:NAME or a built-in verifier"
            )
        for field in ("weight", "failure_score"):
            if not math.isfinite(getattr(self, field)):
                raise ConfigError(
                    f"{field}={getattr(self, field)} of {self.function} is not a number"
                )
        if not 0 < self.timeout_seconds <= 86400:
            raise ConfigError(
                f"timeout_seconds={self.timeout_seconds} of {self.function} must be above 0 and at "
                "most 86400"
            )

    @property
    def label(self) -> str:
        """The name in metrics and logs."""
        return self.name or self.function.rpartition(":")[2]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion to be judged."""

    prompt: str | Sequence[Message]
    """Text, or the messages of a chat."""
    completion: str
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The other columns of the prompt's line of data."""
    tokens: Sequence[int] = ()
    """The completion's token ids, for functions that ask for `completion_ids`."""
    tools: list[dict[str, Any]] | None = None
    """Functions offered to the chat's model, in OpenAI's form; functions do not get them."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a reward function may give in place of a number, to have more of it counted."""

    value: float | None
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Numbers that metrics show beside the value, as NAME.COUNT; they change no total."""


@dataclasses.dataclass(frozen=True)
class Score:
    """What all rewards say of one sample."""

    total: float
    """Sum of weight times part; a failed part counts its failure score, one that does not apply
    counts nothing."""
    parts: Mapping[str, float]
    """Each reward's own value, without its weight, NaN where it failed or does not apply; and its
    counts, as NAME.COUNT."""
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why a part failed, for those that did."""
