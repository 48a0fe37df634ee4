"""Adapters on a mixture's experts, each its own or one for all, on rows sorted by expert.

Legend: B sequences, T tokens.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tests.unit.adapters.test_decoder import equations

from fornax.adapters import (
    LoRA,
    LoRAParam,
    attach,
    detach,
    disabled,
    load_peft,
    merge,
    merged,
    save_peft,
    unmerge,
)
from fornax.adapters.attach import adapted_modules
from fornax.config.errors import ConfigError
from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh, tree_shardings, use_mesh
from fornax.models import (
    Decoder,
    DecoderConfig,
    ExpertsConfig,
    abstract_decoder,
    config_from_hf,
    create_decoder,
)

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    tie_embeddings=False,
    experts=ExpertsConfig(
        num_experts=4,
        experts_per_token=2,
        intermediate_size=24,
        bias=True,
        shared_intermediate_size=16,
    ),
)
TOKENS_BT: Any = np.random.default_rng(0).integers(0, 64, (8, 12))
TARGET_D = np.random.default_rng(1).normal(size=32).astype(np.float32)
"""A mean of squares alone would be 1 whatever the layers do: hidden vectors are normalized."""
OPTIONS: Any = {
    "plain": {"rslora": True, "rank_pattern": {"experts/down": 2}},
    "dora on int8": {"quantize": "int8", "dora": True},
    "shared": {"experts": "shared", "dora": True, "rank_pattern": {"experts/down": 2}},
}


@functools.cache
def drawn() -> tuple[Any, nnx.State]:
    model = create_decoder(CONFIG, seed=1)
    for part in (model.layers.experts.gate, model.layers.experts.down):
        part.bias[...] = jax.random.normal(jax.random.key(3), part.bias.shape)
    return nnx.split(model)


def adapted(**options: Any) -> Decoder:
    model = nnx.merge(*drawn())
    attach(model, LoRA(rank=4, targets=("experts/*",), **options), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(2)

    def moved(x: jax.Array) -> jax.Array:
        return jnp.asarray(np.asarray(x) + 0.1 * rng.normal(size=x.shape), x.dtype)

    nnx.update(model, jax.tree.map(moved, nnx.state(model, LoRAParam)))
    return model


def loss(model: Decoder, remat: str = "none") -> jax.Array:
    return jnp.mean((model.hidden(TOKENS_BT, remat=remat) - TARGET_D) ** 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind", ["plain", "dora on int8", pytest.param("shared", marks=pytest.mark.exhaustive)]
)
def test_loss_and_gradients_are_those_of_merged_weights(kind: str) -> None:
    """Merged, each expert's kernel is W + s A B: the gradient of A and B runs through that sum."""
    graphdef, lora, rest = nnx.split(adapted(**OPTIONS[kind]), LoRAParam, ...)

    @jax.jit
    def both(lora: nnx.State, rest: nnx.State) -> Any:
        def apart(lora: nnx.State) -> jax.Array:
            return loss(nnx.merge(graphdef, lora, rest))

        def whole(lora: nnx.State) -> jax.Array:
            return loss(merged(nnx.merge(graphdef, lora, rest)))

        return jax.value_and_grad(apart)(lora), jax.value_and_grad(whole)(lora)

    (value, grads), (wanted, wanted_grads) = both(lora, rest)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for (path, g), (_, w) in zip(
        nnx.to_flat_state(grads), nnx.to_flat_state(wanted_grads), strict=True
    ):
        np.testing.assert_allclose(
            g.get_value(), w.get_value(), rtol=1e-3, atol=1e-6, err_msg=str(path)
        )
        assert np.abs(w.get_value()).max() > 1e-5, path


@pytest.mark.slow
def test_switched_off_merged_and_taken_off() -> None:
    @jax.jit
    def run(state: nnx.State) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, state)
        with disabled(model):
            return loss(nnx.merge(graphdef, state)), loss(model)

    def plainly(model: Decoder) -> jax.Array:
        return jax.jit(lambda state: loss(nnx.merge(nnx.graphdef(model), state)))(nnx.state(model))

    model = adapted(dora=True)
    graphdef, state = nnx.split(model)
    on, off = run(state)
    base_graphdef, base_state = drawn()
    base = jax.jit(lambda state: loss(nnx.merge(base_graphdef, state)))(base_state)
    np.testing.assert_array_equal(off, base)
    assert abs(on - base) > 1e-3
    merge(model)
    np.testing.assert_allclose(plainly(model), on, rtol=1e-5)
    unmerge(model)
    assert nnx.graphdef(model) == graphdef
    detach(model)
    assert nnx.graphdef(model) == base_graphdef
    for x, y in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(base_state), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("remat", "quantize", "pattern"),
    [
        ("none", None, ("experts",)),
        ("none", "nf4", ("mlp", "experts")),
        ("full", "nf4", ("experts",)),
    ],
)
def test_no_second_copy_of_the_experts(remat: str, quantize: Any, pattern: Any) -> None:
    """No stack of kernels goes from the forward to the backward pass."""
    model = abstract_decoder(dataclasses.replace(CONFIG, num_layers=4, mlp_pattern=pattern))
    attach(model, LoRA(rank=4, quantize=quantize), rngs=nnx.Rngs(0))
    graphdef, lora, rest = nnx.split(model, LoRAParam, ...)
    grad = jax.grad(lambda lora, rest: loss(nnx.merge(graphdef, lora, rest), remat))
    found = equations(jax.make_jaxpr(grad)(lora, rest).jaxpr)
    scanned = [v.aval.shape for e in found if e.primitive.name == "scan" for v in e.outvars]
    E, D, F = 4, 32, 24
    assert not [shape for shape in scanned if shape[-3:] in ((E, D, F), (E, F, D))]
    assert (E, D, 4) in [shape[-3:] for shape in scanned], "the gradient of A is not looked at"


