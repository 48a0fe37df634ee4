"""Advantages of a round against loops written out: penalties, masks, returns, GAE."""

import dataclasses
import math

import numpy as np
import pytest
from tests.unit.tune.rl.test_rows import rollout

from fornax.tune.config import DAPO, GRPO, RLOO, Algorithm, ReinforcePlusPlus
from fornax.tune.rl.credit import Credit, divergence, gae_credit, group_credit
from fornax.tune.rl.rollouts import Rollout

MASKS = [[1, 1, 0, 1], [1], [1, 1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1]]
ROLLOUTS = [rollout(2, mask, number) for number, mask in enumerate(MASKS)]
REWARDS = np.array([0.25 * number for number in range(4)])
COSTS = [np.linspace(-0.3, 0.7, len(mask)) for mask in MASKS]


def test_the_overlong_penalty_counts_drawn_tokens() -> None:
    algorithm = DAPO(overlong_tokens=4)
    found = group_credit(ROLLOUTS, algorithm, group_size=4, max_tokens=8)
    drawn = np.array([sum(mask) for mask in MASKS])
    expected = REWARDS - np.clip((drawn - 4) / 4, 0, 1)
    np.testing.assert_allclose(found.rewards, expected)
    spread = expected.std(ddof=1) + 1e-4
    for number, each in enumerate(found.advantages):
        alone = (expected[number] - expected.mean()) / spread * np.array(MASKS[number])
        np.testing.assert_allclose(each, alone, rtol=1e-5, atol=1e-6)
    assert DAPO().overlong_buffer(20) == 4
    assert GRPO().overlong_buffer(20) == 0


def test_a_divergence_in_the_reward_is_a_sum_over_drawn_tokens() -> None:
    algorithm = RLOO(kl_coefficient=0.5)
    found = group_credit(ROLLOUTS, algorithm, group_size=2, max_tokens=8, divergences=COSTS)
    whole = [
        r - 0.5 * sum(c * m) for r, c, m in zip(REWARDS, COSTS, map(np.array, MASKS), strict=True)
    ]
    np.testing.assert_allclose(found.rewards, whole)
    for number, each in enumerate(found.advantages):
        other = whole[number ^ 1]
        np.testing.assert_allclose(
            each, (whole[number] - other) * np.array(MASKS[number]), rtol=1e-5
        )


def test_without_a_baseline_a_token_answers_for_what_follows_it() -> None:
    algorithm = ReinforcePlusPlus(kl_coefficient=0.5)
    found = group_credit(ROLLOUTS, algorithm, group_size=1, max_tokens=8, divergences=COSTS)
    to_go = []
    for reward, cost, mask in zip(REWARDS, COSTS, MASKS, strict=True):
        for t, drawn in enumerate(mask):
            left = sum(c * m for c, m in zip(cost[t:], mask[t:], strict=True))
            if drawn:
                to_go.append(reward - 0.5 * left)
    values = (np.array(to_go) - np.mean(to_go)) / np.std(to_go, ddof=1)
    got = np.concatenate(
        [x[np.array(m, bool)] for x, m in zip(found.advantages, MASKS, strict=True)]
    )
    np.testing.assert_allclose(got, values, rtol=1e-4, atol=1e-5)
    for each, mask in zip(found.advantages, MASKS, strict=True):
        assert not each[~np.array(mask, bool)].any()


@pytest.mark.parametrize("whiten", [False, True])
def test_gae_gives_the_reward_at_the_last_drawn_token(whiten: bool) -> None:
    values = [np.linspace(0.1, 0.4, len(mask)) for mask in MASKS]
    found = gae_credit(
        ROLLOUTS,
        REWARDS.tolist(),
        values,
        costs=COSTS,
        gamma=0.9,
        lam=0.8,
        whiten_rewards=False,
        whiten_advantages=whiten,
    )
    expected = []
    for reward, value, cost, mask in zip(REWARDS, values, COSTS, MASKS, strict=True):
        places = [t for t, drawn in enumerate(mask) if drawn]
        after, following, alone = 0.0, 0.0, {}
        for t in reversed(places):
            gained = -cost[t] + (reward if t == places[-1] else 0.0)
            after = gained + 0.9 * following - value[t] + 0.9 * 0.8 * after
            following, alone[t] = value[t], after
        expected.append([alone[t] for t in places])
    flat = np.concatenate(expected)
    kept = [np.array(mask, bool) for mask in MASKS]
    assert found.returns is not None
    returns = np.concatenate([x[m] for x, m in zip(found.returns, kept, strict=True)])
    heard = np.concatenate([v[m] for v, m in zip(values, kept, strict=True)])
    np.testing.assert_allclose(returns, flat + heard, rtol=1e-5, atol=1e-6)
    got = np.concatenate([x[m] for x, m in zip(found.advantages, kept, strict=True)])
    wanted = (flat - flat.mean()) / flat.std(ddof=1) if whiten else flat
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_estimators_of_the_divergence() -> None:
    logps, reference = np.array([-1.0, -2.0]), np.array([-1.5, -1.0])
    ratio = logps - reference
    np.testing.assert_allclose(divergence(logps, reference, "k1"), ratio)
    np.testing.assert_allclose(divergence(logps, reference, "k2"), ratio**2 / 2)
    np.testing.assert_allclose(divergence(logps, reference, "k3"), np.exp(-ratio) - 1 + ratio)


def failed(number: int) -> Rollout:
    """What an environment left when it raised."""
    lost = rollout(2, [1, 1, 1], number)
    return dataclasses.replace(lost, status="failed", reward=math.nan, error="it raised")


@pytest.mark.parametrize(
    "algorithm",
    [
        GRPO(),
        GRPO(scale="batch"),
        RLOO(kl_coefficient=0.0),
        ReinforcePlusPlus(),
        ReinforcePlusPlus(scale="none"),
    ],
)
def test_what_failed_is_in_no_group_and_no_loss(algorithm: Algorithm) -> None:
    """Half of each group of four failed: the others' advantages are those of groups of two."""
    half = [failed(0), ROLLOUTS[1], ROLLOUTS[3], failed(1), failed(2), *ROLLOUTS[:2], failed(3)]
    found = group_credit(half, algorithm, group_size=4, max_tokens=8)
    whole = [each for each in half if not each.failed]
    alone = group_credit(whole, algorithm, group_size=2, max_tokens=8)
    kept = [x for x, each in zip(found.advantages, half, strict=True) if not each.failed]
    for one, other in zip(kept, alone.advantages, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    for each, advantage in zip(half, found.advantages, strict=True):
        assert not each.failed or (advantage == 0).all()


def test_what_failed_is_in_no_value_and_no_whitening() -> None:
    def credit(rollouts: list[Rollout]) -> Credit:
        return gae_credit(
            rollouts,
            [each.reward for each in rollouts],
            [np.linspace(0.1, 0.4, len(each.tokens)) for each in rollouts],
            costs=[np.zeros(len(each.tokens)) for each in rollouts],
            gamma=0.9,
            lam=0.8,
            whiten_rewards=True,
            whiten_advantages=True,
        )

    found, alone = credit([failed(0), *ROLLOUTS, failed(9)]), credit(ROLLOUTS)
    assert found.returns is not None
    assert alone.returns is not None
    for mine, its in ((found.advantages, alone.advantages), (found.returns, alone.returns)):
        assert not mine[0].any()
        assert not mine[-1].any()
        for one, other in zip(mine[1:-1], its, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
