"""A trained reward model as a judge of completions, alone or beside reward functions."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fornax.rewards import Sample, Score
from fornax.tune.data import Encoded

__all__ = ["ModelJudge", "Scorer"]

_NAME = "reward_model"


class Scorer(Protocol):
    """What a `RewardModel` is to a judge."""

    max_length: int
    """Tokens of a sequence at most."""

    @property
    def codec(self) -> Any:
        """What encodes for it."""
        ...

    def score_encoded(self, sequences: Sequence[Encoded]) -> np.ndarray:
        """A score for each sequence, float32."""
        ...


@dataclass(frozen=True)
class ModelJudge:
    """Adds a reward model's score to what the functions say.

    It computes in the trainer's own process; nothing of it changes while a run lasts.
    """

    model: Scorer
    weight: float
    functions: Any = None
    """A `RewardPool` or another judge; None: the model alone."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One score a sample, in order.

        A completion that the reward model has no room for counts nothing, and a note says so.
        """
        given = (
            [Score(total=0.0, parts={}) for _ in samples]
            if self.functions is None
            else self.functions.score(samples)
        )
        encoded = [self.model.codec.completion(s.prompt, s.completion) for s in samples]
        fits = [e.length <= self.model.max_length for e in encoded]
        values = np.full(len(samples), math.nan)
        values[fits] = self.model.score_encoded(
            [e for e, fit in zip(encoded, fits, strict=True) if fit]
        )
        return [
            self._with(score, float(value), each.length)
            for score, value, each in zip(given, values, encoded, strict=True)
        ]

    def _with(self, score: Score, value: float, length: int) -> Score:
        parts = {**score.parts, _NAME: value}
        if math.isnan(value):
            note = f"{length} tokens, and the reward model reads {self.model.max_length}"
            return dataclasses.replace(score, parts=parts, notes={**score.notes, _NAME: note})
        return dataclasses.replace(score, total=score.total + self.weight * value, parts=parts)

    def state(self) -> dict[str, Any]:
        """What the functions remember; the model remembers nothing."""
        return {} if self.functions is None else self.functions.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let the functions remember it again."""
        if self.functions is not None:
            self.functions.restore(state)

    def close(self) -> None:
        """End the functions' processes."""
        if self.functions is not None:
            self.functions.close()
