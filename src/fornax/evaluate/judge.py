"""A reward model as a judge of completions.

Legend: N sequences, T tokens of a row.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from fornax.evaluate.generative import Answered
from fornax.rewards import Score
from fornax.tune.data import Codec, PromptTokens
from fornax.tune.rollout import Completion

__all__ = ["Judge", "RewardModelJudge", "judge_by_model", "load_judge"]

JUDGE = "judge"
"""The name of its score among a completion's."""


class Judge(Protocol):
    """Whatever gives sequences a number, higher for better."""

    codec: Codec
    """How sequences become its tokens."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The score of each sequence of token ids, prompt and completion together."""
        ...


class RewardModelJudge:
    """A decoder with a scalar head, as `fornax tune reward` trains it."""

    def __init__(self, model: Any, codec: Codec, *, batch: int = 8) -> None:
        """Take a model.

        Args:
          model: a decoder with a `reward_head`.
          codec: of its tokenizer and chat template.
          batch: sequences at a time.
        """
        from fornax.tune.tasks.reward_model import scores

        self.codec = codec
        self._batch = batch
        model.eval()
        graphdef, self._state = nnx.split(model)
        self._longest = model.config.max_position_embeddings

        def score(state: Any, rows: dict[str, jax.Array]) -> jax.Array:
            return scores(nnx.merge(graphdef, state), rows)

        self._score = jax.jit(score)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """See `Judge.score`; what is longer than the model's window loses its beginning."""
        found: list[float] = []
        order = sorted(range(len(sequences)), key=lambda n: len(sequences[n]))
        for first in range(0, len(order), self._batch):
            group = [sequences[n][-self._longest :] for n in order[first : first + self._batch]]
            width = min(self._longest, 1 << max(5, (len(group[-1]) - 1).bit_length()))
            tokens_NT = np.zeros((self._batch, width), np.int32)
            segments_NT = np.zeros((self._batch, width), np.int32)
            for row, tokens in enumerate(group):
                tokens_NT[row, : len(tokens)] = tokens
                segments_NT[row, : len(tokens)] = 1
            positions_NT = np.broadcast_to(np.arange(width, dtype=np.int32), tokens_NT.shape)
            rows = {"tokens": tokens_NT, "segment_ids": segments_NT, "positions": positions_NT}
            found += np.asarray(self._score(self._state, rows))[: len(group)].tolist()
        return [found[place] for place in np.argsort(order)]


def load_judge(path: str) -> Judge:
    """The judge in the run of a reward model.

    Raises:
      ConfigError, CheckpointError: no such run, or one of something else.
    """
    from fornax.tune.reward_models import load_reward_model

    model, origin = load_reward_model(path)
    codec = Codec(origin.tokenizer, template=origin.template, eos_ids=origin.eos_ids)
    return RewardModelJudge(model, codec)


def judge_by_model(
    prompts: Sequence[PromptTokens],
    completions: Sequence[Sequence[Completion]],
    judge: Judge,
) -> list[Answered]:
    """The completions with the judge's score of each, encoded as its training pairs were."""
    sequences = [
        _encoded(prompt, each.text, judge.codec)
        for prompt, group in zip(prompts, completions, strict=True)
        for each in group
    ]
    left = iter(judge.score(sequences))
    return [
        Answered(
            prompt=prompt,
            completions=list(group),
            scores=[Score(value, {JUDGE: value}) for value in (next(left) for _ in group)],
        )
        for prompt, group in zip(prompts, completions, strict=True)
    ]


def _encoded(prompt: PromptTokens, text: str, codec: Codec) -> list[int]:
    answer: Any = text
    if not isinstance(prompt.prompt, str):
        answer = [{"role": "assistant", "content": text}]
    return codec.completion(prompt.prompt, answer, prompt.tools).tokens.tolist()
