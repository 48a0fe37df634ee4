"""What an estimate says of meshes, chips and mistakes."""

import subprocess
import sys
from typing import Any

import pytest

from fornax.config import from_mapping
from fornax.config.errors import ConfigError, ShardingError
from fornax.models import DecoderConfig
from fornax.plan.cost.estimate import Estimate, estimate
from fornax.plan.search.space import meshes
from fornax.plan.topology import parse_topology
from fornax.plan.train import plan_train
from fornax.train import TrainConfig

MODEL = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
}


def _estimate(topology: str = "v5e:2x4", **more: Any) -> Estimate:
    told = {
        "model": MODEL,
        "batch_size": 32,
        "seq_len": 2048,
        "dtypes": {"compute": "bfloat16"},
    }
    config = from_mapping(TrainConfig, {**told, **more})
    return estimate(config, parse_topology(topology))


def _moved(found: Estimate, kind: str, *axes: str) -> int:
    return sum(
        row.bytes * row.count
        for row in found.step.collectives
        if row.kind == kind and row.axes == axes
    )


def test_one_chip_exchanges_nothing() -> None:
    """And its operations sum to the step."""
    found = _estimate("v5e:1x1")
    assert found.step.collectives == ()
    assert found.step_seconds == pytest.approx(sum(row.seconds for row in found.step.work))
    assert {row.name for row in found.step.work} == {
        "attention",
        "attention_projections",
        "mlp",
        "logits_loss",
        "norms_elementwise",
        "embedding",
        "optimizer",
    }


def test_fsdp_gathers_each_weight_twice_and_reduces_its_gradient() -> None:
    """In the compute dtype, every layer."""
    found = _estimate(mesh={"fsdp": 8})
    layers = 8 * (1024 * 128 * (2 * 8 + 2 * 4) + 3 * 1024 * 4096)
    head = 1024 * 32768
    assert _moved(found, "all-gather", "fsdp") == 2 * (2 * layers + head)
    assert _moved(found, "reduce-scatter", "fsdp") == 2 * layers + 4 * head


def test_replicas_add_up_gradients_of_their_shards() -> None:
    """Data parallelism over a divided model reduces each device's share only."""
    found = _estimate(mesh={"data": 2, "fsdp": 4})
    whole = _estimate(mesh={"data": 8, "fsdp": 1})
    shares = sum(
        row.bytes * row.count
        for row in found.step.collectives
        if row.axes == ("data",) and "layer" in row.what
    )
    assert _moved(whole, "all-reduce", "data") > 3.9 * shares
    assert shares > 0


def test_tensor_parallelism_adds_up_both_branches_forward_and_backward() -> None:
    """Of a whole stream: two sums a layer and pass, and one more for what is done again."""
    stream = 4 * 2048 * 1024 * 2
    for remat, sums in (("dots", 4), ("full", 5)):
        mesh = {"fsdp": 4, "tensor": 2, "rules": {"activation_embed": ()}}
        found = _estimate(mesh=mesh, batch_size=16, remat=remat)
        rows = [row for row in found.step.collectives if "branches" in row.what]
        assert sum(row.count for row in rows) == sums * 8
        assert {row.bytes for row in rows} == {stream}


def test_a_residual_stream_in_parts_is_gathered_and_reduced_at_each_branch() -> None:
    """As many exchanges of the stream as there are sums of a whole one, in two halves each."""
    stream = 4 * 2048 * 1024 * 2
    for remat, gathered, reduced in (("dots", 6, 4), ("full", 6, 5)):
        found = _estimate(mesh={"fsdp": 4, "tensor": 2}, batch_size=16, remat=remat)
        rows = [row for row in found.step.collectives if "branches" in row.what]
        assert {row.bytes for row in rows} == {stream}
        for kind, count in (("all-gather", gathered), ("reduce-scatter", reduced)):
            assert sum(row.count for row in rows if row.kind == kind) == count * 8


