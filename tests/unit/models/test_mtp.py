"""Modules that predict further tokens in files: read where asked for, written back to the byte."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tests.unit.models.conftest import CONFIGS
from tests.unit.models.test_gated_delta import EXPERTS, _family_config
from tests.unit.models.test_load import assert_same, rewrite

from fornax.config.errors import CheckpointError, ConfigError
from fornax.models import (
    Decoder,
    DecoderConfig,
    ExpertsConfig,
    abstract_decoder,
    create_decoder,
    flops_per_token,
    load_pretrained,
    num_parameters,
    save_pretrained,
    stored_modules,
)

D = 16
_ROUTED: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": D,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_mtp_modules": 2,
    "num_heads": 4,
    "max_position_embeddings": 64,
    "mlp_pattern": ("mlp", "experts"),
    "experts": ExpertsConfig(
        num_experts=4,
        experts_per_token=2,
        intermediate_size=8,
        score="sigmoid",
        normalize_eps=1e-20,
        selection_bias=True,
        shared_intermediate_size=8,
    ),
}
_LATENT = {name: getattr(CONFIGS["latent"], name) for name in ("latent", "rope")}
_LATENT["latent"] = dataclasses.replace(_LATENT["latent"], bias=False)
FILES = {
    "deepseek_v3": DecoderConfig(**_ROUTED, **_LATENT),
    "glm4_moe": DecoderConfig(**_ROUTED, num_kv_heads=2, head_dim=8, family="glm4_moe"),
    "qwen3_next": _family_config(experts=EXPERTS, num_mtp_modules=1),
    "qwen3_5_text": _family_config(num_mtp_modules=1),
    "qwen3_5_moe_text": _family_config(
        experts=EXPERTS, num_mtp_modules=1, family="qwen3_5_moe_text"
    ),
}
KEYS = {
    "deepseek_v3": "num_nextn_predict_layers",
    "glm4_moe": "num_nextn_predict_layers",
    "qwen3_5_text": "mtp_num_hidden_layers",
    "qwen3_5_moe_text": "mtp_num_hidden_layers",
}


@functools.cache
def _drawn(name: str) -> Decoder:
    """A model whose norms and biases are drawn too."""
    model = create_decoder(FILES[name], seed=2, dtype=jnp.bfloat16)
    rng = np.random.default_rng(1)

    def moved(x: jax.Array) -> jax.Array:
        return x + jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype)

    nnx.update(model, jax.tree.map(moved, nnx.state(model)))
    return model


def _bytes(folder: Path) -> dict[str, bytes]:
    tensors = load_file(folder / "model.safetensors")
    return {name: value.tobytes() for name, value in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        pytest.param("glm4_moe", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5_text", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5_moe_text", marks=pytest.mark.exhaustive),
    ],
)
def test_files_are_read_with_their_modules_where_asked_and_written_back(
    name: str, tmp_path: Path
) -> None:
    model = _drawn(name)
    save_pretrained(model, tmp_path / "with")
    count = FILES[name].num_mtp_modules
    written = json.loads((tmp_path / "with" / "config.json").read_text())
    assert written.get(KEYS.get(name, "mtp")) == (count if name in KEYS else None)
    assert stored_modules(tmp_path / "with") == count
    again = load_pretrained(tmp_path / "with", mtp=True)
    assert_same(again, model)
    save_pretrained(again, tmp_path / "again")
    assert _bytes(tmp_path / "again") == _bytes(tmp_path / "with")
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "again" / file).read_text() == (tmp_path / "with" / file).read_text()

    plain = load_pretrained(tmp_path / "with")
    assert plain.mtp is None
    assert plain.config.num_mtp_modules == 0
    save_pretrained(plain, tmp_path / "without")
    kept = _bytes(tmp_path / "without")
    start = ("mtp.", "model.layers.2.", "model.layers.3.")
    everything = _bytes(tmp_path / "with")
    assert kept == {key: x for key, x in everything.items() if not key.startswith(start)}
    assert stored_modules(tmp_path / "without") == 0
    with pytest.raises((ConfigError, CheckpointError), match=r"no modules|missing mtp\."):
        load_pretrained(tmp_path / "without", mtp=True)


@pytest.mark.slow
def test_names_and_the_order_of_the_projections_inputs_are_those_of_released_files(
    tmp_path: Path,
) -> None:
    """What vLLM reads: the embedding's norm is `enorm`, and comes first."""
    model = _drawn("deepseek_v3")
    save_pretrained(model, tmp_path / "v3")
    stored = load_file(tmp_path / "v3" / "model.safetensors")
    assert model.mtp is not None
    for module, start in enumerate(("model.layers.2", "model.layers.3")):
        names = {key.removeprefix(f"{start}.") for key in stored if key.startswith(f"{start}.")}
        assert {key for key in names if not key.startswith(("mlp.", "self_attn."))} == {
            "embed_tokens.weight",
            "enorm.weight",
            "hnorm.weight",
            "eh_proj.weight",
            "shared_head.norm.weight",
            "shared_head.head.weight",
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
        }
        own = stored[f"{start}.enorm.weight"]
        np.testing.assert_array_equal(own, model.mtp.embed_norm.scale[module])
        kernel = np.asarray(model.mtp.projection.kernel[module])
        np.testing.assert_array_equal(stored[f"{start}.eh_proj.weight"], kernel.T)
        np.testing.assert_array_equal(
            stored[f"{start}.shared_head.head.weight"], stored["lm_head.weight"]
        )

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.3.embed_tokens.weight"][3, 2] += 1

    rewrite(tmp_path / "v3", change)
    load_pretrained(tmp_path / "v3")
    with pytest.raises(CheckpointError, match=r"layers\.3\.embed_tokens\.weight differs from"):
        load_pretrained(tmp_path / "v3", mtp=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fused",
    [("model.layers.0", "model.layers.1"), ("model.layers.0", "model.layers.1", "mtp.layers.0")],
)
def test_released_mixtures_may_hold_a_modules_experts_in_either_way(
    fused: tuple[str, ...], tmp_path: Path
) -> None:
    model = _drawn("qwen3_5_moe_text")
    save_pretrained(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for layer in fused:
        start = f"{layer}.mlp.experts"

        def taken(part: str, start: str = start) -> np.ndarray:
            return np.stack([stored.pop(f"{start}.{e}.{part}_proj.weight") for e in range(4)])

        both = [taken("gate"), taken("up")]
        stored[f"{start}.gate_up_proj"] = np.concatenate(both, axis=1)
        stored[f"{start}.down_proj"] = taken("down")
    save_file(stored, tmp_path / "model.safetensors")
    assert_same(load_pretrained(tmp_path, mtp=True), model)


@pytest.mark.slow
def test_what_files_cannot_hold_is_said(tmp_path: Path) -> None:
    two = dataclasses.replace(FILES["qwen3_5_text"], num_mtp_modules=2, family="qwen3_5_text")
    with pytest.raises(ConfigError, match="mtp_num_hidden_layers=2 is not supported; use a number"):
        save_pretrained(create_decoder(two), tmp_path / "two")
    llama = DecoderConfig(hidden_size=16, num_layers=1, num_heads=2, vocab_size=8)
    with pytest.raises(ConfigError, match=r"cannot express num_mtp_modules=1"):
        save_pretrained(
            create_decoder(dataclasses.replace(llama, num_mtp_modules=1)), tmp_path / "llama"
        )
    save_pretrained(create_decoder(llama), tmp_path / "plain")
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no modules that predict further"):
        load_pretrained(tmp_path / "plain", mtp=True)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_modules_are_counted(name: str) -> None:
    config = FILES[name]
    without = dataclasses.replace(config, num_mtp_modules=0)
    state = nnx.state(abstract_decoder(config))
    assert num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(state))
    more = flops_per_token(config, 64, training=False) - flops_per_token(
        without, 64, training=False
    )
    products = 2 * (2 * D * D + config.vocab_size * D)  # the projection and the logits
    assert more > config.num_mtp_modules * products
