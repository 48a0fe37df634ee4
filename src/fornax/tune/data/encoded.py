"""Token ids with what of them is learned, kept within a window, and counted.

A mask marks targets: `mask[i]` says whether the loss counts token i, predicted from those before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fornax.config.errors import ConfigError, DataError

__all__ = ["Encoded", "Limit", "Summary", "TooLong", "fit_answers", "fit_example", "fit_prompt"]


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


@dataclass(kw_only=True)
class Summary:
    """Counts over a data set; what the window did to it is among them."""

    name: str
    """The files."""
    records: int = 0
    """Lines read."""
    examples: int = 0
    """What they became, after dropping."""
    tokens: int = 0
    """Tokens of all examples; both of a pair."""
    trained_tokens: int = 0
    """Tokens that the loss counts."""
    longest: int = 0
    """Tokens of the longest sequence kept."""
    dropped: int = 0
    """Examples left out because they are longer than the window."""
    truncated: int = 0
    """Examples cut to the window."""
    untrainable: int = 0
    """Examples left out because the cut left nothing to learn."""
    split: int = 0
    """Sequences added because a template rewrites earlier turns."""

    def add(self, *sequences: Encoded) -> None:
        """Count an example of these sequences."""
        self.examples += 1
        for sequence in sequences:
            self.tokens += sequence.length
            self.trained_tokens += sequence.trained
            self.longest = max(self.longest, sequence.length)

    def text(self) -> str:
        """One line to print."""
        share = f" ({self.trained_tokens / self.tokens:.0%} trained)" if self.trained_tokens else ""
        said = (
            f"{self.name}: {self.examples:,} examples, {self.tokens:,} tokens{share}, "
            f"longest {self.longest:,}"
        )
        counts = {
            "dropped as too long": self.dropped,
            "truncated": self.truncated,
            "dropped with nothing left to learn": self.untrainable,
            "split off where the template rewrites history": self.split,
        }
        return "; ".join([said, *(f"{n:,} {what}" for what, n in counts.items() if n)])


def fit_example(sequence: Encoded, limit: Limit, summary: Summary) -> Encoded | None:
    """An example of supervised fine-tuning; its end is cut.

    Raises:
      DataError: when it is too long and the policy is `error`, or nothing of it is learned.
    """
    if not sequence.trained:
        raise DataError("has no token to learn; write a longer text")
    if sequence.length <= limit.max_length:
        return sequence
    if _drops([sequence], limit, summary):
        return None
    kept = cut_end(sequence, limit.max_length)
    if not kept.trained:
        summary.untrainable += 1
        return None
    summary.truncated += 1
    return kept


def fit_answers(
    sequences: Sequence[Encoded], limit: Limit, summary: Summary, *, keep: int
) -> list[Encoded] | None:
    """Answers to one prompt; as many tokens of the prompt's beginning are cut from each.

    The last token of the prompt stays; an answer longer than what is left after that is cut too.

    Raises:
      DataError: when one is too long and the policy is `error`.
    """
    over = max(sequence.length for sequence in sequences) - limit.max_length
    if over <= 0:
        return list(sequences)
    if _drops(sequences, limit, summary):
        return None
    most = min(sequence.prompt for sequence in sequences) - keep - 1
    cut = [cut_prompt(sequence, min(over, most), keep=keep) for sequence in sequences]
    summary.truncated += 1
    return [cut_end(sequence, limit.max_length) for sequence in cut]


def fit_prompt(prompt: Encoded, limit: Limit, summary: Summary, *, keep: int) -> Encoded | None:
    """A prompt to be answered; its beginning is cut.

    Raises:
      DataError: when it is too long and the policy is `error`.
    """
    over = prompt.length - limit.max_length
    if over <= 0:
        return prompt
    if _drops([prompt], limit, summary):
        return None
    summary.truncated += 1
    return cut_prompt(prompt, over, keep=keep)


def _drops(sequences: Sequence[Encoded], limit: Limit, summary: Summary) -> bool:
    """Whether a sequence that is too long is left out."""
    if limit.too_long == "error":
        longest = max(sequences, key=lambda sequence: sequence.length)
        before = f", {longest.prompt} of them before the answer," if longest.prompt > 1 else ""
        raise DataError(
            f"has {longest.length} tokens{before} and the window is {limit.max_length}; shorten "
            "it, raise max_length, or set too_long to drop or truncate"
        )
    if limit.too_long == "drop":
        summary.dropped += 1
    return limit.too_long == "drop"