def test_context_parallelism_gathers_keys_and_values() -> None:
    """Forward and backward, of the whole row."""
    found = _estimate(mesh={"fsdp": 4, "context": 2}, batch_size=8)
    rows = [row for row in found.step.collectives if row.axes == ("context",)]
    assert any("keys and values" in row.what for row in rows)


def test_a_ring_passes_keys_and_values_and_holds_its_own_alone() -> None:
    """Forward and backward over all devices but the first, gradients in float32 and home too; in
    layers with a window to neighbours alone."""
    long = {"mesh": {"fsdp": 1, "context": 8}, "batch_size": 1, "seq_len": 131072}
    rings = {"context_exchange": "ring"}
    gathered, found = (_estimate(model={**MODEL, **m}, remat="dots", **long) for m in ({}, rings))
    numbers = 131072 // 8 * 4 * 2 * 128
    runs = 8  # layers
    passed = {
        row.what: row.bytes * row.count
        for row in found.step.collectives
        if "pass " in row.what and "positions" not in row.what
    }
    assert passed == {
        "pass keys and values round": runs * 7 * 2 * 2 * numbers,
        "pass gradients of keys and values round": runs * 7 * 4 * numbers,
        "pass gradients of keys and values home": runs * 4 * numbers,
    }
    assert not any("gather keys" in row.what for row in found.step.collectives)
    assert any("gather keys" in row.what for row in gathered.step.collectives)
    window = {"sliding_window": 1024, "attention_pattern": ["sliding"]}
    near = _estimate(model={**MODEL, **rings, **window}, remat="dots", **long)
    (keys,) = (row for row in near.step.collectives if row.what == "pass keys and values round")
    assert keys.count == runs * 2 * 2


def test_more_recomputation_is_less_memory_and_more_flops() -> None:
    """Along the policies."""
    found = [_estimate(remat=remat) for remat in ("none", "dots", "save_attention", "full")]
    memory = [one.memory.owned("activations") for one in found]
    flops = [one.step.flops for one in found]
    assert memory == sorted(memory, reverse=True)
    assert flops == sorted(flops)
    assert found[1].repeated_flops == 0
    assert found[3].repeated_flops > 0.2 * found[1].step.flops


def test_offloaded_activations_leave_the_device_for_the_host() -> None:
    """They are moved out and back, and counted on the host."""
    kept = _estimate(remat="names", remat_save=["layer_input", "attention"])
    moved = _estimate(remat="names", remat_offload=["layer_input", "attention"])
    assert kept.memory.host == 0
    assert moved.memory.host == kept.memory.owned("activations")
    hosts = [row for row in moved.step.collectives if row.link == "host"]
    assert sum(row.bytes * row.count for row in hosts) == 2 * moved.memory.host


def test_optimizer_state_follows_the_optimizer() -> None:
    """Two moments, half-width ones, 8-bit ones but for embeddings and head, one, factored ones,
    none."""
    sizes = {
        name: _estimate(optim={"optimizer": told}).memory.owned("optimizer")
        for name, told in {
            "adamw": {"type": "adamw"},
            "bf16": {"type": "adamw", "mu_dtype": "bfloat16"},
            "8bit": {"type": "adamw8bit"},
            "lion": {"type": "lion"},
            "adafactor": {"type": "adafactor"},
            "sgd": {"type": "sgd", "momentum": None},
        }.items()
    }
    parameters = _estimate().memory.owned("parameters")
    assert sizes["adamw"] == pytest.approx(2 * parameters, rel=1e-3)
    assert sizes["bf16"] == pytest.approx(1.5 * parameters, rel=1e-3)
    # Bytes of the layers' matrices on one of eight devices.
    layers = 4 * (1024 * 128 * (2 * 8 + 2 * 4) + 3 * 1024 * 4096)
    eighths = 2 * (parameters - layers) + layers * (2 + 2 * 4 / 64) / 4
    assert sizes["8bit"] == pytest.approx(eighths, rel=0.01)
    assert sizes["lion"] == pytest.approx(parameters, rel=1e-3)
    assert sizes["adafactor"] < 0.1 * parameters
    assert sizes["sgd"] < 0.01 * parameters


