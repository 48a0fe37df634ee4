"""Routers and experts against plain NumPy in float64, and at the edges of routing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from fornax.config.errors import ConfigError
from fornax.models import DecoderConfig, ExpertsConfig, router_losses
from fornax.models.context import LayerContext
from fornax.models.experts import Experts
from fornax.models.routing import balanced_bias, choose, count_routing

D, E, F = 8, 6, 5


def _config(**changes: object) -> DecoderConfig:
    experts = {"num_experts": E, "experts_per_token": 2, "intermediate_size": F, **changes}
    return DecoderConfig(
        hidden_size=D,
        num_heads=2,
        num_layers=1,
        initializer_range=0.5,
        experts=ExpertsConfig(**experts),
    )


def _reference_choice(
    logits_ME: np.ndarray, config: ExpertsConfig, bias_E: np.ndarray
) -> tuple[list[list[int]], list[list[float]]]:
    """One token, one group, one expert at a time."""
    chosen, weights = [], []
    for logits_E in logits_ME:
        if config.score == "softmax":
            scores_E = np.exp(logits_E - logits_E.max())
            scores_E /= scores_E.sum()
        else:
            scores_E = 1 / (1 + np.exp(-logits_E))
        ranked_E = scores_E + bias_E
        size = config.num_experts // config.num_groups
        groups = [list(range(g * size, (g + 1) * size)) for g in range(config.num_groups)]
        best = 1 if config.group_score == "max" else 2
        value = [sum(sorted((ranked_E[e] for e in group), reverse=True)[:best]) for group in groups]
        order = sorted(range(config.num_groups), key=lambda g: -value[g])
        candidates = [e for g in order[: config.groups_per_token] for e in groups[g]]
        picked = sorted(candidates, key=lambda e: -ranked_E[e])[: config.experts_per_token]
        total = sum(scores_E[e] for e in picked) + config.normalize_eps
        divisor = total if config.normalize else 1.0
        chosen.append(picked)
        weights.append([scores_E[e] / divisor * config.scale for e in picked])
    return chosen, weights


def _reference_output(
    module: Experts, x_MD: np.ndarray, chosen: list[list[int]], weights: list[list[float]]
) -> np.ndarray:
    """The sum over each token's experts, in float64."""

    def of(part: nnx.Module) -> tuple[np.ndarray, np.ndarray]:
        kernel = np.asarray(part.kernel[...], np.float64)
        bias = np.zeros(kernel.shape[::2]) if part.bias is None else np.asarray(part.bias[...])
        return kernel, bias

    (gate, gate_b), (up, up_b), (down, down_b) = of(module.gate), of(module.up), of(module.down)
    y_MD = np.zeros_like(x_MD)
    for m, (experts, factors) in enumerate(zip(chosen, weights, strict=True)):
        for e, w in zip(experts, factors, strict=True):
            x_D = x_MD[m] * (w if module.config.weigh == "input" else 1)
            g, u = x_D @ gate[e] + gate_b[e], x_D @ up[e] + up_b[e]
            if module.config.clip is None:
                h = g / (1 + np.exp(-g)) * u
            else:
                g, u = (
                    np.minimum(g, module.config.clip),
                    np.clip(u, -module.config.clip, module.config.clip),
                )
                h = (u + 1) * g / (1 + np.exp(-1.702 * g))
            y_MD[m] += (h @ down[e] + down_b[e]) * (1 if module.config.weigh == "input" else w)
    return y_MD


RULES = {
    "softmax": {},
    "not normalised": {"normalize": False, "scale": 2.5},
    "sigmoid": {"score": "sigmoid", "selection_bias": True, "normalize_eps": 1e-20},
    "best of a group": {"num_groups": 3, "groups_per_token": 1},
    "two best of a group": {
        "score": "sigmoid",
        "selection_bias": True,
        "num_groups": 2,
        "group_score": "top2",
    },
    "one expert": {"num_experts": 1, "experts_per_token": 1},
    "all experts": {"experts_per_token": E},
    "biases": {"router_bias": True, "bias": True},
    "clipped": {"bias": True, "clip": 0.4},
    "weighted inputs": {"weigh": "input", "score": "sigmoid", "normalize": False},
}


@pytest.mark.parametrize("rule", RULES)
def test_experts_are_the_sum_that_the_rule_says(rule: str) -> None:
    config = _config(**RULES[rule])
    assert config.experts is not None
    module = Experts(config, rngs=nnx.Rngs(0), dtype=jnp.float32, compute_dtype=jnp.float32)
    rng = np.random.default_rng(1)
    for part in (module.gate, module.up, module.down, module.router):
        if part.bias is not None:
            part.bias[...] = rng.normal(size=part.bias.shape).astype(np.float32)
    count = config.experts.num_experts
    bias_E = np.zeros(count)
    if module.selection_bias is not None:
        bias_E = rng.normal(size=count)
        module.selection_bias[...] = bias_E.astype(np.float32)
    x_MD = rng.normal(size=(7, D))
    logits_ME = x_MD @ np.asarray(module.router.kernel[...], np.float64)
    if module.router.bias is not None:
        logits_ME = logits_ME + np.asarray(module.router.bias[...])
    chosen, weights = _reference_choice(logits_ME, config.experts, bias_E)
    context = LayerContext(jnp.zeros((1, 7), jnp.int32), None, {})
    y_BTD, routing = jax.jit(lambda x: module(x, context))(jnp.asarray(x_MD[None], jnp.float32))
    want = _reference_output(module, x_MD, chosen, weights)
    np.testing.assert_allclose(y_BTD[0], want, rtol=2e-5, atol=2e-5)
    counts = np.bincount(np.ravel(chosen), minlength=count)
    np.testing.assert_array_equal(routing.assigned_E, counts)
    assert routing.tokens == 7


