"""Sequences longer than the window: refused, left out or cut, and counted."""

from collections.abc import Sequence

from fornax.config.errors import DataError
from fornax.tune.data.encoded import Encoded, Limit, cut_end, cut_prompt
from fornax.tune.data.summary import Summary

__all__ = ["fit_answers", "fit_example", "fit_prompt"]


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