def test_accumulation_keeps_sums_and_a_share_of_activations() -> None:
    """Four micro-batches: a quarter of the activations, one more copy of the gradients."""
    one, four = _estimate(), _estimate(accumulate=4)
    assert four.memory.owned("activations") == one.memory.owned("activations") / 4
    assert any("sums over micro-batches" in part.name for part in four.memory.buffers)
    assert four.step.flops == pytest.approx(one.step.flops, rel=0.01)


def test_both_devices_of_a_chip_count() -> None:
    """A TPU7x chip is two devices: figures are the chip's."""
    found = _estimate("tpu7x:2x2x1", mesh={"fsdp": 8})
    twice = _estimate("v5p:2x2x2", mesh={"fsdp": 8})
    assert found.memory.owned("parameters") == 2 * twice.memory.owned("parameters")
    assert found.step.flops == pytest.approx(2 * twice.step.flops)


@pytest.mark.parametrize("topology", ["h100:8", "h200:2x8", "b200:8", "a100-80:8", "l4:1"])
def test_gpus_are_estimated_without_a_compiler(topology: str) -> None:
    """Attention there is cuDNN's in bfloat16; in float32 it is plain XLA, and the notes say so."""
    found = _estimate(topology)
    assert found.step_seconds > 0
    assert not any("plain XLA" in note for note in found.step.notes)
    plain = _estimate(topology, dtypes={"compute": "float32"})
    assert any("plain XLA" in note for note in plain.step.notes)
    assert plain.step_seconds > found.step_seconds


def test_slower_links_cost_more() -> None:
    """Servers are joined by a slower network than their GPUs."""
    inside, between = _estimate("h100:8"), _estimate("h100:8x1")
    times = [sum(row.seconds for row in one.step.collectives) for one in (between, inside)]
    assert times[0] > times[1]
    assert {row.link for row in between.step.collectives} == {"dcn"}


def test_stages_across_slices_pass_microbatches_over_the_network_and_no_layers() -> None:
    """Beside them the gradients of what all slices hold; a slice holds half of the layers."""
    mesh = {"slice": 2, "stage": 2, "fsdp": 4, "across": "stage"}
    staged = _estimate("2*v5e:2x4", mesh=mesh, batch_size=64)
    copies = _estimate("2*v5e:2x4", mesh={"slice": 2, "fsdp": 8}, batch_size=64)
    crossing = [row for row in staged.step.collectives if row.link == "dcn"]
    assert all("slice" in row.axes for row in crossing)
    assert {row.what for row in crossing if row.kind == "all-reduce"} == {
        f"add up {place} gradients over replicas"
        for place in ("embedding", "final norm", "output projection")
    }
    passed = next(row for row in crossing if row.what == "pass microbatches between stages")
    assert (passed.kind, passed.axes) == ("collective-permute", ("slice", "stage"))
    inside = _estimate("v5e:2x4", mesh={"stage": 4, "fsdp": 2}, batch_size=32)
    near = next(row for row in inside.step.collectives if row.what == passed.what)
    assert (near.bytes, near.count, near.link) == (passed.bytes, passed.count, "ici")
    assert passed.seconds > 2 * near.seconds
    assert any(
        row.link == "dcn" and "layer" in row.what and row.kind == "all-reduce"
        for row in copies.step.collectives
    )
    assert any("a pipeline of 4 stages for 8 micro" in note for note in staged.step.notes)


HYBRID = {
    **MODEL,
    "attention_pattern": ["linear", "full"],
    "mamba2": {"num_heads": 16, "head_dim": 64, "state_dim": 128, "num_groups": 2},
}


