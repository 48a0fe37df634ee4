"""Rollouts: one record per completion, with its reward; kept whole in a checkpoint."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fornax.tune.rollout import Status
from fornax.tune.rollout.storage import (
    TOKEN_ARRAYS,
    concatenated,
    parted,
    routed_from_arrays,
    routed_to_arrays,
)

__all__ = ["Rollout", "RolloutBatch", "from_arrays", "to_arrays"]

_ARRAYS = {"prompt": np.int32, **TOKEN_ARRAYS}


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A completion (or a whole conversation with an environment) with its reward."""

    prompt: np.ndarray
    """int32 tokens before the completion."""
    tokens: np.ndarray
    """int32 [n]: all that follows the prompt, the end token and an environment's words included."""
    logprobs: np.ndarray
    """float32 [n]: the sampler's log-probabilities; 0 where `mask` is 0."""
    versions: np.ndarray
    """int32 [n]: optimizer steps behind the weights that drew each token; -1 where not drawn."""
    mask: np.ndarray
    """int8 [n]: 1 where the model drew the token."""
    finish_reason: str
    """Why it ended."""
    status: Status
    """`failed`: nothing is learned from it, and it is in no statistic; `truncated`: it ran out of
    tokens or turns."""
    text: str
    """The completion's text."""
    where: str
    """The file and line its prompt is from."""
    group: int
    """Which prompt of the rollout it answers; completions of one group share it."""
    reward: float
    """The weighted sum of the reward functions; NaN where it failed."""
    parts: Mapping[str, float]
    """Each reward function's score, before its weight; NaN where it gave none."""
    failures: int = 0
    """Reward functions that failed on it."""
    error: str = ""
    """How it failed, if it did."""
    routed_experts: np.ndarray | None = None
    """See `rollout.Completion`."""

    @property
    def failed(self) -> bool:
        """Whether there is nothing to learn from it."""
        return self.status == "failed"

    @property
    def truncated(self) -> bool:
        """Whether it ran out of tokens or turns."""
        return self.status == "truncated"

    @property
    def learned(self) -> np.ndarray:
        """int8 [n]: `mask`, and 0 everywhere where it failed."""
        return np.zeros_like(self.mask) if self.failed else self.mask

    @property
    def sequence(self) -> np.ndarray:
        """The prompt and what follows it."""
        return np.concatenate([self.prompt, self.tokens])

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return len(self.prompt) + len(self.tokens)

    @property
    def drawn(self) -> int:
        """Tokens that the model drew."""
        return int(np.sum(self.mask))


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The rollouts of one round, groups together and complete."""

    number: int
    """Which round it is, from 0."""
    version: int
    """Optimizer steps behind the oldest weights that drew a token of it; -1: it has none."""
    position: int
    """Prompts drawn from the data after it."""
    rollouts: list[Rollout]
    numbers: dict[str, float] = field(default_factory=dict)
    """What is reported of it."""


def to_arrays(collected: RolloutBatch) -> dict[str, np.ndarray]:
    """A round as arrays, to be stored; `from_arrays` gives it back exactly."""
    rollouts = collected.rollouts
    arrays = {**concatenated(rollouts, _ARRAYS), **routed_to_arrays(rollouts)}
    plain = {
        "number": collected.number,
        "version": collected.version,
        "position": collected.position,
        "numbers": collected.numbers,
        "rollouts": [_plain(rollout) for rollout in rollouts],
        "lengths": [[len(r.prompt), len(r.tokens)] for r in rollouts],
    }
    arrays["plain"] = np.frombuffer(json.dumps(plain).encode(), np.uint8)
    return arrays


def from_arrays(arrays: Mapping[str, np.ndarray]) -> RolloutBatch:
    """The round that `to_arrays` stored."""
    plain = json.loads(arrays["plain"].tobytes())
    prompts = parted(arrays["prompt"], [prompt for prompt, _ in plain["lengths"]])
    sizes = [completion for _, completion in plain["lengths"]]
    columns = {name: parted(arrays[name], sizes) for name in _ARRAYS if name != "prompt"}
    columns["prompt"] = prompts
    routed = routed_from_arrays(arrays, len(plain["rollouts"]))
    rollouts = []
    for number, rest in enumerate(plain["rollouts"]):
        fields: dict[str, Any] = {name: column[number] for name, column in columns.items()}
        rollouts.append(Rollout(**fields, **rest, routed_experts=routed[number]))
    kept = ("number", "version", "position", "numbers")
    return RolloutBatch(rollouts=rollouts, **{name: plain[name] for name in kept})


def _plain(rollout: Rollout) -> dict[str, Any]:
    apart = (*_ARRAYS, "routed_experts")
    fields = (f.name for f in dataclasses.fields(rollout) if f.name not in apart)
    return {name: getattr(rollout, name) for name in fields}
