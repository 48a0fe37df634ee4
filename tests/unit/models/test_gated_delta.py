"""Gated DeltaNet: what a cache keeps, how files hold it, what refuses it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tests.unit.models.conftest import CONFIGS, tokens_of

from fornax.adapters import LoRA, attach, save_peft
from fornax.config.errors import ConfigError
from fornax.mesh import MeshConfig, make_mesh, use_mesh
from fornax.models import (
    MODEL_USES,
    DecoderConfig,
    ExpertsConfig,
    GatedDeltaConfig,
    abstract_decoder,
    check_model,
    config_from_hf,
    config_to_hf,
    create_decoder,
    init_cache,
    load_pretrained,
    save_pretrained,
)

CONFIG = CONFIGS["linear"]
D, K, R, H, V = 16, 2, 2, 8, 6


def _family_config(**changes: object) -> DecoderConfig:
    """What Qwen3.5 can say; with experts, Qwen3-Next."""
    fields = {"attention_output_bias": True, "num_layers": 2}
    return DecoderConfig(**{**vars(CONFIG), **fields, **changes})


EXPERTS = ExpertsConfig(
    num_experts=4,
    experts_per_token=2,
    intermediate_size=8,
    shared_intermediate_size=8,
    shared_gate=True,
)


def test_a_cache_keeps_keys_of_layers_that_attend_and_states_of_the_others() -> None:
    cache = init_cache(CONFIG, 3, 40, jnp.bfloat16)
    assert cache.k_LBSKH.shape == (2, 3, 40, 2, 8)
    assert cache.delta is not None
    assert [x.shape for x in cache.delta.inputs] == [(2, 3, 3, K, n) for n in (H, H, R * V)]
    assert cache.delta.memory_BKRHV.shape == (2, 3, K, R, H, V)
    assert cache.delta.memory_BKRHV.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("experts", [None, EXPERTS], ids=["qwen3-5", "qwen3-next"])
def test_files_are_read_back(experts: ExpertsConfig | None, tmp_path: Path) -> None:
    """By head in one tensor, or one tensor after the other; whole and on a mesh."""
    model = create_decoder(_family_config(experts=experts), seed=5)
    save_pretrained(model, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    start, layer = "model.layers.0.linear_attn", model.layers.gated_delta
    parts = {n: np.asarray(getattr(layer, n).kernel[0]) for n in ("q", "k", "v", "gate")}
    if experts is None:
        rows = [parts[n].reshape(D, -1).T for n in "qkv"]
        np.testing.assert_array_equal(stored[f"{start}.in_proj_qkv.weight"], np.concatenate(rows))
    else:
        rows = [parts[n][:, head].T for head in range(K) for n in parts]
        np.testing.assert_array_equal(stored[f"{start}.in_proj_qkvz.weight"], np.concatenate(rows))
    assert stored[f"{start}.conv1d.weight"].shape == (K * (2 * H + R * V), 1, 4)
    save_file({**stored, "mtp.fc.weight": stored["lm_head.weight"]}, tmp_path / "mtp")
    (tmp_path / "mtp").replace(tmp_path / "model" / "model.safetensors")  # left out when loading
    for mesh in (None, make_mesh(MeshConfig(fsdp=4, tensor=2))):
        again = nnx.state(load_pretrained(tmp_path / "model", mesh=mesh))
        jax.tree.map(np.testing.assert_array_equal, again, nnx.state(model))


@pytest.mark.slow
def test_released_mixtures_hold_all_experts_in_one_tensor(tmp_path: Path) -> None:
    config = _family_config(experts=EXPERTS, family="qwen3_5_moe_text")
    model = create_decoder(config, seed=5)
    save_pretrained(model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    for layer in range(2):
        start = f"model.layers.{layer}.mlp.experts"

        def taken(part: str, start: str = start) -> np.ndarray:
            return np.stack([stored.pop(f"{start}.{e}.{part}_proj.weight") for e in range(4)])

        both = [taken("gate"), taken("up")]
        stored[f"{start}.gate_up_proj"] = np.concatenate(both, axis=1)
        stored[f"{start}.down_proj"] = taken("down")
    save_file(stored, file)
    again = nnx.state(load_pretrained(tmp_path / "model"))
    jax.tree.map(np.testing.assert_array_equal, again, nnx.state(model))


def test_the_family_is_found_by_what_the_model_is() -> None:
    assert config_to_hf(_family_config())["model_type"] == "qwen3_5_text"
    written = config_to_hf(_family_config(experts=EXPERTS))
    assert written["model_type"] == "qwen3_next"
    assert config_from_hf(written).gated_delta == CONFIG.gated_delta
    mixture = _family_config(experts=EXPERTS, family="qwen3_5_moe_text")
    assert "intermediate_size" not in config_to_hf(mixture)


@pytest.mark.slow
def test_adapters_that_peft_cannot_say_are_refused(tmp_path: Path) -> None:
    model = create_decoder(_family_config(experts=EXPERTS))
    assert "layers/gated_delta/o" in attach(
        model, LoRA(targets=("gated_delta/*",)), rngs=nnx.Rngs(0)
    )
    with pytest.raises(ConfigError, match=r"layers/gated_delta/beta.* PEFT's files cannot adapt"):
        save_peft(model, tmp_path / "adapter")


@pytest.mark.parametrize(
    "use",
    sorted(
        set(MODEL_USES)
        - {"train", "tune", "serve", "prefix reuse", "speculation", "serve adapters"}
        - {"plan", "plan serve", "preflight", "stage axis", "train in 8 bits"}
    ),
)
def test_what_does_not_take_it_says_what_does(use: str) -> None:
    with pytest.raises(ConfigError, match=rf"linear attention .*not supported yet \({use}\); \w+"):
        check_model(CONFIG, use)


def test_rows_divided_over_a_mesh_are_refused() -> None:
    mesh = make_mesh(MeshConfig(fsdp=4, context=2))
    with use_mesh(mesh), pytest.raises(ConfigError, match=r"context axis\); give its devices to"):
        abstract_decoder(CONFIG).hidden(tokens_of(4, 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_pattern": ("full",)}, "linear layers need `gated_delta`"),
        ({"gated_delta": None}, "gated_delta=None and mamba2=None do not go together"),
    ],
)
def test_a_pattern_without_its_sizes_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _family_config(**changes)


def test_value_heads_are_shared_evenly() -> None:
    with pytest.raises(ConfigError, match="num_value_heads=3 is not a multiple of num_key_heads=2"):
        GatedDeltaConfig(num_key_heads=2, num_value_heads=3, key_dim=4, value_dim=4)
