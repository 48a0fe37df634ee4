"""A shrunk config is small and of the same structure."""

from typing import Any

import pytest

from fornax.models import DecoderConfig
from fornax.models.rope_config import LongRopeScaling
from fornax.optim import Adafactor
from fornax.preflight.shrink import DEVICES, with_mesh
from fornax.preflight.shrink_decoder import shrink

from .conftest import (
    EXPERTS,
    GATED_DELTA,
    GEMMA3,
    GEMMA4,
    LATENT,
    LLAMA,
    MAMBA2,
    QWEN3,
    configure,
)


def small(model: dict[str, Any], depth: Any = "whole", **changes: Any) -> DecoderConfig:
    found = shrink(configure(model, **changes), depth=depth).config.model
    assert found is not None
    return found


@pytest.mark.parametrize("model", [LLAMA, QWEN3, GEMMA3], ids=["llama", "qwen3", "gemma3"])
def test_ratios_and_kinds_stay(model: dict[str, Any]):
    old = DecoderConfig(**{k: v for k, v in model.items() if "rope" not in k})
    new = small(model)
    assert new.num_heads // new.kv_heads == old.num_heads // old.kv_heads
    assert new.tie_embeddings == old.tie_embeddings
    assert new.qk_norm == old.qk_norm
    assert {k.window is None for k in new.layer_kinds()} == {
        k.window is None for k in old.layer_kinds()
    }
    assert new.hidden_size <= 128


def test_a_pattern_keeps_its_order_and_what_is_left_over():
    """Five sliding and one full, six times less two: runs are cut to two, then to one."""
    kinds = [kind.window is not None for kind in small(GEMMA3).layer_kinds()]
    assert kinds == [True, True, False] * 2 + [True, True]
    kinds = [kind.window is not None for kind in small(GEMMA3, "quick").layer_kinds()]
    assert kinds == [True, False] * 2 + [True]
    kinds = [kind.window is not None for kind in small(GEMMA3, "kinds").layer_kinds()]
    assert kinds == [True, False]


def test_a_pattern_written_out_layer_by_layer_is_the_same():
    listed = [("full" if i % 6 == 5 else "sliding") for i in range(34)]
    assert small({**GEMMA3, "attention_pattern": listed}) == small(GEMMA3)


def test_a_window_cuts_only_where_it_did():
    assert small(GEMMA3).sliding_window == 8
    assert small(GEMMA3, seq_len=512).sliding_window == 64


