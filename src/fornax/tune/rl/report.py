"""The numbers of a round that people watch."""

import numpy as np

from fornax.tune.rl.credit import Credit
from fornax.tune.rl.rollouts import Collected

__all__ = ["round_numbers"]


def round_numbers(collected: Collected, credit: Credit, *, group_size: int) -> dict[str, float]:
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
