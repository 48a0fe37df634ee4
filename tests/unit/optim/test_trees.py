"""Any kind of parameter tree goes in and comes out as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.optim import EMA, AdamW, Constant, Lookahead, Muon, OptimConfig, build
from fornax.optim.tree import flatten, nest


class Model(nnx.Module):
    def __init__(self):
        self.value = nnx.Param(jnp.ones((4, 6)), axes=("embed", "mlp"))
        self.blocks = nnx.List([nnx.Param(jnp.ones(4), axes=("norm",))])


def test_variables_are_named_without_their_wrapper():
    assert list(flatten(nnx.state(Model()))) == ["blocks/0", "value"]


def test_two_leaves_of_one_path_are_refused():
    with pytest.raises(ConfigError, match="two parameters have the path 'a/b'"):
        flatten({"a": {"b": 1}, "a/b": 2})


def test_nesting_undoes_flattening():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert nest(flatten(tree)) == tree


@pytest.mark.parametrize("optimizer", [AdamW(), Muon()])
def test_nnx_state_trains_as_the_plain_dict_does(optimizer):
    config = OptimConfig(optimizer=optimizer, schedule=Constant(), ema=EMA())
    state = nnx.state(Model())
    plain = {"blocks": {"0": jnp.ones(4)}, "value": jnp.ones((4, 6))}
    axes = {"blocks": {"0": ("norm",)}, "value": ("embed", "mlp")}
    results = []
    for params, names in ((state, None), (plain, axes)):
        chain = build(config, total_steps=2, params=params, axes=names)
        grads = jax.tree.map(lambda x: 0.5 * x, params)
        opt_state = jax.jit(chain.init)(params)
        after, opt_state = jax.jit(chain.update)(grads, opt_state, params)
        assert jax.tree.structure(after) == jax.tree.structure(params)
        average = chain.eval_params(after, opt_state)
        assert jax.tree.structure(average) == jax.tree.structure(params)
        results.append([*flatten(after).values(), *flatten(average).values()])
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_optimizer_state_does_not_depend_on_the_kind_of_tree():
    state = nnx.state(Model())
    chain = build(OptimConfig(), total_steps=20, params=state)
    names = [
        jax.tree_util.keystr(p)
        for p, _ in jax.tree_util.tree_leaves_with_path(jax.eval_shape(chain.init, state))
    ]
    assert any(name.endswith(".mu['value']") for name in names)
    assert any(name.endswith(".mu['blocks']['0']") for name in names)


@pytest.mark.parametrize("average", [{"ema": EMA()}, {"lookahead": Lookahead()}])
def test_parameters_and_state_can_be_donated_together(average):
    params = {"w": jnp.ones((4, 4))}
    chain = build(OptimConfig(**average), total_steps=20, params=params)
    state = chain.init(params)
    step = jax.jit(chain.update, donate_argnums=(1, 2))
    for _ in range(2):
        params, state = step({"w": jnp.ones((4, 4))}, state, params)
    assert np.isfinite(params["w"]).all()


def test_parameters_keep_their_dtype():
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    chain = build(OptimConfig(ema=EMA()), total_steps=20, params=params)
    state = chain.init(params)
    after, state = jax.jit(chain.update)(params, state, params)
    assert after["w"].dtype == jnp.bfloat16
    assert chain.eval_params(after, state)["w"].dtype == jnp.bfloat16
    assert {x.dtype.name for x in jax.tree.leaves(state) if x.ndim} == {"float32"}
