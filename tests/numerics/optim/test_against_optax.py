"""A chain from config is bit for bit the chain written by hand in Optax."""

import jax
import numpy as np
import optax
import pytest

from fornax.optim import (
    EMA,
    SGD,
    Adafactor,
    AdamW,
    AdaptiveClip,
    Constant,
    Cosine,
    Group,
    Lion,
    Lookahead,
    NormClip,
    OptimConfig,
    RMSProp,
    ValueClip,
    build,
)

AXES = {
    "embed": ("vocab", "embed"),
    "layers": {
        "attention": {
            "q": {
                "kernel": ("layers", "embed", "heads", "head_dim"),
                "bias": ("layers", "heads", "head_dim"),
            },
            "o": {"kernel": ("layers", "heads", "head_dim", "embed")},
        },
        "mlp": {"up": ("layers", "embed", "mlp")},
        "norm": {"scale": ("layers", "norm")},
    },
    "head": ("embed", "vocab"),
}
SHAPES = {
    "embed": (32, 16),
    "layers": {
        "attention": {
            "q": {"kernel": (3, 16, 4, 8), "bias": (3, 4, 8)},
            "o": {"kernel": (3, 4, 8, 16)},
        },
        "mlp": {"up": (3, 16, 24)},
        "norm": {"scale": (3, 16)},
    },
    "head": (16, 32),
}
STEPS = 12
CALLS = 6
DECAYS = {
    "embed": True,
    "layers": {
        "attention": {"q": {"kernel": True, "bias": False}, "o": {"kernel": True}},
        "mlp": {"up": True},
        "norm": {"scale": False},
    },
    "head": True,
}
MATRICES = {
    "embed": None,
    "layers": {
        "attention": {
            "q": {"kernel": optax.contrib.MuonDimensionNumbers((1,), (2, 3)), "bias": None},
            "o": {"kernel": optax.contrib.MuonDimensionNumbers((1, 2), (3,))},
        },
        "mlp": {"up": optax.contrib.MuonDimensionNumbers((1,), (2,))},
        "norm": {"scale": None},
    },
    "head": None,
}
RATE = 0.01


def is_tuple(node):
    return isinstance(node, tuple)