def test_heads_of_linear_layers_divide_over_tensor_shards() -> None:
    """Each has all groups, whose scores are a small part; gradients of B and C are added up."""

    def linear(tensor: int, **model: Any) -> Any:
        mesh = {"fsdp": 1, "tensor": tensor}
        found = _estimate(f"h100:{tensor}", mesh=mesh, model={**HYBRID, **model}, remat="none")
        return found, next(row for row in found.step.work if row.name == "linear_attention")

    (_, whole), (found, half) = linear(1), linear(2)
    scores = 3 * 2 * 64 * 2 * 128 * 4 * 32 * 2048  # forward and backward, of four layers
    assert half.flops == pytest.approx((whole.flops - scores) / 2 + scores)
    assert any("B and C" in row.what for row in found.step.collectives)
    delta = {"num_key_heads": 8, "num_value_heads": 16, "key_dim": 64, "value_dim": 64}
    one, two = (linear(n, mamba2=None, gated_delta=delta)[1].flops for n in (1, 2))
    assert two == one / 2


def test_layers_take_the_axes_that_they_can() -> None:
    """A linear layer needs whole rows; one that hands on keys is in no pipeline."""
    config = from_mapping(TrainConfig, {"model": HYBRID, "batch_size": 2, "seq_len": 65536})
    assert isinstance(config.model, DecoderConfig)
    assert {mesh.context for mesh in meshes(config, config.model, parse_topology("v5e:2x4"))} == {1}
    with pytest.raises(ConfigError, match=r"linear attention.*\(context axis\)"):
        _estimate(model=HYBRID, mesh={"fsdp": 4, "context": 2})
    with pytest.raises(ConfigError, match=r"share keys and values.*\(stage axis\)"):
        _estimate(model={**MODEL, "shared_kv_layers": 4}, mesh={"fsdp": 4, "stage": 2})


def test_mistakes_are_named() -> None:
    """The mesh, the slices, the stages, the model."""
    with pytest.raises(ConfigError, match=r"mesh\.slice=1"):
        _estimate("2*v5e:2x4")
    with pytest.raises(ConfigError, match="diloco is set, and a plan is of one group"):
        plan_train(from_mapping(TrainConfig, {"diloco": {}}), parse_topology("cpu:8"))
    with pytest.raises(ConfigError, match=r"over 4 data shards; use a multiple of 16"):
        _estimate(mesh={"stage": 2}, batch_size=20)
    with pytest.raises(ShardingError, match="kv_heads"):
        _estimate(mesh={"tensor": 8, "fsdp": 1})
    with pytest.raises(ConfigError, match="model is null"):
        _estimate(model=None, init_from="somewhere")


def test_padding_of_a_batch_is_work_and_is_said() -> None:
    """Twelve rows over eight chips take what sixteen do, for twelve rows' tokens."""
    padded, full = _estimate(batch_size=12), _estimate(batch_size=16)
    assert padded.step.flops == full.step.flops
    assert padded.step_seconds == full.step_seconds
    assert padded.memory.total == full.memory.total
    assert padded.tokens * 16 == full.tokens * 12
    assert any("padded to 16 rows of which 4 count nothing" in note for note in padded.step.notes)
    assert not any("padded" in note for note in full.step.notes)


def test_replicated_kv_heads_are_computed_by_every_shard() -> None:
    """With the rule taken away the mesh is allowed, and the note tells the price."""
    mesh = {"tensor": 8, "fsdp": 1, "rules": {"kv_heads": []}}
    found = _estimate(mesh=mesh)
    assert any("does not divide 4 key/value heads" in note for note in found.step.notes)


@pytest.mark.slow
def test_nothing_touches_a_device() -> None:
    """An estimate leaves jax's backends unstarted."""
    program = (
        "from fornax.plan.cost.estimate import estimate\n"
        "from fornax.plan.topology import parse_topology\n"
        "from fornax.train import TrainConfig\n"
        "from fornax.models import DecoderConfig\n"
        "config = TrainConfig(model=DecoderConfig(), batch_size=64, seq_len=2048)\n"
        "estimate(config, parse_topology('v5p:4x4x4'))\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
