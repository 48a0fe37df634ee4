"""Credit assignment: advantages of each completion or token, and the metrics of a round.

Legend: G groups, N completions of a group, n tokens of a completion. NumPy only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fornax.tune import advantages
from fornax.tune.config import AdaptiveKL, Algorithm, Estimator, FixedKL
from fornax.tune.rl.rollouts import Rollout, RolloutBatch

__all__ = [
    "Credit",
    "KLController",
    "divergence",
    "gae_credit",
    "group_credit",
    "round_numbers",
    "zero_variance",
]


@dataclass(frozen=True, kw_only=True)
class Credit:
    """What a loss needs to know of the rewards, one entry per completion."""

    rewards: list[float]
    """What the advantages were made from: the reward less penalties of length and divergence."""
    advantages: list[np.ndarray]
    """float32 [n]: of each token, 0 where the model did not draw it."""
    returns: list[np.ndarray] | None = None
    """float32 [n]: what a value function is to predict at each token; None: there is none."""
    numbers: dict[str, float] = field(default_factory=dict)
    """What is reported of it."""


def group_credit(
    rollouts: Sequence[Rollout],
    algorithm: Algorithm,
    *,
    group_size: int,
    max_tokens: int,
    divergences: Sequence[np.ndarray] | None = None,
) -> Credit:
    """Advantages from the rewards of a round.

    With `baseline: none` a token's advantage is what comes after it: the reward less the
    divergences from it on, whitened over all tokens when `scale` is `batch` (REINFORCE++).

    A failed completion has advantage 0, and the others of its group are compared without it.

    Args:
      rollouts: the completions, whole groups one after the other.
      algorithm: the options.
      group_size: N.
      max_tokens: the limit of a completion, for the penalty of length.
      divergences: float [n] each: estimates of the divergence from the reference at each token,
        to be taken off the reward; None takes nothing off.
    """
    rewards = np.array([r.reward for r in rollouts], np.float64)
    buffer = algorithm.overlong_buffer(max_tokens)
    if buffer and algorithm.overlong_penalty:
        lengths = np.array([r.drawn for r in rollouts])
        rewards = rewards + advantages.overlong_penalty(
            lengths, max_length=max_tokens, buffer=buffer, penalty=algorithm.overlong_penalty
        )
    costs = [
        algorithm.kl_coefficient * divergences[i] * rollout.learned
        if divergences is not None
        else np.zeros(len(rollout.tokens))
        for i, rollout in enumerate(rollouts)
    ]
    if algorithm.baseline == "none":
        found = _returns(rollouts, rewards, costs, whiten=algorithm.scale == "batch")
        return Credit(rewards=rewards.tolist(), advantages=found)
    rewards = rewards - np.array([cost.sum() for cost in costs])
    rewards_GN = rewards.reshape(-1, group_size)
    if algorithm.baseline == "leave_one_out":
        scores_GN = advantages.leave_one_out(rewards_GN)
    else:
        scores_GN = advantages.group_relative(rewards_GN, scale=algorithm.scale)
    return Credit(
        rewards=rewards.tolist(),
        advantages=[
            (score * rollout.learned).astype(np.float32)
            for score, rollout in zip(np.ravel(scores_GN), rollouts, strict=True)
        ],
    )


def _returns(
    rollouts: Sequence[Rollout], rewards: np.ndarray, costs: Sequence[np.ndarray], *, whiten: bool
) -> list[np.ndarray]:
    """Each token's reward to go, whitened over the tokens of the round."""
    to_go = [
        reward - np.cumsum(cost[::-1])[::-1] for reward, cost in zip(rewards, costs, strict=True)
    ]
    if whiten:
        mask = np.concatenate([r.learned for r in rollouts])
        flat = advantages.whiten(np.concatenate(to_go), mask)
        to_go = np.split(np.asarray(flat), np.cumsum([len(x) for x in to_go])[:-1])
    return [
        np.where(r.learned, x, 0).astype(np.float32) for x, r in zip(to_go, rollouts, strict=True)
    ]


def divergence(logps: np.ndarray, ref_logps: np.ndarray, estimator: Estimator) -> np.ndarray:
    """Estimates of KL(policy | reference) at each token, on the host: k1, k2, k3 of Schulman 2020.

    The loss's own estimates are `losses.kl_penalty`'s; those in a reward need no gradient, and have
    a different length for each completion, which JAX would compile again and again for.
    """
    ratio = np.asarray(logps, np.float64) - ref_logps
    if estimator == "k1":
        return ratio
    return ratio**2 / 2 if estimator == "k2" else np.expm1(-ratio) + ratio