def make_params(seed=0, shapes=SHAPES):
    """NumPy arrays, so that nothing but the optimizers is compiled."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32), shapes, is_leaf=is_tuple
    )


def schedule():
    return optax.warmup_cosine_decay_schedule(0.0, RATE, 2, STEPS, end_value=RATE * 0.1)


def gradients(params, call):
    """A gradient that depends on the parameters, so that any difference would grow."""
    noise = make_params(seed=100 + call)
    return jax.tree.map(lambda p, n: np.float32(0.3) * np.asarray(p) + n, params, noise)


def run_built(built, gradient=gradients, norm=lambda grads: None):
    params = make_params()
    step = jax.jit(built.update)
    state = jax.jit(built.init)(params)
    for call in range(CALLS):
        grads = gradient(params, call)
        params, state = step(grads, state, params, norm(grads))
    return params, state, built


def run_config(config, **more):
    return run_built(build(config, total_steps=STEPS, params=make_params(), axes=AXES), **more)


def run_optax(transform):
    params = make_params()

    @jax.jit
    def step(grads, state, params):
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(transform.init)(params)
    for call in range(CALLS):
        params, state = step(gradients(params, call), state, params)
    return params


def config(optimizer, **more):
    defaults = {
        "optimizer": optimizer,
        "learning_rate": RATE,
        "schedule": Cosine(warmup_steps=2),
        "clip": (),
    }
    return OptimConfig(**{**defaults, **more})


def assert_same_bits(mine, theirs):
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


OPTIMIZERS = {
    "adamw": (
        AdamW(b1=0.8, b2=0.9, weight_decay=0.3, nesterov=True),
        lambda: optax.adamw(
            schedule(), b1=0.8, b2=0.9, weight_decay=0.3, mask=DECAYS, nesterov=True
        ),
    ),
    "adamw-bf16": (
        AdamW(mu_dtype="bfloat16"),
        lambda: optax.adamw(
            schedule(), b2=0.95, weight_decay=0.1, mask=DECAYS, mu_dtype="bfloat16"
        ),
    ),
    "lion": (
        Lion(b1=0.8, weight_decay=0.5),
        lambda: optax.lion(schedule(), b1=0.8, weight_decay=0.5, mask=DECAYS),
    ),
    "sgd": (
        SGD(momentum=0.8, nesterov=True, weight_decay=0.2),
        lambda: optax.chain(
            optax.add_decayed_weights(0.2, DECAYS),
            optax.sgd(schedule(), momentum=0.8, nesterov=True),
        ),
    ),
    "rmsprop": (
        RMSProp(decay=0.8, centered=True, momentum=0.7),
        lambda: optax.rmsprop(schedule(), decay=0.8, centered=True, momentum=0.7),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    mine, by_hand = OPTIMIZERS[name]
    assert_same_bits(run_config(config(mine))[0], run_optax(by_hand()))


def test_clips_act_in_order():
    mine = config(AdamW(), clip=(ValueClip(max_value=0.2), NormClip(max_norm=0.5)))
    theirs = optax.chain(
        optax.clip(0.2),
        optax.clip_by_global_norm(0.5),
        optax.adamw(schedule(), b2=0.95, weight_decay=0.1, mask=DECAYS),
    )
    assert_same_bits(run_config(mine)[0], run_optax(theirs))


@pytest.mark.parametrize("max_norm", [0.5, 1e4], ids=["clips", "larger-than-all"])
def test_a_known_norm_is_the_norm(max_norm):
    mine = config(AdamW(), clip=(NormClip(max_norm=max_norm),))
    theirs = optax.chain(
        optax.clip_by_global_norm(max_norm),
        optax.adamw(schedule(), b2=0.95, weight_decay=0.1, mask=DECAYS),
    )
    params, _, built = run_config(mine, norm=optax.tree.norm)
    assert built.clips_norm_first
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        params,
        run_optax(theirs),
    )


@pytest.mark.parametrize(
    "more",
    [
        {"clip": (ValueClip(max_value=0.2), NormClip(max_norm=0.5))},
        {"groups": (Group(pattern="norm|bias", freeze=True),)},
        {"accumulate": 2},
        {"lookahead": Lookahead(sync_period=2)},
    ],
    ids=["other-clip-first", "frozen", "accumulated", "lookahead"],
)
def test_a_norm_of_other_gradients_is_not_used(more):
    mine = config(SGD(momentum=None), **{"clip": (NormClip(max_norm=0.5),), **more})
    params, _, built = run_config(mine, norm=lambda grads: np.float32(1e6))
    assert not built.clips_norm_first
    assert_same_bits(params, run_config(mine)[0])


def test_decay_patterns_replace_the_default_mask():
    mask = jax.tree.map(lambda _: False, DECAYS)
    mask["layers"]["mlp"]["up"] = True
    mine = config(AdamW(weight_decay=0.5), decay=("mlp", "attention"), no_decay=("attention",))
    theirs = optax.adamw(schedule(), b2=0.95, weight_decay=0.5, mask=mask)
    assert_same_bits(run_config(mine)[0], run_optax(theirs))


def test_groups_are_optax_partition():
    mine = config(
        AdamW(weight_decay=0.0),
        groups=(
            Group(pattern="^embed$", learning_rate_factor=0.25),
            Group(pattern="attention", optimizer=SGD(momentum=None)),
            Group(pattern="norm|bias", freeze=True),
        ),
    )
    labels = {
        "embed": "slow",
        "layers": {
            "attention": {"q": {"kernel": "sgd", "bias": "sgd"}, "o": {"kernel": "sgd"}},
            "mlp": {"up": "adam"},
            "norm": {"scale": "frozen"},
        },
        "head": "adam",
    }
    theirs = optax.partition(
        {
            "adam": optax.adamw(schedule(), b2=0.95, weight_decay=0.0),
            "slow": optax.adamw(lambda step: 0.25 * schedule()(step), b2=0.95, weight_decay=0.0),
            "sgd": optax.sgd(schedule()),
            "frozen": optax.set_to_zero(),
        },
        labels,
    )
    mine_params, _, _ = run_config(mine)
    assert_same_bits(mine_params, run_optax(theirs))
    frozen = mine_params["layers"]["norm"]["scale"]
    np.testing.assert_array_equal(frozen, make_params()["layers"]["norm"]["scale"])


def test_frozen_gradients_count_for_no_norm():
    mine = config(
        SGD(momentum=None),
        clip=(NormClip(max_norm=0.1),),
        groups=(Group(pattern="layers|head", freeze=True),),
        schedule=Constant(),
        learning_rate=1.0,
    )
    params = make_params()
    built = build(mine, total_steps=1, params=params, axes=AXES)
    grads = gradients(params, 0)
    after, _ = jax.jit(lambda g, p: built.update(g, built.init(p), p))(grads, params)
    moved = after["embed"] - params["embed"]
    np.testing.assert_allclose(np.linalg.norm(moved), 0.1, rtol=1e-5)


def test_accumulation_is_multi_steps():
    mine = config(AdamW(), accumulate=3, schedule=Constant())
    theirs = optax.MultiSteps(
        optax.adamw(RATE, b2=0.95, weight_decay=0.1, mask=DECAYS), 3
    ).gradient_transformation()
    assert_same_bits(run_config(mine)[0], run_optax(theirs))


def test_schedule_counts_calls_under_accumulation():
    _, _, built = run_config(config(AdamW(), accumulate=3, schedule=Cosine(warmup_steps=2)))
    inner = optax.warmup_cosine_decay_schedule(0.0, RATE, 2, STEPS // 3, end_value=RATE * 0.1)
    assert [float(built.schedule(call)) for call in range(STEPS)] == [
        float(inner(call // 3)) for call in range(STEPS)
    ]


def test_lookahead_is_optax_lookahead():
    mine = config(AdamW(), lookahead=Lookahead(sync_period=2, slow_step_size=0.4))
    params, state, built = run_config(mine)
    adamw = optax.adamw(schedule(), b2=0.95, weight_decay=0.1, mask=DECAYS)
    transform = optax.lookahead(adamw, 2, 0.4)
    pair = optax.LookaheadParams.init_synced(make_params())
    other = jax.jit(transform.init)(pair)

    @jax.jit
    def step(grads, state, pair):
        updates, state = transform.update(grads, state, pair)
        return optax.apply_updates(pair, updates), state

    for call in range(CALLS):
        pair, other = step(gradients(pair.fast, call), other, pair)
    assert_same_bits(params, pair.fast)
    assert_same_bits(built.eval_params(params, state), pair.slow)


def test_ema_averages_the_updated_parameters():
    mine = config(AdamW(), ema=EMA(decay=0.7))
    params = make_params()
    built = build(mine, total_steps=STEPS, params=params, axes=AXES)
    step, state = jax.jit(built.update), jax.jit(built.init)(params)
    average = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    for call in range(CALLS):
        params, state = step(gradients(params, call), state, params)
        average = jax.tree.map(lambda a, p: 0.7 * a + 0.3 * np.asarray(p), average, params)
    got = built.eval_params(params, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, average)
    plain, _, _ = run_config(config(AdamW()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, plain)


def test_debiased_ema_of_constant_parameters_is_those_parameters():
    mine = config(AdamW(), ema=EMA(decay=0.9, debias=True), learning_rate=1e-30)
    params, state, built = run_config(mine)
    got = built.eval_params(params, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, params)


def slices(tree, layer):
    """One layer of the stacked parameters, heads merged with their width, as plain arrays."""

    def one(axes, x):
        if axes[0] == "layers":
            x, axes = x[layer], axes[1:]
        if "head_dim" in axes:
            dim = axes.index("head_dim")
            x = x.reshape(*x.shape[: dim - 1], -1, *x.shape[dim + 1 :])
        return x

    return jax.tree.map(one, AXES, tree, is_leaf=is_tuple)


def run_unstacked(transform, layer):
    """What Optax computes where layers were never stacked, on gradients that are given."""
    one = slices(make_params(), layer)

    @jax.jit
    def step(grads, state, params):
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(transform.init)(one)
    for call in range(CALLS):
        one, state = step(slices(make_params(seed=100 + call), layer), state, one)
    return one


def assert_each_layer_is_its_own(config_, transform, rtol):
    built = build(config_, total_steps=STEPS, params=make_params(), axes=AXES)
    mine, _, _ = run_built(built, lambda _, call: make_params(seed=100 + call))
    for layer in (0, 2):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6),
            slices(mine, layer),
            run_unstacked(transform, layer),
        )


@pytest.mark.slow
def test_adafactor_treats_each_layer_as_its_own_matrix():
    optimizer = Adafactor(min_dim_size_to_factor=8, momentum=0.9, weight_decay_rate=0.01)
    mask = jax.tree.map(lambda _: False, DECAYS)
    mask["layers"]["attention"] = {"q": {"kernel": True, "bias": False}, "o": {"kernel": True}}
    theirs = optax.adafactor(
        schedule(),
        min_dim_size_to_factor=8,
        momentum=0.9,
        weight_decay_rate=0.01,
        weight_decay_mask=mask,
    )
    assert_each_layer_is_its_own(config(optimizer, decay=("kernel",)), theirs, rtol=2e-5)


def test_adaptive_clip_takes_units_within_a_layer():
    mine = config(SGD(momentum=None), clip=(AdaptiveClip(clipping=0.05),), schedule=Constant())
    theirs = optax.chain(optax.adaptive_grad_clip(0.05), optax.sgd(RATE))
    assert_each_layer_is_its_own(mine, theirs, rtol=1e-5)


def test_adafactor_without_stacked_layers_is_optax_adafactor():
    shapes = {"a": (16, 24), "b": (24,)}
    start = make_params(shapes=shapes)
    built = build(config(Adafactor(min_dim_size_to_factor=8)), total_steps=STEPS, params=start)
    transform = optax.adafactor(schedule(), min_dim_size_to_factor=8)
    mine, state = start, jax.jit(built.init)(start)
    theirs, other = start, jax.jit(transform.init)(start)
    step, update = jax.jit(built.update), jax.jit(transform.update)
    for call in range(CALLS):
        grads = make_params(seed=call, shapes=shapes)
        mine, state = step(grads, state, mine)
        updates, other = update(grads, other, theirs)
        theirs = jax.tree.map(np.add, theirs, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mine, theirs)
