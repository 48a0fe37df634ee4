"""What layers of experts are made of besides grouped products: order, choice, all in one call."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.cases import one_in

from fornax import kernels
from fornax.kernels import _native

native = pytest.mark.skipif(_native.unavailable("experts") is not None, reason="needs a compiler")


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("count", [0, 1, 7, 300])
@pytest.mark.parametrize("groups", [1, 5, 64])
def test_rows_are_sorted_by_group(groups: int, count: int, platform: str) -> None:
    """By the native kernel, and as it is left to XLA for other platforms."""
    groups_A = np.random.default_rng(count).integers(0, groups + 1, count, np.int32)
    with kernels.target_platform(platform):
        found = jax.jit(lambda rows: kernels.sort_by_group(rows, groups))(groups_A)
    order_A = np.array(sorted(range(count), key=lambda row: groups_A[row]), np.int32)
    np.testing.assert_array_equal(found.order_A, order_A)
    np.testing.assert_array_equal(found.inverse_A[order_A], np.arange(count))
    np.testing.assert_array_equal(found.sizes_E, [np.sum(groups_A == e) for e in range(groups)])
    assert {array.dtype for array in found} == {np.dtype(np.int32)}


def test_groups_that_cannot_be_sorted_are_named() -> None:
    with pytest.raises(kernels.KernelError, match="one axis of int32"):
        kernels.sort_by_group(jnp.ones((2, 3), jnp.int32), 4)


def logits_of(rows: int, experts: int, seed: int = 0) -> np.ndarray:
    return 3 * np.random.default_rng(seed).normal(size=(rows, experts)).astype(np.float32)


def routed(logits_ME: np.ndarray, k: int, bias_E: np.ndarray | None = None, **rule: Any) -> Any:
    """Weights and experts of each token in float64, by sorting."""
    rule = {"score": "softmax", "num_groups": 1, "groups_per_token": 1, "group_score": "max"} | rule
    x = logits_ME.astype(np.float64)
    if rule["score"] == "softmax":
        shares = np.exp(x - x.max(-1, keepdims=True))
        scores = shares / shares.sum(-1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-x))
    ranked = scores if bias_E is None else scores + bias_E
    groups = ranked.reshape(len(x), rule["num_groups"], -1)
    best = np.sort(groups, axis=-1)[..., -1 if rule["group_score"] == "max" else -2 :].sum(-1)
    kept = np.argsort(-best, axis=-1, kind="stable")[:, : rule["groups_per_token"]]
    is_open = np.zeros(best.shape, bool)
    np.put_along_axis(is_open, kept, True, axis=-1)
    ranked = np.where(is_open[..., None], groups, -np.inf).reshape(x.shape)
    experts = np.argsort(-ranked, axis=-1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, experts, axis=-1)
    if rule.get("normalize", True):
        weights = weights / (weights.sum(-1, keepdims=True) + rule.get("normalize_eps", 0.0))
    return weights * rule.get("scale", 1.0), experts


RULES = {
    "softmax": {},
    "as they are": {"normalize": False, "scale": 2.5},
    "sigmoid": {"score": "sigmoid", "normalize_eps": 1e-20},
    "groups": {"num_groups": 4, "groups_per_token": 2},
    "two best": {
        "score": "sigmoid",
        "num_groups": 8,
        "groups_per_token": 3,
        "group_score": "top2",
        "scale": 2.5,
    },
}


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("rows", [1, 33, 600])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_choice_agrees_with_float64(rule: str, biased: bool, rows: int, platform: str) -> None:
    logits_ME = logits_of(rows, 40)
    bias_E = np.linspace(-0.2, 0.3, 40, dtype=np.float32) if biased else None
    with kernels.target_platform(platform):
        weights_Mk, experts_Mk = jax.jit(
            functools.partial(kernels.route_top_k, k=5, **RULES[rule])
        )(logits_ME, selection_bias_E=bias_E)
    wanted, chosen = routed(logits_ME, 5, bias_E, **RULES[rule])
    np.testing.assert_array_equal(experts_Mk, chosen)
    np.testing.assert_allclose(weights_Mk, wanted, rtol=2e-6)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("experts", [1, 3, 16, 130])
def test_of_equal_scores_the_first_is_chosen_and_all_may_be(experts: int, platform: str) -> None:
    logits_ME = np.zeros((2, experts), np.float32)
    with kernels.target_platform(platform):
        weights_Mk, experts_Mk = kernels.route_top_k(logits_ME, experts)
    np.testing.assert_array_equal(experts_Mk, [range(experts)] * 2)
    np.testing.assert_allclose(weights_Mk, 1 / experts, rtol=1e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_router_that_is_broken_is_not_hidden(score: Any) -> None:
    """Its weights are not numbers, and its experts are experts, so that nothing else breaks."""
    logits_ME = logits_of(3, 20)
    logits_ME[1, 7] = np.nan
    weights_Mk, experts_Mk = kernels.route_top_k(logits_ME, 4, score=score)
    assert np.isnan(weights_Mk[1]).any()
    assert np.isfinite(weights_Mk[jnp.array([0, 2])]).all()
    assert np.unique(experts_Mk[1]).size == 4
    assert np.all((experts_Mk >= 0) & (experts_Mk < 20))


def test_gradient_of_the_weights_is_that_of_the_formula() -> None:
    logits_ME, k = logits_of(6, 9), 3

    def loss(logits_ME: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(4 * kernels.route_top_k(logits_ME, k)[0]) * jnp.arange(1.0, k + 1))

    slope = jax.grad(loss)(logits_ME)
    for at in ((0, int(np.argmax(logits_ME[0]))), (3, 4), (5, 8)):
        step = np.zeros_like(logits_ME)
        step[at] = 1e-2
        measured = (loss(logits_ME + step) - loss(logits_ME - step)) / 2e-2
        np.testing.assert_allclose(slope[at], measured, atol=2e-3)


def test_more_experts_than_there_are_open_are_refused() -> None:
    with pytest.raises(kernels.KernelError, match="2 of 4 groups that divide 16 experts"):
        kernels.route_top_k(jnp.ones((2, 16)), 9, num_groups=4, groups_per_token=2)
    with pytest.raises(kernels.KernelError, match=r"must be float32 \[M, E\]"):
        kernels.route_top_k(jnp.ones((2, 16), jnp.bfloat16), 2)


E, D, F, K = 7, 40, 72, 3


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(x, dtype).astype(jnp.float32), np.float64)


def layer_of(dtype: str, biased: bool, sizes: tuple[int, int, int] = (E, D, F)) -> dict[str, Any]:
    rng, (experts, width, inner) = np.random.default_rng(1), sizes
    shapes = {"gate": (experts, width, inner), "up": (experts, width, inner)}
    shapes["down"] = (experts, inner, width)
    made: dict[str, Any] = {
        name: rounded(rng.normal(size=shape) / shape[1] ** 0.5, dtype)
        for name, shape in shapes.items()
    }
    for name, shape in (shapes if biased else {}).items():
        letters = "ED" if name == "down" else "EF"
        made[f"{name}_bias_{letters}"] = rng.normal(size=(experts, shape[2]))
    return made


def tokens_of(rows: int, experts: int = E, width: int = D) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(rows)
    x_MD = rng.normal(size=(rows, width)).astype(np.float32)
    weights_MK = rng.uniform(0.1, 1, size=(rows, K)).astype(np.float32)
    chosen = [rng.choice(experts + 1, K, replace=False) for _ in range(rows)]  # the last is none
    return x_MD, weights_MK, np.array(chosen, np.int32)


def fused(tokens: tuple[np.ndarray, ...], layer: dict[str, Any], dtype: str, **how: Any) -> Any:
    """The second layer of a stack of three."""
    given = dict(layer)
    matrices = [jnp.asarray(given.pop(name), dtype) for name in ("gate", "up", "down")]
    weights = [kernels.GroupedWeight(values=jnp.stack([7 * w, w, 0 * w])).at(1) for w in matrices]
    given = {name: jnp.asarray(bias, jnp.float32) for name, bias in given.items()}
    run = jax.jit(functools.partial(kernels.fused_experts, **how))
    return np.asarray(run(*tokens, *weights, **given), np.float64)


def plain(
    tokens: tuple[np.ndarray, ...],
    layer: dict[str, Any],
    seen: Callable[[np.ndarray], np.ndarray],
    **how: Any,
) -> Any:
    """Token by token in float64, a product's rows rounded by `seen`, as the kernel does."""
    x_MD, weights_MK, experts_MK = tokens
    out_MD = np.zeros(x_MD.shape)
    zero = np.zeros(1)
    for m, expert_k in enumerate(experts_MK):
        for weight, e in zip(weights_MK[m], expert_k, strict=True):
            if e >= len(layer["gate"]):
                continue
            into = x_MD[m] * weight if how.get("weigh_input") else x_MD[m]
            gate, up = (
                seen(into) @ layer[name][e] + layer.get(f"{name}_bias_EF", [zero] * 99)[e]
                for name in ("gate", "up")
            )
            if (c := how.get("clip")) is not None:
                gate, up = np.minimum(gate, c), np.clip(up, -c, c)
                hidden = (up + 1) * gate / (1 + np.exp(-how["gain"] * gate))
            elif how["activation"] == "silu":
                hidden = gate / (1 + np.exp(-gate)) * up
            else:
                inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
                hidden = gate * (1 + np.tanh(inner)) / 2 * up
            y = seen(hidden) @ layer["down"][e]
            y = y + layer.get("down_bias_ED", [zero] * 99)[e]
            out_MD[m] += y if how.get("weigh_input") else weight * y
    return out_MD