def gae_credit(
    rollouts: Sequence[Rollout],
    rewards: Sequence[float],
    values: Sequence[np.ndarray],
    *,
    costs: Sequence[np.ndarray],
    gamma: float,
    lam: float,
    whiten_rewards: bool,
    whiten_advantages: bool,
) -> Credit:
    """Advantages and returns by generalised advantage estimation over the drawn tokens.

    Args:
      rollouts: the completions.
      rewards: of each, given at its last drawn token.
      values: float [n] each, the value function's output at each token.
      costs: float [n] each, taken off the reward of each token.
      gamma: discount.
      lam: weight of longer returns.
      whiten_rewards: divide the tokens' rewards by their standard deviation.
      whiten_advantages: centre and scale the advantages.
    """
    if not rollouts:
        return Credit(rewards=[], advantages=[], returns=[])
    mask_NT, values_NT, rewards_NT = (
        _padded(parts)
        for parts in (
            [r.learned.astype(np.float64) for r in rollouts],
            values,
            [
                -np.asarray(cost, np.float64) * r.learned
                for cost, r in zip(costs, rollouts, strict=True)
            ],
        )
    )
    for number, rollout in enumerate(rollouts):
        if rollout.learned.any():
            rewards_NT[number, np.flatnonzero(rollout.mask)[-1]] += rewards[number]
    if whiten_rewards:
        rewards_NT = advantages.whiten(rewards_NT, mask_NT, shift=False)
    advantages_NT, returns_NT = advantages.gae(rewards_NT, values_NT, mask_NT, gamma=gamma, lam=lam)
    if whiten_advantages:
        advantages_NT = advantages.whiten(advantages_NT, mask_NT)

    def parts(x_NT: np.ndarray) -> list[np.ndarray]:
        x_NT = np.asarray(x_NT * mask_NT, np.float32)
        return [x[: len(r.tokens)] for x, r in zip(x_NT, rollouts, strict=True)]

    return Credit(
        rewards=[float(x) for x in rewards],
        advantages=parts(advantages_NT),
        returns=parts(returns_NT),
        numbers={"value_explained": _explained(values_NT, returns_NT, mask_NT > 0)},
    )


def _explained(values_NT: np.ndarray, returns_NT: np.ndarray, drawn_NT: np.ndarray) -> float:
    """Share of the returns' variance that the values explain: 1 all of it, 0 none, below 0 worse
    than their mean would."""
    returns = np.asarray(returns_NT)[drawn_NT]
    if returns.size == 0 or np.var(returns) < 1e-12:
        return 0.0
    return float(1 - np.var(returns - np.asarray(values_NT)[drawn_NT]) / np.var(returns))


def _padded(parts: Sequence[np.ndarray]) -> np.ndarray:
    """float64 [N, T]: arrays of different lengths, zeros behind."""
    padded = np.zeros((len(parts), max(1, *(len(x) for x in parts))), np.float64)
    for number, part in enumerate(parts):
        padded[number, : len(part)] = part
    return padded


def zero_variance(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards are all alike, so that it teaches nothing; NaN is not a reward."""
    given = np.asarray(rewards, np.float64)
    given = given[~np.isnan(given)]
    return bool(given.size < 2 or np.ptp(given) < 1e-9)


@dataclass(kw_only=True)
class KLController:
    """The coefficient as it stands; `update` moves it after each round."""

    config: FixedKL | AdaptiveKL
    coefficient: float = field(init=False)

    def __post_init__(self) -> None:
        self.coefficient = self.config.coefficient

    def update(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Take a round's numbers; returns the coefficient that it used.

        beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon).
        """
        used = {"kl_coefficient": self.coefficient}
        config = self.config
        if isinstance(config, AdaptiveKL) and "kl_reference_sum" in numbers:
            error = numbers["kl_reference_sum"] / config.target - 1
            step = min(max(error, -0.2), 0.2) * numbers["rollout_completions"] / config.horizon
            self.coefficient *= 1 + step
        return used

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def restore(self, state: Mapping[str, float]) -> None:
        self.coefficient = state["coefficient"]


def round_numbers(collected: RolloutBatch, credit: Credit, *, group_size: int) -> dict[str, float]:
    """Rewards with their spread and sources, lengths, truncation, failures, zero-variance groups.

    `reward` is the mean over completions of the weighted sum of the functions; `reward_std` the
    mean over groups of their standard deviation (over all completions when groups are of one);
    `trained_reward` what is left of it after penalties of length and divergence. Completions that
    failed are in none of these but `rollouts_failed`.
    """
    groups = np.array([r.reward for r in collected.rollouts], np.float64)
    groups = groups.reshape(-1, group_size) if group_size > 1 else groups[None]
    rollouts = [r for r in collected.rollouts if not r.failed]
    if not rollouts:
        return dict(collected.numbers)
    rewards = np.array([r.reward for r in rollouts], np.float64)
    lengths = np.array([r.drawn for r in rollouts], np.float64)
    numbers = {
        "reward": float(rewards.mean()),
        "reward_std": _spread(groups),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "trained_reward": float(np.nanmean(credit.rewards)),
        "reward_failures": float(sum(r.failures for r in rollouts)),
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated": float(np.mean([r.truncated for r in rollouts])),
        "rollout_completions": float(len(rollouts)),
    }
    for name in sorted({name for r in rollouts for name in r.parts}):
        scores = np.array([r.parts.get(name, np.nan) for r in rollouts])
        if np.isfinite(scores).any():
            numbers[f"reward/{name}"] = float(scores[np.isfinite(scores)].mean())
    return numbers | collected.numbers


def _spread(rewards_GN: np.ndarray) -> float:
    """The mean over groups of their standard deviation, without those that have no reward."""
    given_GN = ~np.isnan(rewards_GN)
    count_G = given_GN.sum(axis=1)
    means_G1 = np.where(given_GN, rewards_GN, 0).sum(axis=1, keepdims=True) / np.maximum(
        count_G[:, None], 1
    )
    squares_G = np.where(given_GN, (rewards_GN - means_G1) ** 2, 0).sum(axis=1)
    return float(np.sqrt(squares_G[count_G > 0] / count_G[count_G > 0]).mean())