ROOM = {  # rule, capacity_factor, tokens of a row of 8 that an expert has room for
    "half of an even load": ("softmax", 0.5, 2),
    "an even load": ("weighted inputs", 1.0, 3),
    "biases": ("biases", 0.75, 2),
    "for all": ("softmax", 3.0, 8),
}


@pytest.mark.parametrize("given", [False, True], ids=["routed", "replayed"])
@pytest.mark.parametrize("case", ROOM)
def test_a_row_s_first_tokens_have_room(case: str, given: bool) -> None:
    """One row, one token, one expert at a time; padding takes no room, and given experts do."""
    rule, factor, room = ROOM[case]
    config = _config(**RULES[rule], capacity_factor=factor)
    assert config.experts is not None
    assert config.experts.capacity(8) == room
    module = Experts(config, rngs=nnx.Rngs(0), dtype=jnp.float32, compute_dtype=jnp.float32)
    rng = np.random.default_rng(2)
    for part in (module.gate, module.up, module.down, module.router):
        if part.bias is not None:
            part.bias[...] = rng.normal(size=part.bias.shape).astype(np.float32)
    x_BTD = rng.normal(size=(3, 8, D))
    ids_BT = np.ones((3, 8), np.int32)
    ids_BT[1, :3], ids_BT[2, 6:] = 0, 0
    given_BTk = np.tile(np.array([0, 1], np.int8), (3, 8, 1)) if given else None
    if given_BTk is not None:
        given_BTk[:, ::3] = -1
    context = LayerContext(
        jnp.zeros((3, 8), jnp.int32),
        jnp.asarray(ids_BT),
        {},
        routed_experts_BTk=None if given_BTk is None else jnp.asarray(given_BTk),
        drops_tokens=True,
    )
    y_BTD, routing = jax.jit(lambda x: module(x, context))(jnp.asarray(x_BTD, jnp.float32))
    assigned, dropped = np.zeros(E, int), np.zeros(E, int)
    for b in range(3):
        logits_ME = x_BTD[b] @ np.asarray(module.router.kernel[...], np.float64)
        if module.router.bias is not None:
            logits_ME = logits_ME + np.asarray(module.router.bias[...])
        chosen, weights = _reference_choice(logits_ME, config.experts, np.zeros(E))
        if given_BTk is not None:
            chosen, weights = _replayed(logits_ME, given_BTk[b], chosen, config.experts)
        taken = np.zeros(E, int)
        for t in range(8):
            for slot, e in enumerate(chosen[t]):
                if ids_BT[b, t] == 0:
                    weights[t][slot] = 0.0
                    continue
                assigned[e] += 1
                if taken[e] == room:
                    weights[t][slot] = 0.0
                    dropped[e] += 1
                else:
                    taken[e] += 1
        want = _reference_output(module, x_BTD[b], chosen, weights)
        np.testing.assert_allclose(y_BTD[b], want, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(routing.assigned_E, assigned)
    np.testing.assert_array_equal(routing.dropped_E, dropped)
    assert (dropped.sum() > 0) == (room < 8)


def _replayed(
    logits_ME: np.ndarray, given_Mk: np.ndarray, chosen: list[list[int]], config: ExpertsConfig
) -> tuple[list[list[int]], list[list[float]]]:
    """The given experts where there are some, with the weights of these logits."""
    both, weights = [], []
    for logits_E, given_k, own in zip(logits_ME, given_Mk, chosen, strict=True):
        scores_E = 1 / (1 + np.exp(-logits_E))
        if config.score == "softmax":
            scores_E = np.exp(logits_E) / np.exp(logits_E).sum()
        both.append([int(e) for e in given_k] if given_k[0] >= 0 else own)
        total = scores_E[both[-1]].sum() if config.normalize else 1.0
        weights.append([float(scores_E[e] / total * config.scale) for e in both[-1]])
    return both, weights


def test_only_pretraining_drops() -> None:
    """The field changes nothing of a model that is evaluated, tuned or served."""
    tight = _config(capacity_factor=0.1)
    module = Experts(tight, rngs=nnx.Rngs(0), dtype=jnp.float32, compute_dtype=jnp.float32)
    plain = Experts(_config(), rngs=nnx.Rngs(0), dtype=jnp.float32, compute_dtype=jnp.float32)
    x_BTD = jax.random.normal(jax.random.key(0), (2, 8, D))
    context = LayerContext(jnp.zeros((2, 8), jnp.int32), None, {})
    (y, routing), (want, _) = (
        jax.jit(lambda x, m=m: m(x, context))(x_BTD) for m in (module, plain)
    )
    np.testing.assert_array_equal(y, want)
    assert routing.dropped_E is None
    dropping = dataclasses.replace(context, drops_tokens=True)
    dropped = jax.jit(lambda x: module(x, dropping))(x_BTD)[0]
    assert float(jnp.max(jnp.abs(dropped - want))) > 0.01


def test_capacity_is_of_the_factor_as_it_is_written() -> None:
    """1.1 is 11 tenths: 20 tokens of an even load are 22, where 1.1 in binary is a little more."""
    config = ExpertsConfig(
        num_experts=1, experts_per_token=1, intermediate_size=F, capacity_factor=1.1
    )
    many = dataclasses.replace(config, num_experts=40, experts_per_token=4)
    assert 1.1 * 4 * 100 / 20 > 22
    assert dataclasses.replace(many, num_experts=20).capacity(100) == 22
    assert many.capacity(100) == 11
    assert config.capacity(100) == 100
    assert dataclasses.replace(many, capacity_factor=None).capacity(100) is None


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from(["none", "one", "all"]))
def test_gradients_are_finite_wherever_the_tokens_go(seed: int, where: str) -> None:
    """No expert, one expert, or all of them run for the tokens; those without get exact zeros."""
    k = E if where == "all" else 1
    config = _config(experts_per_token=k, router_bias=True)
    module = Experts(config, rngs=nnx.Rngs(0), dtype=jnp.float32, compute_dtype=jnp.float32)
    if where == "one":
        module.router.bias[...] = jnp.zeros(E).at[2].set(100.0)
    ids = jnp.zeros((1, 5), jnp.int32) if where == "none" else None
    graphdef, params = nnx.split(module)
    x_BTD = jax.random.normal(jax.random.key(seed), (1, 5, D))

    def loss(params: nnx.State, x_BTD: jax.Array) -> jax.Array:
        context = LayerContext(jnp.zeros((1, 5), jnp.int32), ids, {})
        y_BTD, routing = nnx.merge(graphdef, params)(x_BTD, context)
        stacked = jax.tree.map(lambda leaf: leaf[None], routing)
        return jnp.sum(jnp.square(y_BTD)) + sum(router_losses(stacked).values())

    grads = nnx.to_pure_dict(jax.jit(jax.grad(loss))(params, x_BTD))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(grads))
    used = np.any(np.asarray(grads["down"]["kernel"]) != 0, axis=(1, 2))
    assert used.tolist() == [where == "all" or (where == "one" and e == 2) for e in range(E)]


