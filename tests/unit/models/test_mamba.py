"""Mamba-2 and layers without an MLP: what a cache keeps, how files hold them, what refuses them."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tests.unit.models.conftest import CONFIGS, decoder_of, logits_of, tokens_of

from fornax.config.errors import ConfigError
from fornax.mesh import (
    DEFAULT_RULES,
    MeshConfig,
    make_mesh,
    named_sharding,
    tree_shardings,
    use_mesh,
)
from fornax.models import (
    MODEL_USES,
    DecoderConfig,
    ExpertsConfig,
    Mamba2Config,
    abstract_decoder,
    check_model,
    config_from_hf,
    config_to_hf,
    create_decoder,
    init_cache,
    init_states,
    load_pretrained,
    num_parameters,
    save_pretrained,
)

CONFIG = CONFIGS["mamba"]
MAMBA = CONFIG.mamba2
assert MAMBA is not None
ALONE = dataclasses.replace(CONFIG, attention_pattern=("linear",), mlp_pattern=("none",))


def _granite(**changes: object) -> DecoderConfig:
    """What Granite 4 can say."""
    wide = dataclasses.replace(CONFIG.mamba2, head_dim=8, num_groups=2)
    fields = {"mlp_pattern": None, "mamba2": wide, "embedding_multiplier": 3.0}
    return dataclasses.replace(CONFIG, **{**fields, **changes})


def test_parameters_are_counted_exactly() -> None:
    for config in (CONFIG, ALONE, _granite()):
        state = nnx.state(abstract_decoder(config))
        assert num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(state))


def test_a_cache_keeps_states_and_the_inputs_of_convolutions() -> None:
    cache = init_cache(CONFIG, 3, 40, jnp.bfloat16)
    assert cache.k_LBSKH.shape == (2, 3, 40, 2, 8)
    assert cache.delta is not None
    assert [x.shape[2:] for x in cache.delta.inputs] == [(2, 4, 6), (2, 1, 8), (2, 1, 8)]
    assert cache.delta.memory_BKRHV.shape == (2, 3, 1, 4, 8, 6)


@pytest.mark.slow
def test_pieces_of_padded_and_packed_rows_are_those_of_one_pass() -> None:
    """Documents end inside a piece and go on in the next; padding stands between."""
    tokens = tokens_of(2, 12)
    ids = np.array([[1] * 5 + [2] * 7, [0] * 2 + [1] * 6 + [2] * 4], np.int32)
    graphdef, state = nnx.split(decoder_of("mamba"))
    run = jax.jit(lambda s, tokens, ids, cache: nnx.merge(graphdef, s)(tokens, None, ids, cache))
    cache, found = init_cache(CONFIG, 2, 12), []
    for start in range(0, 12, 4):
        piece = slice(start, start + 4)
        logits, cache = run(state, tokens[:, piece], ids[:, piece], cache)
        found.append(logits)
    expected = logits_of("mamba", tokens, ids)
    real = ids > 0
    np.testing.assert_allclose(np.concatenate(found, axis=1)[real], expected[real], atol=2e-5)
    changed = np.where(ids == 1, (tokens + 7) % 32, tokens)
    after = logits_of("mamba", changed, ids)
    np.testing.assert_array_equal(after[ids == 2], expected[ids == 2])
    assert np.abs(after[ids == 1] - expected[ids == 1]).max() > 0.1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_logits_over_devices_are_those_of_one() -> None:
    """Heads are divided, and with them the channels of the one group that a norm is over."""
    tokens, ids = tokens_of(4, 12), np.array([[1] * 5 + [2] * 7, [0] * 3 + [1] * 9] * 2, np.int32)
    graphdef, state = nnx.split(decoder_of("mamba"))
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    spread = jax.device_put(state, tree_shardings(state, mesh, DEFAULT_RULES))
    rows = named_sharding(mesh, ("batch", "length"), DEFAULT_RULES)
    run = jax.jit(lambda s, tokens, ids: nnx.merge(graphdef, s)(tokens, None, ids))
    with use_mesh(mesh):
        found = run(spread, *jax.device_put((tokens, ids), rows))
    np.testing.assert_allclose(found, logits_of("mamba", tokens, ids), atol=2e-5)


def test_states_are_divided_by_group_or_within_groups() -> None:
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    for groups, dim in ((1, 3), (2, 2)):
        rule = dataclasses.replace(CONFIG.mamba2, num_groups=groups)
        states = init_states(dataclasses.replace(CONFIG, mamba2=rule), 3, np.float32, mesh)
        assert states is not None
        whole = states.memory_BKRHV.shape
        part = states.memory_BKRHV.sharding.shard_shape(whole)
        assert [a // b for a, b in zip(whole, part, strict=True)] == [
            2 if axis == dim else 1 for axis in range(6)
        ]
        x, b, _ = states.inputs
        assert x.sharding.shard_shape(x.shape)[3] == 2
        assert b.sharding.shard_shape(b.shape) == b.shape


@pytest.mark.slow
def test_files_are_read_back(tmp_path: Path) -> None:
    """Gate, inputs, B, C and steps one after another; whole and on a mesh."""
    experts = ExpertsConfig(
        num_experts=4, experts_per_token=2, intermediate_size=8, shared_intermediate_size=12
    )
    model = create_decoder(_granite(experts=experts), seed=5)
    save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "granitemoehybrid"
    stored = load_file(tmp_path / "model.safetensors")
    layer = model.layers.mamba2
    kernels = [np.asarray(getattr(layer, n).kernel[1]) for n in ("gate", "x", "b", "c", "dt")]
    rows = [kernel.reshape(16, -1).T for kernel in kernels]
    start = "model.layers.2.mamba"
    np.testing.assert_array_equal(stored[f"{start}.in_proj.weight"], np.concatenate(rows))
    assert stored[f"{start}.conv1d.weight"].shape == (4 * 8 + 2 * 2 * 8, 1, 3)
    assert stored["model.layers.0.block_sparse_moe.input_linear.weight"].shape == (4, 16, 16)
    for mesh in (None, make_mesh(MeshConfig(fsdp=4, tensor=2))):
        again = nnx.state(load_pretrained(tmp_path, mesh=mesh))
        jax.tree.map(np.testing.assert_array_equal, again, nnx.state(model))


def test_the_family_is_found_by_what_the_model_is() -> None:
    assert config_to_hf(_granite())["model_type"] == "granitemoehybrid"
    wide = dataclasses.replace(CONFIG.mamba2, head_dim=8)
    alone = dataclasses.replace(ALONE, mamba2=wide, num_heads=2, num_kv_heads=1, head_dim=4)
    written = config_to_hf(alone)
    assert written["model_type"] == "mamba2"
    assert config_from_hf(written).mamba2 == wide
    with pytest.raises(ConfigError, match=r"num_heads=4 times head_dim=6, which is not a multiple"):
        config_to_hf(dataclasses.replace(ALONE, family="mamba2"))


def test_a_factor_on_scores_is_kept_to_the_digits_of_the_file() -> None:
    """It is read as a power of -1/2; head widths without an exact root are written as one."""
    for scale in (0.015625, 0.3, 0.1443):
        values = {**config_to_hf(_granite()), "attention_multiplier": scale}
        again = config_to_hf(config_from_hf(values))["attention_multiplier"]
        assert again == pytest.approx(scale, rel=1e-14)
    assert config_to_hf(_granite(head_dim=12))["attention_multiplier"] == 12**-0.5


@pytest.mark.parametrize(
    "given", [[0.0, math.inf], [0.0, {"__float__": "Infinity"}], None], ids=str
)
def test_steps_without_a_limit(given: list | None) -> None:
    values = config_to_hf(_granite())
    del values["time_step_limit"]
    if given is not None:
        values["time_step_limit"] = given
    found = config_from_hf(values).mamba2
    assert found is not None
    assert found.dt_limit == (0.0, math.inf)


@pytest.mark.parametrize(
    "use",
    sorted(
        set(MODEL_USES)
        - {"train", "tune", "serve", "prefix reuse", "speculation", "serve adapters"}
        - {"plan", "plan serve", "preflight", "stage axis", "train in 8 bits"}
    ),
)
def test_what_does_not_take_it_says_what_does(use: str) -> None:
    what = rf"linear .*\(Mamba-2\), .*not supported yet \({use}\); \w+"
    with pytest.raises(ConfigError, match=what):
        check_model(CONFIG, use)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3, "num_groups": 2}, "num_heads=3 is not a multiple of num_groups=2"),
        ({"state_dim": 0}, "mamba2.state_dim=0 must be above 0"),
        ({"dt_limit": (0.5, 0.1)}, r"dt_limit=\(0.5, 0.1\) must be two numbers, the first"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict, message: str) -> None:
    fields = {"num_heads": 4, "head_dim": 4, "state_dim": 8}
    with pytest.raises(ConfigError, match=message):
        Mamba2Config(**{**fields, **changes})


def test_two_kinds_of_linear_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="or `mamba2`, one of the two"):
        dataclasses.replace(CONFIG, gated_delta=CONFIGS["linear"].gated_delta)
