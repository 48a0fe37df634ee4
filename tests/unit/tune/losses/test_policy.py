"""Policy-gradient losses against direct loops and the special cases that are published.

Legend: B rows, T tokens of a row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.config.errors import ConfigError
from fornax.tune import losses

B, T = 3, 8
_RNG = np.random.default_rng(0)
OLD = -_RNG.uniform(0.1, 3.0, (B, T))
NEW = OLD + 0.4 * _RNG.normal(size=(B, T))
REF = OLD + 0.4 * _RNG.normal(size=(B, T))
ADVANTAGES = _RNG.normal(size=(B, T))
MASK = (_RNG.random((B, T)) < 0.75).astype(np.float64)
SEGMENTS = np.array([[1] * 3 + [2] * 5, [1] * 8, [1] * 2 + [2] * 4 + [0] * 2])
MASK *= SEGMENTS > 0

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "asymmetric": {"clip_low": 0.1, "clip_high": 0.3},
    "dual": {"clip_c": 1.25},
    "unclipped": {"clip_low": None, "clip_high": None},
    "sequence": {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.05},
    "packed sequence": {"ratio": "sequence", "segments": True, "clip_low": 0.05},
    "product": {"ratio": "product", "segments": True},
}


def _reference(
    new: np.ndarray,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    clip_c: float | None = None,
    ratio: str = "token",
    segments: bool = False,
) -> np.ndarray:
    """The same, token by token."""
    loss = np.zeros((B, T))
    for b, t in np.ndindex(B, T):
        if not MASK[b, t]:
            continue
        logs = [
            new[b, s] - OLD[b, s]
            for s in range(T)
            if MASK[b, s] and (not segments or SEGMENTS[b, s] == SEGMENTS[b, t])
        ]
        log = {
            "token": new[b, t] - OLD[b, t],
            "sequence": np.mean(logs),
            "product": np.sum(logs),
        }[ratio]
        r, advantage = np.exp(log), ADVANTAGES[b, t]
        low = 0 if clip_low is None else 1 - clip_low
        high = np.inf if clip_high is None else 1 + clip_high
        gain = min(r * advantage, min(max(r, low), high) * advantage)
        if clip_c is not None and advantage < 0:
            gain = max(gain, clip_c * advantage)
        loss[b, t] = -gain
    return loss


def _ours(new: jax.Array, **options: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    segments = jnp.asarray(SEGMENTS) if options.pop("segments", False) else None
    return losses.policy_gradient(new, OLD, ADVANTAGES, MASK, segment_ids_BT=segments, **options)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    def all_cases(new: jax.Array) -> dict[str, Any]:
        def value(new: jax.Array, options: dict[str, Any]) -> tuple[jax.Array, Any]:
            loss, metrics = _ours(new, **options)
            return jnp.sum(loss), (loss, metrics)

        return {n: jax.grad(value, has_aux=True)(new, options) for n, options in CASES.items()}

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(all_cases)(NEW))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_a_direct_loop(name: str, found: dict[str, Any]) -> None:
    slope, (loss, _) = found[name]
    np.testing.assert_allclose(loss, _reference(NEW, **CASES[name]), rtol=1e-12, atol=1e-14)
    for place in np.ndindex(B, T):
        step = np.zeros((B, T))
        step[place] = 1e-6
        up, down = (_reference(NEW + s, **CASES[name]).sum() for s in (step, -step))
        assert slope[place] == pytest.approx((up - down) / 2e-6, abs=1e-7)


@pytest.mark.parametrize("name", ["plain", "dual"])
def test_clipped_tokens_are_those_without_a_gradient(name: str, found: dict[str, Any]) -> None:
    slope, (_, metrics) = found[name]
    clipped = np.asarray(metrics["clipped"]) * MASK
    assert 0 < clipped.sum() < MASK.sum()
    np.testing.assert_array_equal(clipped == 1, (np.asarray(slope) == 0) & (MASK == 1))


@pytest.mark.parametrize("ratio", ["token", "sequence", "product"])
def test_at_ratio_one_the_gradient_is_reinforce(ratio: Any) -> None:
    """On-policy and one advantage a sequence, every variant's summed gradient is -A grad logp."""
    advantages_B1 = jnp.asarray(ADVANTAGES[:, :1])

    def total(new: jax.Array) -> jax.Array:
        old = jax.lax.stop_gradient(new)
        loss, _ = losses.policy_gradient(new, old, advantages_B1, MASK, ratio=ratio)
        weight = MASK.sum(1, keepdims=True) if ratio == "product" else 1
        return jnp.sum(loss / weight)

    slope = jax.jit(jax.grad(total))(jnp.asarray(NEW, jnp.float32))
    np.testing.assert_allclose(slope, -np.asarray(advantages_B1) * MASK, rtol=1e-5, atol=1e-6)


