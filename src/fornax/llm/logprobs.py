"""Log probabilities from the device's arrays to what a request returns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fornax.llm.outputs import Logprob

__all__ = ["Scores", "TokenText", "pick"]

TokenText = Callable[[int], str]
"""The text of one token."""


class Scores(NamedTuple):
    """For some tokens in a row: their own log probabilities, and the most likely ones there."""

    logprob_M: np.ndarray
    rank_M: np.ndarray
    top_ids_MK: np.ndarray
    """Most likely first."""
    top_logprobs_MK: np.ndarray

    @classmethod
    def read(cls, found: Any) -> "Scores":
        """From the device's arrays of the same names; waits for them."""
        return cls(
            np.asarray(found.logprobs),
            np.asarray(found.ranks),
            np.asarray(found.top_ids),
            np.asarray(found.top_logprobs),
        )


def pick(
    scores: Scores, first: int, tokens: Sequence[int], wanted: int, text: TokenText | None
) -> list[Mapping[int, Logprob]]:
    """For each token, standing from place `first` on: itself and the `wanted` most likely ones.

    A `wanted` of -1 takes all that there are.
    """
    most = scores.top_ids_MK.shape[1]
    wanted = most if wanted < 0 else min(wanted, most)
    found: list[Mapping[int, Logprob]] = []
    for place, token in enumerate(tokens, start=first):
        one = {token: _entry(token, scores.logprob_M[place], scores.rank_M[place], text)}
        ids = scores.top_ids_MK[place, :wanted].tolist()
        values = scores.top_logprobs_MK[place, :wanted].tolist()
        for rank, (other, value) in enumerate(zip(ids, values, strict=True), start=1):
            if other not in one:
                one[other] = _entry(other, value, rank, text)
        found.append(one)
    return found


def _entry(token: int, logprob: float, rank: int, text: TokenText | None) -> Logprob:
    return Logprob(float(logprob), int(rank), None if text is None else text(token))