WAYS: dict[str, dict[str, Any]] = {
    "silu": {"activation": "silu"},
    "gelu": {"activation": "gelu_tanh"},
    "clipped": {"activation": "silu", "clip": 1.5, "gain": 1.702},
    "inputs weighed": {"activation": "silu", "weigh_input": True},
}


@native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 9, 300])
@pytest.mark.parametrize("biased", one_in(2, [True, False]))
@pytest.mark.parametrize("way", WAYS)
def test_experts_in_one_call_agree_with_float64(
    way: str, biased: bool, rows: int, dtype: str
) -> None:
    tokens, layer = tokens_of(rows), layer_of(dtype, biased)
    y_MD = fused(tokens, layer, dtype, **WAYS[way])
    wanted = plain(tokens, layer, functools.partial(rounded, dtype=dtype), **WAYS[way])
    # A bfloat16 activation may round to the other side of a tie of float64's.
    np.testing.assert_allclose(y_MD, wanted, atol=5e-6 if dtype == "float32" else 1e-2)
    error = np.sqrt(np.mean((y_MD - wanted) ** 2) / np.mean(wanted**2))
    assert error < (1e-6 if dtype == "float32" else 1e-3)


@native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_is_the_same_whatever_is_beside_it(dtype: str) -> None:
    """Bit for bit: alone its matrices are read where they lie, among many they are copied."""
    tokens, layer = tokens_of(700), layer_of(dtype, biased=True)
    whole = fused(tokens, layer, dtype, activation="silu")
    for some in (slice(0, 1), slice(3, 9), slice(100, 180)):
        beside = tuple(part[some] for part in tokens)
        np.testing.assert_array_equal(fused(beside, layer, dtype, activation="silu"), whole[some])


