"""Advantages, penalties and token weights against direct loops and published special cases.

Legend: N prompts, G completions of a prompt, B rows, T tokens of a row.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fornax.config.errors import ConfigError
from fornax.tune import advantages

_RNG = np.random.default_rng(0)
REWARDS_NG = _RNG.normal(size=(4, 5))
REWARDS_NG[2] = 1.0  # a group without spread


def test_group_relative_is_each_groups_z_score() -> None:
    found = advantages.group_relative(REWARDS_NG, eps=1e-6)
    for rewards, own in zip(REWARDS_NG, found, strict=True):
        np.testing.assert_allclose(own, (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6))
    np.testing.assert_array_equal(found[2], 0)


def test_group_relative_scales_with_the_batch_or_not_at_all() -> None:
    centred = REWARDS_NG - REWARDS_NG.mean(1, keepdims=True)
    np.testing.assert_allclose(advantages.group_relative(REWARDS_NG, scale="none"), centred)
    np.testing.assert_allclose(
        advantages.group_relative(REWARDS_NG, scale="batch", eps=0.0),
        centred / REWARDS_NG.std(ddof=1),
    )


def test_leave_one_out_compares_with_the_others() -> None:
    found = advantages.leave_one_out(REWARDS_NG)
    for n, g in np.ndindex(*REWARDS_NG.shape):
        others = np.delete(REWARDS_NG[n], g)
        assert found[n, g] == pytest.approx(REWARDS_NG[n, g] - others.mean())
    dr_grpo = advantages.group_relative(REWARDS_NG, scale="none")
    np.testing.assert_allclose(found, dr_grpo * 5 / 4)


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_reinforce_plus_plus_whitens_the_whole_batch(baseline: Any) -> None:
    found = advantages.reinforce_plus_plus(REWARDS_NG, baseline=baseline)
    assert found.mean() == pytest.approx(0, abs=1e-12)
    assert found.std(ddof=1) == pytest.approx(1)
    start = REWARDS_NG - (REWARDS_NG.mean(1, keepdims=True) if baseline == "group" else 0)
    np.testing.assert_allclose(found, (start - start.mean()) / start.std(ddof=1), atol=1e-7)


@pytest.mark.parametrize(
    "estimate",
    [
        advantages.group_relative,
        advantages.leave_one_out,
        advantages.reinforce_plus_plus,
        lambda r: advantages.group_relative(r, scale="batch"),
        lambda r: advantages.reinforce_plus_plus(r, baseline="group"),
    ],
)
def test_a_missing_reward_counts_for_nobody(estimate: Callable[[np.ndarray], np.ndarray]) -> None:
    spoilt = REWARDS_NG.copy()
    spoilt[:, 4] = np.nan
    found = estimate(spoilt)
    np.testing.assert_array_equal(found[:, 4], 0)
    np.testing.assert_allclose(found[:, :4], estimate(REWARDS_NG[:, :4]), atol=1e-12)


def test_whiten_keeps_to_its_mask() -> None:
    x, mask = _RNG.normal(size=(3, 6)), _RNG.random((3, 6)) < 0.6
    found = advantages.whiten(x, mask)
    np.testing.assert_array_equal(found[~mask], 0)
    np.testing.assert_allclose(found[mask], (x[mask] - x[mask].mean()) / x[mask].std(ddof=1))
    kept = advantages.whiten(x, mask, shift=False)
    np.testing.assert_allclose(kept[mask], found[mask] + x[mask].mean())


B, T = 3, 9
TOKEN_REWARDS, VALUES = _RNG.normal(size=(2, B, T))
MASK = (_RNG.random((B, T)) < 0.7).astype(np.int32)


def _gae_loop(gamma: float, lam: float) -> np.ndarray:
    """Each row's written tokens alone, in a list, as the paper has them."""
    found = np.zeros((B, T))
    for b in range(B):
        places = np.flatnonzero(MASK[b]).tolist()
        for number, t in enumerate(places):
            for later in range(number, len(places)):
                own = places[later]
                ends = later + 1 == len(places)
                reward = TOKEN_REWARDS[b, own : T if ends else places[later + 1]].sum()
                follows = 0.0 if ends else VALUES[b, places[later + 1]]
                delta = reward + gamma * follows - VALUES[b, own]
                found[b, t] += (gamma * lam) ** (later - number) * delta
    return found