def test_the_open_axis_takes_what_is_left():
    shrunk = shrink(configure(LLAMA))
    sizes = shrunk.config.mesh.axis_sizes()
    assert (sizes["fsdp"], sizes["tensor"]) == (DEVICES // 2, 2)
    assert shrunk.axes == ("fsdp", "tensor")


def test_more_axes_than_fit_are_tried_three_at_a_time():
    mesh = {"data": 2, "fsdp": 4, "context": 2, "tensor": 4}
    shrunk = shrink(configure(LLAMA, mesh=mesh))
    assert len(shrunk.meshes) == 4
    pairs = {
        frozenset((a, b))
        for mesh in shrunk.meshes
        for a in shrunk.axes
        for b in shrunk.axes
        if getattr(mesh, a) == getattr(mesh, b) == 2
    }
    assert len(pairs) == 4 + 6


def test_heads_that_are_exchanged_divide_over_the_length():
    mesh = {"fsdp": 1, "context": 4, "tensor": 4}
    assert small(LLAMA, mesh=mesh).kv_heads == 2
    assert small({**LLAMA, "context_exchange": "heads"}, mesh=mesh).kv_heads == 4


def test_the_open_axis_divides_the_heads():
    shrunk = shrink(configure(LLAMA, mesh={"fsdp": 1, "tensor": -1}))
    model = shrunk.config.model
    assert model is not None
    assert shrunk.config.mesh.tensor == 8
    assert model.kv_heads == 8
    two = {**LLAMA, "num_kv_heads": 2}
    assert shrink(configure(two, mesh={"fsdp": 1, "tensor": -1})).config.mesh.tensor == 2


def test_stages_across_slices_stay_across_slices():
    """Four stages of eight are left, of which layers and microbatches are multiples; of one axis
    alone two."""
    mesh = {"slice": 4, "stage": 2, "fsdp": -1, "across": "stage"}
    shrunk = shrink(configure({**LLAMA, "num_layers": 16}, mesh=mesh, batch_size=64))
    (mesh,) = shrunk.meshes
    assert (mesh.slice, mesh.stage, mesh.fsdp, mesh.across) == (2, 2, 2, "stage")
    assert shrunk.config.model is not None
    assert shrunk.config.model.num_layers % 4 == 0
    assert shrunk.config.pipeline.count(4) == 8
    assert with_mesh(shrunk.config, slice=2).mesh.num_stages() == 2
    assert with_mesh(shrunk.config, stage=2).mesh.across == "data"


def test_a_long_rope_has_a_factor_for_each_frequency():
    scaling = {
        "type": "longrope",
        "short_factor": [1.0 + i for i in range(64)],
        "long_factor": [2.0 + i for i in range(64)],
        "original_max_position_embeddings": 4096,
    }
    model = small({**LLAMA, "rope": {"scaling": scaling}})
    assert isinstance(model.rope.scaling, LongRopeScaling)
    assert len(model.rope.scaling.short_factor) == model.head_width // 2
    assert model.rope.scaling.original_max_position_embeddings == 32


def test_matrices_are_factored_as_before():
    shrunk = shrink(configure(LLAMA, optim={"optimizer": {"type": "adafactor"}}))
    optimizer = shrunk.config.optim.optimizer
    assert isinstance(optimizer, Adafactor)
    assert optimizer.min_dim_size_to_factor == 2


def test_the_data_of_the_run_is_not_read():
    source = {"type": "dataset", "path": "/nowhere"}
    shrunk = shrink(configure(LLAMA, data={"source": source, "virtual_shards": 64}))
    assert shrunk.config.data.source.type == "python"
    assert shrunk.config.data.virtual_shards == 8


def test_latents_keep_their_proportions():
    """Heads of two thirds that do not rotate; ranks by the model's width, the least 8."""
    new = small(LATENT)
    latent = new.latent
    assert latent is not None
    assert (latent.unrotated_dim, latent.rotated_dim, latent.value_dim) == (16, 8, 16)
    assert new.head_width == 24
    assert new.num_heads == new.kv_heads == 4
    assert latent.key_value_rank == 8
    assert latent.query_rank == 16  # 14 in proportion, and a multiple of the four that divide it
    assert new.hidden_size == 64


def test_chunks_still_cut_rows():
    new = small({**LLAMA, "attention_pattern": ["chunked", "full"], "attention_chunk": 1024})
    assert new.attention_chunk == 8
    assert [kind.chunked for kind in new.layer_kinds()[:2]] == [True, False]
    scaling = small(LATENT).query_scaling
    assert scaling is not None
    assert scaling.length == 8


def test_experts_keep_their_rule():
    """A dense layer, then experts: the rule of the router stays, with fewer of them."""
    new = small(EXPERTS)
    assert [kind.mlp for kind in new.layer_kinds()] == ["mlp", "experts", "experts"]
    old = EXPERTS["experts"]
    assert new.experts is not None
    for name in ("score", "normalize_eps", "scale", "selection_bias", "group_score"):
        assert getattr(new.experts, name) == old[name]
    sizes = (new.experts.num_experts, new.experts.experts_per_token)
    assert sizes == (8, 2)
    assert (new.experts.num_groups, new.experts.groups_per_token) == (2, 1)
    assert new.experts.intermediate_size == new.experts.shared_intermediate_size < 64
    every = {**old, "experts_per_token": 64, "groups_per_token": 8}
    whole = small({**EXPERTS, "experts": every}).experts
    assert whole is not None
    assert (whole.experts_per_token, whole.groups_per_token) == (whole.num_experts, 2)


def test_linear_layers_keep_their_heads_and_kinds():
    """Two value heads of a key head; one group of heads that divide; the layer without an MLP."""
    new = small(GATED_DELTA)
    assert new.gated_delta is not None
    assert new.gated_delta.heads_per_key == 2
    assert (new.gated_delta.key_dim, new.gated_delta.value_dim) == (16, 16)
    kinds = [kind.attention for kind in new.layer_kinds()]
    assert kinds == 2 * ["gated_delta", "gated_delta", "attention"]
    new = small(MAMBA2)
    assert new.mamba2 is not None
    assert (new.mamba2.num_groups, new.mamba2.num_heads) == (1, 2)
    assert (new.mamba2.state_dim, new.mamba2.head_dim) == (16, 8)
    kinds = [(kind.attention, kind.mlp) for kind in new.layer_kinds()]
    assert kinds == 2 * [("mamba2", "mlp"), ("mamba2", "none"), ("attention", "mlp")]


def test_layers_that_share_keys_come_after_those_that_keep_them():
    """At any depth; heads of full layers are twice as wide, and half as many."""
    for depth in ("whole", "quick", "kinds"):
        new = small(GEMMA4, depth, mesh={"fsdp": 1, "data": 2})
        keys = [kind.keys for kind in new.layer_kinds()]
        assert keys == ["kept", "kept", "shared", "shared"]
        assert new.global_heads is not None
        assert new.global_heads.head_dim == 2 * new.head_width
        assert new.global_heads.num_kv_heads == 1
    listed = 4 * ["sliding"] + 2 * ["full"] + 2 * ["sliding", "full"]
    new = small({**GEMMA4, "num_layers": 10, "attention_pattern": listed})
    assert [kind.keys for kind in new.layer_kinds()][-4:] == 4 * ["shared"]
    assert new.layer_inputs is not None
    assert new.layer_inputs.vocab_size == new.vocab_size
