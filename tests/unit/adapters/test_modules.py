"""Adapters on any linear module of NNX: the output is that of the merged weights.

Legend: B rows, R rank.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.adapters import (
    LoRA,
    LoRAParam,
    attach,
    detach,
    disabled,
    is_adapted,
    merge,
    merged,
    merged_params,
    unmerge,
)
from fornax.config.errors import ConfigError


class Model(nnx.Module):
    """One layer of each kind, with biases."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.general = nnx.LinearGeneral((2, 4), (4, 2), axis=(-2, -1), rngs=rngs)
        self.batched = nnx.LinearGeneral(4, 5, axis=-1, batch_axis={0: 3}, rngs=rngs)
        self.einsum = nnx.Einsum("...td,hdk->...htk", (2, 4, 3), (2, 3), rngs=rngs)
        modules: Any = (self.linear, self.general, self.batched, self.einsum)
        for module in modules:
            module.bias[...] = jax.random.normal(rngs.params(), module.bias.shape)

    def __call__(self, x_B8: jax.Array) -> tuple[jax.Array, ...]:
        y = self.linear(x_B8)
        general = self.general(y.reshape(-1, 2, 4))
        batched = self.batched(general.reshape(3, -1, 4))
        einsum = self.einsum(general.reshape(2, -1, 4))
        return y, general, batched, einsum


@functools.cache
def drawn() -> tuple[Any, nnx.State]:
    return nnx.split(Model(nnx.Rngs(0)))


def base() -> Model:
    """The base, drawn once; its arrays are shared."""
    return nnx.merge(*drawn())


X_B8: Any = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
KINDS = {
    "lora": LoRA(rank=3, targets=("*",), init="gaussian"),
    "dora": LoRA(rank=2, targets=("*",), dora=True, rslora=True),
    "int8-dora": LoRA(rank=2, targets=("*",), dora=True, quantize="int8"),
    "nf4": LoRA(rank=2, targets=("general", "batched", "einsum"), quantize="nf4"),
}


def stir(model: nnx.Module) -> None:
    """Move every adapter away from its start."""
    rng = np.random.default_rng(1)

    def moved(x: jax.Array) -> jax.Array:
        return jnp.asarray(np.asarray(x) + 0.3 * rng.normal(size=x.shape), x.dtype)

    nnx.update(model, jax.tree.map(moved, nnx.state(model, LoRAParam)))


@functools.cache
def plain() -> tuple[np.ndarray, ...]:
    return tuple(map(np.asarray, jax.jit(Model.__call__)(base(), X_B8)))


@functools.partial(jax.jit, static_argnums=0)
def run(graphdef: Any, state: nnx.State) -> dict[str, tuple[jax.Array, ...]]:
    model = nnx.merge(graphdef, state)
    with disabled(model):
        base = model(X_B8)
    return {"found": model(X_B8), "base": base, "merged": merged(model)(X_B8)}


