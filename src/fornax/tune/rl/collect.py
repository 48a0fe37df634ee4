"""Rounds of rollouts: prompts in an order that can be resumed, completions, rewards."""

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jax.profiler import TraceAnnotation

from fornax.config.errors import DataError
from fornax.rewards import Sample, Score
from fornax.tune.data import PromptTokens
from fornax.tune.rl.credit import zero_variance
from fornax.tune.rl.rollouts import Rollout, RolloutBatch
from fornax.tune.rollout import Sampler, SampleSettings, Trajectory, sample_seed
from fornax.tune.rollout.storage import StateTree

__all__ = [
    "Closable",
    "Collector",
    "RewardManager",
    "SampleGroups",
    "sample_completions",
]


SampleGroups = Callable[
    [Sampler, Sequence[PromptTokens], SampleSettings, Sequence[int]], list[list[Trajectory]]
]
"""(sampler, prompts, settings, seeds) to `settings.n` completions for each prompt."""


@runtime_checkable
class Closable(Protocol):
    """A draw that holds processes."""

    def close(self) -> None:
        """End them."""


class RewardManager(Protocol):
    """What a `RewardPool` is to a collector."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One score per sample, in order."""

    def state(self) -> StateTree:
        """What the functions remember, JSON-able."""

    def restore(self, state: StateTree) -> None:
        """Let them remember it again."""

    def close(self) -> None:
        """End their processes."""


