"""Whether a completion has begun to repeat itself."""

from collections.abc import Sequence

from fornax.llm.sampling_params import RepetitionDetectionParams

__all__ = ["repeats"]


def repeats(tokens: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Whether the tokens end with a pattern of an allowed size, `min_count` times in a row."""
    longest = min(params.max_pattern_size, len(tokens) // max(params.min_count, 1))
    for size in range(max(params.min_pattern_size, 1), longest + 1):
        if tokens[-1] != tokens[-1 - size]:
            continue
        tail = list(tokens[-size * params.min_count :])
        # A stretch is one pattern again and again when it equals itself moved by the pattern.
        if tail[size:] == tail[:-size]:
            return True
    return False