def test_the_projections_are_adapted_and_the_router_is_not() -> None:
    model = abstract_decoder(dataclasses.replace(CONFIG, mlp_pattern=("mlp", "experts")))
    paths = attach(model, LoRA(rank=4), rngs=nnx.Rngs(0))
    experts = {path.removeprefix("layers/experts/") for path in paths if "experts" in path}
    assert experts == {"gate", "up", "down", "shared/gate", "shared/up", "shared/down"}
    assert {"layers/mlp/gate", "layers/attention/q"} <= set(paths)
    flat = dict(nnx.to_flat_state(nnx.state(model, LoRAParam)))
    a = flat["layers", "experts", "down", "lora_a"]
    assert (a.shape, a.get_metadata()["axes"]) == ((1, 4, 24, 4), ("layers", "expert", "mlp", None))
    b = flat["layers", "experts", "down", "lora_b"]
    assert (b.shape, b.get_metadata()["axes"]) == (
        (1, 4, 4, 32),
        ("layers", "expert", None, "embed"),
    )
    with_router = abstract_decoder(CONFIG)
    chosen = attach(with_router, LoRA(targets=("experts/router",)), rngs=nnx.Rngs(0))
    assert chosen == ["layers/experts/router"]


def test_shared_adapters_are_one_for_all_experts(tmp_path: Path) -> None:
    """In PEFT's files, which know none, each expert has the same."""
    experts = dataclasses.replace(CONFIG.experts, bias=False, shared_intermediate_size=None)
    config = dataclasses.replace(CONFIG, family="qwen3_moe", experts=experts, qk_norm="head")
    model = create_decoder(config, seed=1)
    attach(model, LoRA(rank=4, experts="shared"), rngs=nnx.Rngs(0))
    down = model.layers.experts.down
    assert down.lora_a.get_value().shape == (2, 1, 24, 4)
    assert down.lora_a.get_metadata()["axes"] == ("layers", None, "mlp", None)
    assert down.lora_b.get_value().shape == (2, 1, 4, 32)
    save_peft(model, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for expert in range(4):
        name = f"base_model.model.model.layers.1.mlp.experts.{expert}.down_proj.lora_A.weight"
        np.testing.assert_array_equal(tensors[name], down.lora_a.get_value()[1, 0].T)
    with pytest.raises(ConfigError, match=r"lora.experts=shared, and lora.targets adapts"):
        attach(
            abstract_decoder(config),
            LoRA(experts="shared", targets=("attention/*",)),
            rngs=nnx.Rngs(0),
        )


@pytest.mark.slow
def test_files_hold_each_experts_own(tmp_path: Path) -> None:
    """Dense layers, a shared expert and experts of another rank have names that end alike."""
    experts = dataclasses.replace(CONFIG.experts, bias=False, shared_gate=True)
    config = dataclasses.replace(
        CONFIG, family="qwen2_moe", experts=experts, mlp_pattern=("mlp", "experts"), qkv_bias=True
    )
    base = create_decoder(config, seed=1)
    model, again = nnx.clone(base), nnx.clone(base)
    ranks = {"experts/shared": 3, "experts/*": 2}
    attach(model, LoRA(rank=4, rank_pattern=ranks, dora=True), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(2)
    moved = jax.tree.map(
        lambda x: (np.asarray(x) + 0.1 * rng.normal(size=x.shape)).astype(np.float32),
        nnx.state(model, LoRAParam),
    )
    nnx.update(model, moved)
    save_peft(model, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_A.weight"
    want = model.layers.experts.down.lora_a.get_value()[0, 3].T
    np.testing.assert_array_equal(tensors[name], want)
    assert load_peft(tmp_path / "adapter", again).rank_pattern["layers/experts/down"] == 2
    for (path, x), (_, y) in zip(adapted_modules(model), adapted_modules(again), strict=True):
        assert x.lora == y.lora, path
    found, wanted = (nnx.to_flat_state(nnx.state(each, LoRAParam)) for each in (again, model))
    for (path, x), (_, y) in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x.get_value(), y.get_value(), rtol=1e-6, err_msg=str(path))


def test_dropout_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"dropout=0.1 has no place in layers/experts/down"):
        attach(abstract_decoder(CONFIG), LoRA(dropout=0.1), rngs=nnx.Rngs(0))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind", ["dora on int8", pytest.param("shared", marks=pytest.mark.exhaustive)]
)
def test_eight_devices_give_the_gradients_of_one(kind: str) -> None:
    graphdef, lora, rest = nnx.split(adapted(**OPTIONS[kind]), LoRAParam, ...)
    grad = jax.value_and_grad(lambda lora, rest: loss(nnx.merge(graphdef, lora, rest), "full"))
    expected = jax.jit(grad)(lora, rest)
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2, expert=2))
    places = [tree_shardings(state, mesh, DEFAULT_RULES) for state in (lora, rest)]
    spread = jax.device_put((lora, rest), tuple(places))
    with use_mesh(mesh, DEFAULT_RULES):
        found = jax.jit(grad)(*spread)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_adapters_without_a_name_in_the_familys_files_are_not_saved(tmp_path: Path) -> None:
    """gpt-oss stores all experts of a projection in one tensor."""
    config = config_from_hf(
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    )
    model = create_decoder(config)
    attach(model, LoRA(rank=2, targets=("experts/down",)), rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"layers/experts/down in tensors that PEFT's files"):
        save_peft(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
