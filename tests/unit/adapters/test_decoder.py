"""Adapters on stacked, scanned layers: nothing but adapters is differentiated, copied or moved.

Legend: B sequences, T tokens, L layers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.adapters import LoRA, LoRAParam, QuantizedParam, attach, disabled, merged
from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh, tree_shardings, use_mesh
from fornax.models import Decoder, DecoderConfig, abstract_decoder, create_decoder

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    tie_embeddings=False,
)
TOKENS_BT: Any = np.random.default_rng(0).integers(0, 64, (8, 12))


@functools.cache
def drawn() -> tuple[Any, nnx.State]:
    return nnx.split(create_decoder(CONFIG, seed=1))


def plain() -> Decoder:
    """The base, drawn once; its arrays are shared."""
    return nnx.merge(*drawn())


def adapted(**options: Any) -> Decoder:
    model = plain()
    attach(model, LoRA(rank=4, **options), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(2)

    def moved(x: jax.Array) -> jax.Array:
        return jnp.asarray(np.asarray(x) + 0.1 * rng.normal(size=x.shape), x.dtype)

    nnx.update(model, jax.tree.map(moved, nnx.state(model, LoRAParam)))
    return model


def test_switched_off_under_jit_it_is_the_base() -> None:
    graphdef, state = nnx.split(adapted())
    base_graphdef, base_state = drawn()

    @jax.jit
    def all_ways(state: nnx.State, base_state: nnx.State) -> Any:
        model = nnx.merge(graphdef, state)
        with disabled(model):
            reference = model(TOKENS_BT)
        base = nnx.merge(base_graphdef, base_state)(TOKENS_BT)
        return model(TOKENS_BT), reference, base, merged(model)(TOKENS_BT)

    found, reference, base, as_merged = map(np.asarray, all_ways(state, base_state))
    np.testing.assert_array_equal(reference, base)
    assert np.abs(found - reference).max() > 0.1
    np.testing.assert_allclose(found, as_merged, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dora": True}, {"quantize": "nf4", "dropout": 0.2}], ids=str)
def test_stacked_layers_are_those_of_the_merged_weights(options: dict[str, Any]) -> None:
    model = adapted(**options)
    model.eval()
    graphdef, state = nnx.split(model)

    @jax.jit
    def both(state: nnx.State) -> Any:
        model = nnx.merge(graphdef, state)
        return model(TOKENS_BT), merged(model)(TOKENS_BT)

    found, expected = both(state)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def gradient(model: Decoder, remat: str) -> tuple[Any, nnx.State, nnx.State]:
    graphdef, lora, rest = nnx.split(model, LoRAParam, ...)

    def loss(lora: nnx.State, rest: nnx.State) -> jax.Array:
        model = nnx.merge(graphdef, lora, rest)
        return jnp.mean(model.hidden(TOKENS_BT, remat=remat) ** 2)

    return jax.grad(loss), lora, rest


def equations(jaxpr: Any) -> list[Any]:
    """All equations, those inside others too."""
    found = []
    for equation in jaxpr.eqns:
        found.append(equation)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += equations(inner)
    return found


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("kinds", [("full",), ("sliding", "full")], ids=len)
def test_a_frozen_base_has_no_gradient_and_no_second_copy(
    remat: str, quantize: Any, kinds: tuple[Any, ...]
) -> None:
    """Looked up in the program: no product of a kernel's shape, no stack of kernels that a scan
    hands from the forward to the backward pass, nothing multiplied by a tangent of zeros."""
    window = None if kinds == ("full",) else 4
    config = dataclasses.replace(
        CONFIG, num_layers=4, attention_pattern=kinds, sliding_window=window
    )
    model = abstract_decoder(config)
    attach(model, LoRA(rank=4, quantize=quantize), rngs=nnx.Rngs(0))
    grad, lora, rest = gradient(model, remat)
    found = equations(jax.make_jaxpr(grad)(lora, rest).jaxpr)
    kernels = {
        v.get_value().shape[1:]
        for path, v in nnx.to_flat_state(nnx.state(abstract_decoder(config), nnx.Param))
        if path[-1] == "kernel" and path[0] == "layers"
    }
    made = [(e.primitive.name, v.aval.shape) for e in found for v in e.outvars]
    assert not [one for one in made if one[0] == "dot_general" and one[1] in kernels]
    assert "linear_tangent" not in {name for name, _ in made}
    kept = [shape for name, shape in made if name == "scan" and shape[1:] in kernels]
    assert not kept, "weights are saved for the backward pass"


@pytest.mark.slow
def test_an_abstract_model_gets_abstract_adapters() -> None:
    model = abstract_decoder(CONFIG)
    attach(model, LoRA(rank=4, dora=True, quantize="int8", dropout=0.1), rngs=nnx.Rngs(0))
    real = plain()
    attach(real, LoRA(rank=4, dora=True, quantize="int8", dropout=0.1), rngs=nnx.Rngs(0))

    def shapes(model: nnx.Module) -> dict[Any, Any]:
        flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
        return {
            path: (v.get_value().shape, v.get_value().dtype, v.get_metadata()["axes"], type(v))
            for path, v in flat
        }

    assert shapes(model) == shapes(real)
    assert nnx.graphdef(model) == nnx.graphdef(real)
    q = shapes(real)["layers", "attention", "q", "lora_b"]
    assert q == ((2, 4, 4, 8), jnp.float32, ("layers", None, "heads", "head_dim"), LoRAParam)
    assert shapes(real)["layers", "attention", "q", "kernel"][3] is QuantizedParam


@pytest.mark.exhaustive
def test_eight_devices_give_the_gradients_of_one() -> None:
    model = adapted(dora=True, quantize="int8")
    grad, lora, rest = gradient(model, "full")
    expected = jax.jit(grad)(lora, rest)
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    places = [tree_shardings(state, mesh, DEFAULT_RULES) for state in (lora, rest)]
    spread = jax.device_put((lora, rest), tuple(places))
    with use_mesh(mesh, DEFAULT_RULES):
        found = jax.jit(grad)(*spread)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    assert len(jax.tree.leaves(spread[1])[0].sharding.device_set) == 8