def test_masked_tokens_may_hold_anything() -> None:
    @jax.jit
    @jax.value_and_grad
    def step(new: jax.Array) -> jax.Array:
        return jnp.sum(losses.policy_gradient(new, OLD, ADVANTAGES, MASK, ratio="sequence")[0])

    spoilt = step(jnp.asarray(np.where(MASK, NEW, np.nan)))
    clean = step(jnp.asarray(NEW, jnp.float32))
    for found, expected in zip(spoilt, clean, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_an_advantage_of_zero_stays_zero_however_far_the_policy_went() -> None:
    far, one = jnp.full((1, 1), 500.0), jnp.ones((1, 1))
    loss, metrics = losses.policy_gradient(far, 0 * one, 0 * one, one, clip_high=None)
    assert loss[0, 0] == 0
    assert np.isfinite(metrics["ratio"]).all()


def test_importance_weights_scale_the_loss_and_carry_no_gradient() -> None:
    weights = np.full((B, T), 0.5)
    loss, _ = losses.policy_gradient(NEW, OLD, ADVANTAGES, MASK, is_weights_BT=weights)
    np.testing.assert_allclose(
        loss, 0.5 * losses.policy_gradient(NEW, OLD, ADVANTAGES, MASK)[0], rtol=1e-6
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_have_the_right_value_and_gradient_in_the_mean(estimator: Any) -> None:
    """Means over the policy's own tokens, exactly, by summing over a small vocabulary.

    k1 and k3 are unbiased in value; the unbiased gradient is that of KL(policy || reference) for
    all three, while differentiating k1 gives 0 and k3 gives the other divergence's gradient.
    """
    logits = jnp.array([0.5, -0.3, 1.2, 0.0])
    ref = jax.nn.log_softmax(jnp.array([0.1, 0.4, -0.6, 0.3]))

    def mean(logits: jax.Array, gradient: Any) -> jax.Array:
        logps = jax.nn.log_softmax(logits)
        drawn = jax.lax.stop_gradient(jnp.exp(logps))
        options = {"estimator": estimator, "gradient": gradient}
        return jnp.sum(drawn * losses.kl_penalty(logps[None], ref[None], **options)[0])

    def exact(logits: jax.Array) -> jax.Array:
        logps = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logps) * (logps - ref))

    def other(logits: jax.Array) -> jax.Array:
        logps = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(ref) * (ref - logps))

    @jax.jit
    def slopes(logits: jax.Array) -> Any:
        pairs = jax.value_and_grad(exact)(logits), jax.grad(other)(logits)
        ways = ("unbiased", "estimator")
        return (*pairs, *(jax.value_and_grad(lambda z, w=w: mean(z, w))(logits) for w in ways))

    (value, slope), other_slope, (found, unbiased), (also, own) = slopes(logits)
    assert found == also
    if estimator != "k2":
        np.testing.assert_allclose(found, value, rtol=1e-5)
    np.testing.assert_allclose(unbiased, slope, atol=1e-6)
    expected = {"k1": np.zeros(4), "k2": slope, "k3": other_slope}[estimator]
    np.testing.assert_allclose(own, expected, atol=1e-6)


def test_truncated_importance_by_token_and_by_packed_sequence() -> None:
    segments = jnp.asarray(SEGMENTS)
    weights, metrics = losses.truncated_importance(NEW, OLD, MASK, cap=1.2)
    exact = np.where(MASK, np.exp(NEW - OLD), 1)
    np.testing.assert_allclose(weights, np.minimum(exact, 1.2), rtol=1e-6)
    np.testing.assert_array_equal(metrics["truncated"], exact > 1.2)
    k3 = np.where(MASK, exact - 1 - (NEW - OLD), 0)
    np.testing.assert_allclose(metrics["mismatch_kl"], k3, atol=1e-6)

    weights, _ = losses.truncated_importance(
        NEW,
        OLD,
        MASK,
        cap=1.5,
        floor=0.5,
        level="sequence",
        outside="drop",
        segment_ids_BT=segments,
    )
    for b, t in np.ndindex(B, T):
        own = MASK[b] * (SEGMENTS[b] == SEGMENTS[b, t])
        product = np.exp(np.sum(own * (NEW - OLD)[b]))
        expected = product if 0.5 <= product <= 1.5 else 0
        assert weights[b, t] == pytest.approx(expected if MASK[b, t] else 1, rel=1e-5)


def test_a_log_probability_the_sampler_lacks_is_no_correction() -> None:
    sampler = np.where(np.arange(T) == 2, np.nan, OLD)
    weights, _ = losses.truncated_importance(NEW, sampler, np.ones((B, T)), cap=9.0)
    np.testing.assert_array_equal(weights[:, 2], 1)
    assert np.isfinite(weights).all()


def test_value_loss_clips_around_old_values() -> None:
    values, returns, old = (
        jnp.array([[1.0, 1.0, 5.0]]),
        jnp.array([[3.0, 0.5, 0.0]]),
        jnp.zeros((1, 3)),
    )
    mask = np.array([[1, 1, 0]])
    loss, metrics = losses.value_loss(values, returns, mask, old_values_BT=old, clip=0.2)
    # far from 3 either way: the clipped 0.2 is farther; near 0.5: the value itself is farther
    np.testing.assert_allclose(loss, [[0.5 * 2.8**2, 0.5 * 0.5**2, 0]], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clipped"], [[1, 0, 0]])
    slope = jax.jit(
        jax.grad(
            lambda v: jnp.sum(losses.value_loss(v, returns, mask, old_values_BT=old, clip=0.2)[0])
        )
    )(values)
    np.testing.assert_allclose(slope, [[0, 0.5, 0]])
    plain, _ = losses.value_loss(values, returns, mask)
    np.testing.assert_allclose(plain, [[2, 0.125, 0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _ours(NEW, clip_low=1.5), "clip_low=1.5"),
        (lambda: _ours(NEW, clip_high=-0.1), "clip_high=-0.1"),
        (lambda: _ours(NEW, clip_c=0.9), "clip_c=0.9 must be above 1"),
        (lambda: _ours(NEW, ratio="group"), "use one of: token, sequence, product"),
        (lambda: losses.kl_penalty(NEW, REF, estimator="k4"), "use one of: k1, k2, k3"),
        (lambda: losses.truncated_importance(NEW, OLD, MASK, cap=0.0), "cap=0.0"),
        (lambda: losses.truncated_importance(NEW, OLD, MASK, floor=3.0), "floor=3.0"),
        (lambda: losses.value_loss(NEW, OLD, MASK, clip=0.2), "needs old_values_BT"),
    ],
)
def test_numbers_out_of_range_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
