"""Token ids with what of them is learned, and how they are kept within a window.

A mask marks targets: `mask[i]` says whether the loss counts token i, predicted from those before.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fornax.config.errors import ConfigError

__all__ = ["Encoded", "Limit", "TooLong", "cut_end", "cut_prompt"]

TooLong = Literal["error", "drop", "truncate"]
"""What happens to examples longer than the window."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """One sequence to train on."""

    tokens: np.ndarray
    """int32 `[n]`."""
    mask: np.ndarray
    """bool `[n]`: the loss counts this token. Never the first one: nothing predicts it."""
    prompt: int
    """Tokens before the first trained one."""

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self.tokens)

    @property
    def trained(self) -> int:
        """Tokens that the loss counts."""
        return int(self.mask.sum())


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The window, and what to do with what does not fit."""

    max_length: int
    """Most tokens of a sequence, its end token included."""
    too_long: TooLong = "error"
    """`error` names every such line, `drop` leaves it out, `truncate` cuts it; both are counted."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ConfigError(f"max_length={self.max_length} must be at least 2")


def encoded(tokens: np.ndarray, mask: np.ndarray) -> Encoded:
    """A sequence from its tokens and mask; the first token is never a target."""
    mask = np.array(mask, bool)
    mask[:1] = False
    first = np.flatnonzero(mask)
    return Encoded(
        tokens=np.asarray(tokens, np.int32),
        mask=mask,
        prompt=int(first[0]) if len(first) else len(mask),
    )


def cut_end(sequence: Encoded, length: int) -> Encoded:
    """The first `length` tokens; an end token that is cut off is not learned."""
    return encoded(sequence.tokens[:length], sequence.mask[:length])


def cut_prompt(sequence: Encoded, count: int, *, keep: int = 0) -> Encoded:
    """Without `count` tokens of the prompt's beginning, after its first `keep` (a BOS)."""
    count = max(0, min(count, sequence.prompt - keep))
    left = np.r_[0:keep, keep + count : sequence.length]
    return encoded(sequence.tokens[left], sequence.mask[left])
