"""A trained reward model as a judge of completions, alone or beside reward functions."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fornax.config.errors import DataError
from fornax.rewards import Sample, Score
from fornax.tune.data import Encoded
from fornax.tune.reward_model import RewardModel

__all__ = ["ModelJudge"]

_NAME = "reward_model"


@dataclass(frozen=True)
class ModelJudge:
    """Adds a reward model's score to what the functions say.

    It computes in the trainer's own process; nothing of it changes while a run lasts.
    """

    model: RewardModel
    weight: float
    functions: Any = None
    """A `RewardPool` or another judge; None: the model alone."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One score a sample, in order.

        A completion of a chat is scored as the assistant's message, in the reward model's own
        template. One that the reward model cannot read, or has no room for, counts nothing, and a
        note says why.
        """
        given = (
            [Score(total=0.0, parts={}) for _ in samples]
            if self.functions is None
            else self.functions.score(samples)
        )
        found = [self._encode(sample) for sample in samples]
        readable = [each for each in found if isinstance(each, Encoded)]
        values = iter(self.model.score_encoded(readable).tolist())
        return [
            self._without(score, each) if isinstance(each, str) else self._with(score, next(values))
            for score, each in zip(given, found, strict=True)
        ]

    def _encode(self, sample: Sample) -> Encoded | str:
        """The sample's tokens, or why the reward model cannot read them."""
        codec = self.model.codec
        text = codec.pieces.without_special(sample.completion)  # it might spell an end of turn
        try:
            if isinstance(sample.prompt, str):
                encoded = codec.completion(sample.prompt, text)
            else:
                asked = [dict(message) for message in sample.prompt]
                answer = {"role": "assistant", "content": text}
                encoded = codec.completion(asked, [answer], sample.tools)
        except DataError as error:
            return str(error)
        if encoded.length > self.model.max_length:
            return f"{encoded.length} tokens, and the reward model reads {self.model.max_length}"
        return encoded

    def _with(self, score: Score, value: float) -> Score:
        parts = {**score.parts, _NAME: value}
        return dataclasses.replace(score, total=score.total + self.weight * value, parts=parts)

    def _without(self, score: Score, why: str) -> Score:
        parts, notes = {**score.parts, _NAME: math.nan}, {**score.notes, _NAME: why}
        return dataclasses.replace(score, parts=parts, notes=notes)

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