def test_gae_is_the_sum_of_the_paper() -> None:
    found, returns = advantages.gae(TOKEN_REWARDS, VALUES, MASK, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(found, _gae_loop(0.9, 0.8), atol=1e-12)
    np.testing.assert_allclose(returns, (found + VALUES) * MASK)


def test_gae_at_the_ends_of_lambda() -> None:
    """1: the whole return less the value; 0: the one-step error."""
    ones = np.ones((B, T))
    whole, _ = advantages.gae(TOKEN_REWARDS, VALUES, ones, gamma=1.0, lam=1.0)
    to_go = TOKEN_REWARDS[:, ::-1].cumsum(1)[:, ::-1]
    np.testing.assert_allclose(whole, to_go - VALUES)
    step, _ = advantages.gae(TOKEN_REWARDS, VALUES, ones, gamma=1.0, lam=0.0)
    follows = np.concatenate([VALUES[:, 1:], np.zeros((B, 1))], axis=1)
    np.testing.assert_allclose(step, TOKEN_REWARDS + follows - VALUES)


def test_overlong_penalty_is_a_slope_before_the_end() -> None:
    lengths = np.array([10, 80, 85, 90, 100, 300])
    found = advantages.overlong_penalty(lengths, max_length=100, buffer=20, penalty=0.5)
    np.testing.assert_allclose(found, [0, 0, -0.125, -0.25, -0.5, -0.5], atol=1e-12)


LENGTHS = np.array([2, 5, 0, 1])
TOKEN_LOSSES = [_RNG.normal(size=n) for n in LENGTHS]


def _objective(mode: Any, which: list[int], **options: Any) -> tuple[float, float]:
    weights = advantages.aggregation_weights(LENGTHS[which], mode=mode, **options)
    pairs = zip(which, weights.token_N, strict=True)
    return sum(w * TOKEN_LOSSES[n].sum() for n, w in pairs), weights.normaliser_N.sum()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sequence_mean", np.mean([a.mean() if len(a) else 0 for a in TOKEN_LOSSES])),
        ("token_mean", np.concatenate(TOKEN_LOSSES).mean()),
        ("constant", np.mean([a.sum() / 7 for a in TOKEN_LOSSES])),
    ],
)
def test_aggregation_is_that_of_the_papers_and_adds_up_over_micro_batches(
    mode: Any, expected: float
) -> None:
    options = {"max_length": 7} if mode == "constant" else {}
    total, normaliser = _objective(mode, [0, 1, 2, 3], **options)
    assert total / normaliser == pytest.approx(expected)
    parts = [_objective(mode, which, **options) for which in ([0], [1, 2, 3])]
    assert sum(p[0] for p in parts) / sum(p[1] for p in parts) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advantages.group_relative(np.ones((3, 1))), "2 completions or more"),
        (lambda: advantages.leave_one_out(np.ones(3)), r"shape \(3,\)"),
        (lambda: advantages.group_relative(REWARDS_NG, scale="token"), "group, batch, none"),
        (lambda: advantages.reinforce_plus_plus(REWARDS_NG, baseline="x"), "none, group"),
        (lambda: advantages.gae(VALUES, VALUES, MASK, gamma=1.5), "gamma=1.5"),
        (lambda: advantages.overlong_penalty(LENGTHS, max_length=4, buffer=5), "buffer=5"),
        (lambda: advantages.overlong_penalty(LENGTHS, max_length=4, buffer=2, penalty=-1), "-1"),
        (lambda: advantages.aggregation_weights(LENGTHS, mode="mean"), "sequence_mean"),
        (lambda: advantages.aggregation_weights(LENGTHS, mode="constant"), "needs max_length"),
    ],
)
def test_numbers_out_of_range_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