@native
@pytest.mark.parametrize("sizes", [(1, 8, 8), (4, 1, 3), (3, 33, 17), (5, 16, 2100)])
def test_experts_of_any_size(sizes: tuple[int, int, int]) -> None:
    experts, width, _ = sizes
    layer, (x_MD, weights_MK, _) = layer_of("float32", False, sizes), tokens_of(20, 7, width)
    experts_MK = np.random.default_rng(0).integers(0, experts, (20, 1), np.int32)
    tokens = (x_MD, weights_MK[:, :1], experts_MK)
    y_MD = fused(tokens, layer, "float32", activation="silu")
    np.testing.assert_allclose(y_MD, plain(tokens, layer, np.float64, activation="silu"), atol=1e-5)


@native
def test_experts_that_nobody_chose_make_zeros() -> None:
    x_MD, weights_MK, experts_MK = tokens_of(5)
    y_MD = fused(
        (x_MD, weights_MK, 0 * experts_MK + E),
        layer_of("float32", True),
        "float32",
        activation="silu",
    )
    np.testing.assert_array_equal(y_MD, 0)


@native
def test_what_is_not_a_number_stays_so_in_its_token_alone() -> None:
    x_MD, weights_MK, experts_MK = tokens_of(6)
    experts_MK = experts_MK % E
    x_MD[2, 5], x_MD[4, 1] = np.nan, np.inf
    for way in WAYS.values():
        y_MD = fused((x_MD, weights_MK, experts_MK), layer_of("float32", False), "float32", **way)
        assert not np.isfinite(y_MD[2]).any()
        assert not np.isfinite(y_MD[4]).all()
        assert np.isfinite(y_MD[[0, 1, 3, 5]]).all()


def test_experts_that_cannot_be_fused_are_refused() -> None:
    x_MD, weights_MK, experts_MK = map(jnp.asarray, tokens_of(2))
    w_EDF = jnp.ones((E, D, F))
    assert not kernels.fuses_experts(x_MD, w_EDF, w_EDF, w_EDF.mT)
    with pytest.raises(kernels.KernelError, match="GroupedWeights of one dtype"):
        kernels.fused_experts(
            x_MD, weights_MK, experts_MK, *([cast("Any", w_EDF)] * 3), activation="silu"
        )
    layer = kernels.GroupedWeight(values=w_EDF[None]).at(0)
    if kernels.fuses_experts(x_MD, layer, layer, layer):
        with pytest.raises(kernels.KernelError, match=r"down\(7, 40, 72\) must be"):
            kernels.fused_experts(
                x_MD, weights_MK, experts_MK, layer, layer, layer, activation="silu"
            )