def test_the_balance_loss_is_least_where_all_experts_are_used_alike() -> None:
    even = jnp.asarray(np.tile(np.eye(E), (4, 1)) * 5.0, jnp.float32)
    config = ExpertsConfig(num_experts=E, experts_per_token=1, intermediate_size=F)

    def balance(logits_ME: jax.Array) -> float:
        counted = count_routing(
            logits_ME, choose(logits_ME, config), jnp.ones(len(logits_ME), bool)
        )
        return float(router_losses(jax.tree.map(lambda leaf: leaf[None], counted))["balance"])

    assert balance(even) == pytest.approx(1.0)
    assert balance(even.at[:, 0].add(9.0)) > 3.0


def test_scores_that_round_to_one_do_not_tie() -> None:
    """In float32 sigmoid(18) and sigmoid(25) are both 1."""
    config = ExpertsConfig(
        num_experts=3, experts_per_token=1, intermediate_size=8, score="sigmoid", normalize=False
    )
    found = choose(jnp.array([[18.0, 25.0, 20.0]]), config)
    np.testing.assert_array_equal(found.scores_ME, 1)
    assert found.experts_Mk.tolist() == [[1]]


def test_the_selection_bias_moves_towards_experts_below_the_mean() -> None:
    moved = balanced_bias(jnp.zeros((1, 4)), jnp.asarray([[4.0, 0.0, 2.0, 2.0]]), 0.1)
    np.testing.assert_allclose(moved, [[-0.1, 0.1, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 7}, "more than the 6 experts"),
        ({"num_groups": 4}, "must divide num_experts=6"),
        (
            {"num_groups": 6, "experts_per_token": 1, "group_score": "top2"},
            "two experts in each group",
        ),
        ({"shared_gate": True}, "needs shared_intermediate_size"),
        ({"clip": 0.0}, "must be above 0"),
        ({"capacity_factor": 0.0}, "must be above 0"),
        ({"capacity_factor": float("inf")}, "must be finite; use null"),
    ],
)
def test_what_no_router_can_do_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(**changes)
    with pytest.raises(ConfigError, match="do not go together"):
        dataclasses.replace(_config(), mlp_pattern=("mlp",))