def outputs(model: nnx.Module) -> dict[str, tuple[np.ndarray, ...]]:
    """Of the model as it is, switched off, and merged; compiled once for each kind of model."""
    return jax.tree.map(np.asarray, run(*nnx.split(model)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_that_of_the_merged_weights(kind: str) -> None:
    model = base()
    structure = jax.tree.structure(nnx.state(model))
    paths = attach(model, KINDS[kind], rngs=nnx.Rngs(1))
    assert len(paths) == (3 if kind == "nf4" else 4)
    start = outputs(model)
    near = 0.5 if KINDS[kind].quantize else 1e-5  # B is zero: nothing but the codes changes it
    for y, expected in zip(start["found"], plain(), strict=True):
        np.testing.assert_allclose(y, expected, atol=near)
    stir(model)
    after = outputs(model)
    for n in range(4):
        np.testing.assert_allclose(after["found"][n], after["merged"][n], atol=2e-5, rtol=1e-5)
        np.testing.assert_allclose(after["base"][n], start["found"][n], atol=1e-5)
        changed = np.abs(after["found"][n] - start["found"][n]).max()
        assert changed > 0.1 or (kind == "nf4" and n == 0)
    detach(model)
    assert jax.tree.structure(nnx.state(model)) == structure
    assert type(model.einsum) is nnx.Einsum


def test_dora_is_the_papers_formula_in_float64() -> None:
    model = nnx.Dict(q=nnx.Linear(8, 6, rngs=nnx.Rngs(0)))
    attach(model, LoRA(rank=3, alpha=5, targets=("q",), dora=True), rngs=nnx.Rngs(1))
    stir(model)
    q: Any = model.q
    w, a, b, m, bias = (
        np.asarray(v.get_value(), np.float64)
        for v in (q.kernel, q.lora_a, q.lora_b, q.lora_magnitude, q.bias)
    )
    whole = w + 5 / 3 * a @ b
    norm = np.linalg.norm(whole, axis=0)
    x = np.asarray(X_B8, np.float64)

    def loss(m, a, b):  # the norm is a constant to the gradient
        return jnp.sum(jnp.sin(jnp.asarray(x) @ ((w + 5 / 3 * a @ b) * m / norm) + bias))

    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(*(jnp.asarray(v, jnp.float32) for v in (m, a, b)))
    graphdef, lora, rest = nnx.split(model, LoRAParam, ...)

    def ours(lora: nnx.State) -> Any:
        y = nnx.merge(graphdef, lora, rest).q(X_B8)
        return jnp.sum(jnp.sin(y)), y

    found, y = jax.jit(jax.grad(ours, has_aux=True))(lora)
    np.testing.assert_allclose(y, x @ (whole * m / norm) + bias, rtol=1e-5, atol=1e-5)
    for name, value in zip(("lora_magnitude", "lora_a", "lora_b"), expected, strict=True):
        np.testing.assert_allclose(found["q"][name].get_value(), value, rtol=1e-4, atol=1e-4)


def test_merge_is_undone_exactly() -> None:
    model = base()
    attach(model, KINDS["dora"], rngs=nnx.Rngs(1))
    stir(model)
    kernel, before = np.asarray(model.linear.kernel[...]), outputs(model)["found"]
    with pytest.raises(ConfigError, match="nothing is merged"):
        unmerge(model)
    merge(model)
    assert np.abs(np.asarray(model.linear.kernel[...]) - kernel).max() > 0.1
    with pytest.raises(ConfigError, match="merged already"):
        merge(model)
    with pytest.raises(ConfigError, match="merged"), disabled(model):
        pass
    for y, other in zip(jax.jit(Model.__call__)(model, X_B8), before, strict=True):
        np.testing.assert_allclose(y, other, atol=2e-5)
    unmerge(model)
    np.testing.assert_array_equal(model.linear.kernel[...], kernel)


def test_merged_params_stand_under_the_bases_own_paths() -> None:
    model = base()
    plain = jax.tree.structure(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    attach(model, KINDS["lora"], rngs=nnx.Rngs(1))
    graphdef, state = nnx.split(model)
    params = jax.jit(lambda state: merged_params(nnx.merge(graphdef, state)))(state)
    assert jax.tree.structure(params) == plain
    assert is_adapted(model), "the model itself stays as it is"


def test_adapters_are_attached_once() -> None:
    model = base()
    attach(model, KINDS["lora"], rngs=nnx.Rngs(1))
    with pytest.raises(ConfigError, match="has adapters already"):
        attach(model, KINDS["lora"], rngs=nnx.Rngs(1))
    detach(model)
    attach(model, KINDS["int8-dora"], rngs=nnx.Rngs(1))


@pytest.mark.slow
def test_dropout_stops_with_eval_and_repeats_with_its_stream() -> None:
    def made() -> Model:
        model = base()
        attach(model, LoRA(rank=2, targets=("linear",), dropout=0.5), rngs=nnx.Rngs(1))
        stir(model)
        return model

    model = made()
    first, second = model(X_B8)[0], model(X_B8)[0]
    assert np.abs(first - second).max() > 0.01
    np.testing.assert_array_equal(made()(X_B8)[0], first)
    model.eval()
    np.testing.assert_array_equal(model(X_B8)[0], model(X_B8)[0])
    np.testing.assert_allclose(model(X_B8)[0], merged(model)(X_B8)[0], atol=1e-5)
    model.train()
    assert np.abs(model(X_B8)[0] - model(X_B8)[0]).max() > 0.01
