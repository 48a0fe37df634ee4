"""Completions of prompts, scored by rewards or a reward model: means, failures, pass@k."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from fornax.config.errors import ConfigError
from fornax.evaluate.config import EvaluateConfig
from fornax.evaluate.model import EvaluatedModel
from fornax.evaluate.statistics import Estimate, mean, pass_at_k, share
from fornax.llm import EngineConfig
from fornax.rewards import RewardPool, Sample, Score
from fornax.tune.data import Limit, PromptTokens, load_prompts
from fornax.tune.data.records import Messages
from fornax.tune.rollout import Completion, LLMSampler, sample_seed

__all__ = [
    "JUDGE",
    "Answered",
    "Answerer",
    "Generative",
    "Judge",
    "judge_by_model",
    "judge_by_rewards",
    "load_judge",
    "open_pool",
    "read_prompts",
    "summarise",
]


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A prompt and its judged completions."""

    prompt: PromptTokens
    completions: list[Completion]
    scores: list[Score]


@dataclass(frozen=True, kw_only=True)
class Generative:
    """How well a model answers prompts."""

    prompts: int
    samples: int
    """Completions, of all prompts together."""
    reward: Estimate
    """Mean total reward; the interval is over prompts."""
    parts: dict[str, Estimate]
    """Mean of each reward where it applies and did not fail."""
    failures: dict[str, int]
    """Samples on which each reward failed."""
    passes: dict[int, Estimate]
    """pass@k by k; none where a reward model judged, whose scores have no zero."""
    tokens: Estimate
    """Mean length of a completion, its end included."""
    truncated: Estimate
    """Share of completions that ran out of tokens."""


def read_prompts(subject: EvaluatedModel, config: EvaluateConfig) -> list[PromptTokens]:
    """The prompts, with room for their completions in the model's window.

    Raises:
      DataError: lines that cannot be used, with file and number.
      ConfigError: a completion leaves no room for prompts.
    """
    room = subject.max_positions - config.sampling.max_tokens
    if room < 2:
        raise ConfigError(
            f"sampling.max_tokens={config.sampling.max_tokens} leaves no room for a prompt in the "
            f"{subject.max_positions} positions of {subject.name}; use fewer, such as "
            f"--sampling.max-tokens {max(1, subject.max_positions // 2)}"
        )
    limit = Limit(max_length=room)
    found = load_prompts(str(config.prompts), subject.codec, limit, columns=config.columns).items
    return found[: config.limit]


class Answerer:
    """Completions by the engine; models of one shape and tokenizer share its compiled steps."""

    def __init__(self, config: EvaluateConfig) -> None:
        self._config = config
        self._sampler: LLMSampler | None = None
        self._made_for: tuple[Any, ...] = ()

    def __call__(
        self, subject: EvaluatedModel, prompts: Sequence[PromptTokens]
    ) -> list[list[Completion]]:
        """The completions of each prompt; the same for the same weights, prompts and seed."""
        sampler = self._sampler_of(subject, max(len(prompt.tokens) for prompt in prompts))
        seeds = [sample_seed(self._config.seed, 0, number) for number in range(len(prompts))]
        asked = [prompt.tokens.tolist() for prompt in prompts]
        return sampler.sample(asked, self._config.sampling, seeds)

    def _sampler_of(self, subject: EvaluatedModel, longest: int) -> LLMSampler:
        origin = subject.origin
        shape = (origin.model_config, origin.eos_ids, longest, origin.tokenizer.backend.to_str())
        if self._sampler is not None and shape == self._made_for:
            self._sampler.update(subject.decoder, self._sampler.version + 1)
            return self._sampler
        self.close()
        seqs = self._config.max_num_seqs
        self._sampler = LLMSampler(
            subject.decoder,
            tokenizer=origin.tokenizer,
            eos_ids=origin.eos_ids,
            engine=EngineConfig(
                max_num_seqs=seqs,
                step_sizes="coarse",
                max_model_len=longest + self._config.sampling.max_tokens,
                max_num_batched_tokens=max(seqs, min(512, 1 << max(longest, 16).bit_length())),
            ),
        )
        self._made_for = shape
        return self._sampler

    def close(self) -> None:
        """Give the engine's memory back."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def judge_by_rewards(
    prompts: Sequence[PromptTokens],
    completions: Sequence[Sequence[Completion]],
    pool: RewardPool,
) -> list[Answered]:
    """The completions with what the pool's rewards say of them."""
    samples = [
        Sample(prompt.prompt, each.text, prompt.record, tuple(each.tokens.tolist()))
        for prompt, group in zip(prompts, completions, strict=True)
        for each in group
    ]
    left = iter(pool.score(samples))
    return [
        Answered(prompt=prompt, completions=list(group), scores=[next(left) for _ in group])
        for prompt, group in zip(prompts, completions, strict=True)
    ]


def open_pool(config: EvaluateConfig, prompts: Sequence[PromptTokens], log: Path) -> RewardPool:
    """The pool of `config.reward`, checked against the columns of every prompt.

    Raises:
      ConfigError, DataError: a reward that cannot be used.
    """
    pool = RewardPool(config.rewards, workers=config.reward_workers, log=log)
    try:
        for prompt in prompts:
            pool.check(prompt.record, prompt.where)
    except BaseException:
        pool.close()
        raise
    return pool


def summarise(
    answered: Sequence[Answered], names: Sequence[str], config: EvaluateConfig
) -> Generative:
    """The figures of judged completions.

    Args:
      answered: of each prompt.
      names: of the rewards; their counts are shown beside them.
      config: intervals, thresholds, k.
    """
    more = {"confidence": config.confidence, "seed": config.seed}
    totals = [[score.total for score in each.scores] for each in answered]
    scores = [score for each in answered for score in each.scores]
    names = list(dict.fromkeys([*names, *(name for score in scores for name in score.parts)]))
    parts = {
        name: mean(
            [_mean([s.parts.get(name, math.nan) for s in each.scores]) for each in answered], **more
        )
        for name in names
    }
    samples = [len(group) for group in totals]
    passed = [sum(total >= config.threshold for total in group) for group in totals]
    every = [completion for each in answered for completion in each.completions]
    return Generative(
        prompts=len(answered),
        samples=len(every),
        reward=mean([_mean(group) for group in totals], **more),
        parts=parts,
        failures={name: sum(name in score.notes for score in scores) for name in names},
        passes={
            k: pass_at_k(samples, passed, k, **more)
            for k in sorted(set(config.k))
            if config.judge is None
        },
        tokens=mean([_mean([len(c) for c in each.completions]) for each in answered], **more),
        truncated=share(
            [_mean([float(c.truncated) for c in each.completions]) for each in answered], **more
        ),
    )


def _mean(values: Sequence[float]) -> float:
    kept = [value for value in values if not math.isnan(value)]
    return sum(kept) / len(kept) if kept else math.nan


JUDGE = "judge"
"""The name of its score among a completion's."""


class Judge(Protocol):
    """Whatever gives completions a number, higher for better; such as a reward model."""

    def score(
        self, prompts: Sequence[str | Messages], completions: Sequence[str | Messages]
    ) -> np.ndarray:
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