def sample_completions(
    sampler: Sampler,
    prompts: Sequence[PromptTokens],
    settings: SampleSettings,
    seeds: Sequence[int],
) -> list[list[Trajectory]]:
    """Plain completions: one answer of the model to each prompt."""
    groups = sampler.sample([p.tokens.tolist() for p in prompts], settings, seeds)
    return [
        [Trajectory(prompt=prompt.tokens, completion=completion) for completion in group]
        for prompt, group in zip(prompts, groups, strict=True)
    ]


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [count]: the prompts in the order of an epoch."""
    return np.random.default_rng([seed, 7, epoch]).permutation(count)


@dataclass(kw_only=True)
class Collector:
    """Makes rounds, one after the other; of itself it remembers `position` alone."""

    prompts: Sequence[PromptTokens]
    settings: SampleSettings
    groups: int
    """Prompts of a round."""
    seed: int
    shuffle: bool = True
    """Whether each pass over the prompts has an order of its own."""
    rewards: RewardManager | None
    """The reward functions; None where an environment gives all rewards."""
    draw: SampleGroups = sample_completions
    max_resamples: int = 0
    """Above 0: groups whose rewards are all alike are replaced, asking this many times more."""
    max_failed: float = 1.0
    """Share of a round's completions that may fail; more are an error."""
    position: int = 0
    """Prompts drawn so far."""

    def __call__(self, sampler: Sampler, number: int) -> RolloutBatch:
        """Draw and score round `number`, with what weights the sampler has now.

        Raises:
          DataError: a reward that never gives a number, or too many completions that failed.
        """
        before, began = sampler.stats(), time.monotonic()
        kept: list[list[Rollout]] = []
        failed: list[str] = []
        asked = alike = resamples = 0
        rewarding = 0.0
        while True:
            count = self._how_many(self.groups - len(kept), asked, alike)
            groups, seconds = self._groups(sampler, count, number)
            rewarding += seconds
            asked += len(groups)
            failed += [r.error or r.finish_reason for group in groups for r in group if r.failed]
            flat = [zero_variance([r.reward for r in group]) for group in groups]
            alike += sum(flat)
            if not self.max_resamples:
                kept += groups
                break
            kept += [group for group, same in zip(groups, flat, strict=True) if not same]
            if len(kept) >= self.groups or resamples == self.max_resamples:
                break
            resamples += 1
        self._check_failed(failed, asked * self.settings.n, number)
        rollouts = [r for group in kept[: self.groups] for r in group]
        versions = [int(v) for r in rollouts for v in r.versions[r.versions >= 0]]
        used = sampler.stats().minus(before)
        seconds = time.monotonic() - began
        return RolloutBatch(
            number=number,
            version=min(versions, default=-1),
            position=self.position,
            rollouts=rollouts,
            numbers={
                **({"zero_variance_groups": alike / asked} if self.settings.n > 1 else {}),
                "rollouts_failed": float(len(failed)),
                "groups_sampled": float(asked),
                "groups_missing": float(max(self.groups - len(kept), 0)),
                "rollout_seconds": seconds,
                "rollout_tokens_per_second": used.tokens / max(used.seconds, 1e-9),
                "rollout_occupancy": used.occupancy,
                "rollout_compilations": float(used.compilations),
                "reward_seconds": rewarding,
            },
        )

    def state(self) -> StateTree:
        """Where it stands, and what the rewards remember."""
        return {
            "position": self.position,
            "judge": {} if self.rewards is None else self.rewards.state(),
        }

    def restore(self, state: StateTree) -> None:
        self.position = state["position"]
        if self.rewards is not None:
            self.rewards.restore(state["judge"])

    def close(self) -> None:
        """End the processes of reward functions and tools."""
        if self.rewards is not None:
            self.rewards.close()
        if isinstance(self.draw, Closable):
            self.draw.close()

    def _how_many(self, missing: int, asked: int, alike: int) -> int:
        """Prompts to sample, if groups keep differing as often as they did."""
        if not asked:
            return missing
        useful = max((asked - alike) / asked, 0.25)
        return min(math.ceil(missing / useful), self.groups)

    def _check_failed(self, failed: Sequence[str], drawn: int, number: int) -> None:
        """Stop where the environment, not the model, decides what is learned."""
        if len(failed) <= self.max_failed * drawn:
            return
        [(most, times)] = Counter(failed).most_common(1)
        raise DataError(
            f"{len(failed)} of {drawn} conversations of round {number} failed, and "
            f"conversation.max_failed={self.max_failed} allows {self.max_failed:.0%}; {times} with "
            f"{most!r}. Correct the environment, or allow more"
        )

    def _which(self, place: int) -> int:
        epoch, place = divmod(place, len(self.prompts))
        return int(_order(len(self.prompts), self.seed, epoch)[place]) if self.shuffle else place

    def _groups(
        self, sampler: Sampler, count: int, number: int
    ) -> tuple[list[list[Rollout]], float]:
        places = range(self.position, self.position + count)
        self.position += count
        picked = [self.prompts[self._which(place)] for place in places]
        seeds = [sample_seed(self.seed, number, place) for place in places]
        with TraceAnnotation("input/rollouts"):
            drawn = self.draw(sampler, picked, self.settings, seeds)
        began = time.monotonic()
        samples = [
            Sample(
                prompt=prompt.prompt,
                completion=each.completion.text,
                record=prompt.record,
                tokens=tuple(each.completion.tokens.tolist()),
                tools=prompt.tools,
            )
            for prompt, group in zip(picked, drawn, strict=True)
            for each in group
            if each.completion.status != "failed"
        ]
        with TraceAnnotation("input/rewards"):
            scores = self.rewards.score(samples) if self.rewards is not None else None
        if scores is not None and number == 0:
            _require_numbers(scores)
        given = iter([None] * len(samples) if scores is None else scores)
        found = [
            [
                _rollout(
                    each,
                    None if each.completion.status == "failed" else next(given),
                    where=prompt.where,
                    group=place,
                )
                for each in group
            ]
            for prompt, group, place in zip(picked, drawn, places, strict=True)
        ]
        return found, time.monotonic() - began


def _rollout(drawn: Trajectory, score: Score | None, *, where: str, group: int) -> Rollout:
    completion = drawn.completion
    parts = {**(score.parts if score is not None else {}), **drawn.rewards}
    reward = (score.total if score is not None else 0.0) + sum(drawn.rewards.values())
    return Rollout(
        prompt=np.asarray(drawn.prompt, np.int32),
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        versions=completion.versions,
        mask=completion.mask,
        finish_reason=completion.finish_reason,
        status=completion.status,
        error=drawn.error,
        text=completion.text,
        where=where,
        group=group,
        reward=math.nan if completion.status == "failed" else reward,
        parts=parts,
        failures=len(score.notes) if score is not None else 0,
        routed_experts=completion.routed_experts,
    )


def _require_numbers(scores: Sequence[Score]) -> None:
    """Refuse to start where a reward function never gives a number."""
    for name in scores[0].parts if scores else ():
        if all(np.isnan(score.parts.get(name, np.nan)) for score in scores):
            notes = [score.notes[name] for score in scores if name in score.notes]
            why = f": {notes[0]}" if notes else ""
            raise DataError(
                f"the reward {name} gave no number for any of the first {len(scores)} "
                f"completions{why}. Correct it before training: all would be rewarded alike"
            )
