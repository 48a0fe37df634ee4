"""Whether a completion has begun to repeat itself."""

import numpy as np

from fornax.llm.sampling_params import RepetitionDetectionParams

__all__ = ["RepetitionDetector"]


class RepetitionDetector:
    """Follows one completion; a token takes the same time wherever it stands.

    A stretch is one pattern again and again when it equals itself moved by the pattern, so for
    each size of pattern it is enough to count for how many tokens that has been so.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._sizes = np.arange(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
        self._needed = self._sizes * (max(params.min_count, 1) - 1)
        self._counts = np.zeros(len(self._sizes), np.int64)
        # Every token stands twice, so that the last ones always lie in a row.
        self._most = max(params.max_pattern_size, 1)
        self._ring = np.full(2 * self._most, -1, np.int64)
        self._at = 0

    def push(self, token: int) -> bool:
        """Take a token; whether the tokens now end with a pattern `min_count` times in a row."""
        last = self._ring[self._at : self._at + self._most][::-1]
        same = last[self._sizes - 1] == token
        self._counts = np.where(same, self._counts + 1, 0)
        self._ring[[self._at, self._at + self._most]] = token
        self._at = (self._at + 1) % self._most
        return bool((self._counts >= self._needed).any())
