"""A reward model as a judge of completions."""

from collections.abc import Sequence
from typing import Any, Protocol

from fornax.evaluate.generative import Answered
from fornax.rewards import Score
from fornax.tune.data import PromptTokens
from fornax.tune.rollout import Completion

__all__ = ["JUDGE", "Judge", "judge_by_model", "load_judge"]

JUDGE = "judge"
"""The name of its score among a completion's."""


class Judge(Protocol):
    """Whatever gives completions a number, higher for better; such as a reward model."""

    def score(self, prompts: Sequence[Any], completions: Sequence[Any]) -> Any:
        """Floats [N], the score of each completion of its prompt: both text, or both messages."""
        ...


def load_judge(path: str) -> Judge:
    """The reward model in the run of `fornax tune reward` at `path`.

    Raises:
      ConfigError, CheckpointError: no such run, or one of something else.
    """
    from fornax.tune.reward_model import load_reward_model

    return load_reward_model(path)


def judge_by_model(
    prompts: Sequence[PromptTokens],
    completions: Sequence[Sequence[Completion]],
    judge: Judge,
) -> list[Answered]:
    """The completions with the judge's score of each."""
    asked, given = [], []
    for prompt, group in zip(prompts, completions, strict=True):
        for each in group:
            chat = not isinstance(prompt.prompt, str)
            asked.append(prompt.prompt)
            given.append([{"role": "assistant", "content": each.text}] if chat else each.text)
    left = (float(value) for value in judge.score(asked, given))
    return [
        Answered(
            prompt=prompt,
            completions=list(group),
            scores=[Score(value, {JUDGE: value}) for value in (next(left) for _ in group)],
        )
        for prompt, group in zip(prompts, completions, strict=True)
    ]
