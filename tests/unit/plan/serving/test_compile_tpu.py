"""An engine's own steps through the TPU compiler, against the shapes that were planned."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tests.unit.plan.serving.conftest import write_config

from fornax.hlo import analyse, parse
from fornax.llm.weights import local_bytes
from fornax.models import DecoderConfig, GatedDeltaConfig
from fornax.plan.compile import compile_programs
from fornax.plan.serving import ServingConfig, plan_serve
from fornax.plan.serving.engine import describe_engine
from fornax.plan.serving.model import read_model
from fornax.plan.serving.programs import request_of
from fornax.plan.topology import parse_topology

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, the TPU compiler, is not installed",
    ),
]

# Sizes that the TPU's tiles divide, so that nothing is padded.
MODEL = DecoderConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    max_position_embeddings=2048,
    tie_embeddings=True,
)
CONFIG = ServingConfig(max_num_seqs=32, max_num_batched_tokens=256, max_model_len=1024)


def test_decode_and_prefill_compile_and_take_what_was_planned(tmp_path: Path) -> None:
    model = read_model(write_config(tmp_path / "llama", MODEL, torch_dtype="bfloat16"))
    topology = parse_topology("v6e:2x2")
    engine = describe_engine(model, CONFIG.engine(4), topology)
    request = request_of(engine, ("step 32", "step 256"))
    for artifact in compile_programs(request, topology, cache=False):
        assert "tpu_custom_call" in artifact.hlo
        owned = artifact.owned()
        assert owned["parameters"] == engine.weights.nbytes
        assert owned["cache"] == local_bytes(engine.arrays.kv)
        assert artifact.memory.arguments == pytest.approx(sum(owned.values()), rel=1e-3)
        # Pages are written in place: nothing of the cache's size is made.
        assert artifact.memory.aliased >= owned["cache"]
        assert artifact.memory.temporaries < owned["cache"] / 4


def test_states_of_linear_layers_are_written_in_place(tmp_path: Path) -> None:
    linear = dataclasses.replace(
        MODEL,
        attention_pattern=("linear", "full"),
        gated_delta=GatedDeltaConfig(
            num_key_heads=8, num_value_heads=16, key_dim=128, value_dim=128
        ),
        attention_gate=True,
        qk_norm="head",
        norm_unit_offset=True,
    )
    model = read_model(write_config(tmp_path / "hybrid", linear, torch_dtype="bfloat16"))
    topology = parse_topology("v6e:2x2")
    config = dataclasses.replace(CONFIG, max_num_seqs=128)
    engine = describe_engine(model, config.engine(4), topology)
    request = request_of(engine, ("step 8", "step 16"))
    states = local_bytes(engine.arrays.states)
    for artifact in compile_programs(request, topology, cache=False):
        assert artifact.owned()["cache"] == states + local_bytes(engine.arrays.kv)
        assert artifact.memory.aliased >= artifact.owned()["cache"]
        # Slots of the step's sequences are read and written; of the 128 no copy is made.
        assert artifact.memory.temporaries < states / 2


LARGE = dataclasses.replace(
    MODEL,
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=8192,
    num_heads=32,
    num_kv_heads=8,
    max_position_embeddings=131_072,
)


@pytest.mark.parametrize(
    ("changes", "place", "options", "program"),
    [
        ({}, "v6e:2x2", {}, "step 256"),
        ({"num_kv_heads": 4}, "v6e:2x4", {}, "step 256"),
        ({"head_dim": 64}, "v6e:2x2", {}, "step 256"),
        ({"head_dim": 96, "num_kv_heads": 32}, "v6e:2x2", {}, "step 256"),
    ],
    ids=["defaults", "more devices than key heads", "width 64", "width 96"],
)
def test_256_sequences_of_131072_tokens_compile(
    changes: dict[str, Any], place: str, options: dict[str, Any], program: str, tmp_path: Path
) -> None:
    config = dataclasses.replace(LARGE, **changes)
    model = read_model(write_config(tmp_path / "llama", config, torch_dtype="bfloat16"))
    topology = parse_topology(place)
    engine = describe_engine(model, ServingConfig(**options).engine(topology.num_devices), topology)
    limits = engine.limits
    assert (limits.max_num_seqs, limits.max_model_len) == (256, 131_072)
    [artifact] = compile_programs(request_of(engine, (program,)), topology, cache=False)
    assert "ragged_paged_attention" in artifact.hlo
    assert artifact.owned()["cache"] == local_bytes(engine.arrays.kv)
    assert artifact.memory.temporaries < 2**26


def test_a_step_of_decoding_reads_weights_and_cache_once(tmp_path: Path) -> None:
    widths = {"num_layers": 8, "intermediate_size": 14_336, "tie_embeddings": False}
    model_config = dataclasses.replace(LARGE, **widths)
    model = read_model(write_config(tmp_path / "llama", model_config, torch_dtype="bfloat16"))
    topology = parse_topology("v6e:1x1")
    config = ServingConfig(max_num_seqs=32, max_num_batched_tokens=32, max_model_len=1056)
    engine = describe_engine(model, config.engine(1), topology)
    [step] = compile_programs(request_of(engine, ("step 32",)), topology, cache=False)
    tables = 2 * 2 * model_config.vocab_size * model_config.hidden_size  # the head is the sampler's
    keys = 2 * 2 * 32 * 1056 * 8 * 128 * model_config.num_layers
    least = engine.weights.nbytes - tables + keys
    assert analyse(parse(step.hlo), dict(step.mesh)).bytes < 1.01 * least


def test_a_compiled_plan_agrees_with_closed_forms(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "llama", MODEL, torch_dtype="bfloat16")
    topology = parse_topology("v6e:2x2")
    plan = plan_serve(folder, topology, CONFIG, cache=False)
    assert plan.origin == "compiled"
    steps = {bucket.size: bucket for bucket in plan.buckets if bucket.program == "step"}
    assert set(steps) == {1, 32, 256}
    # two all-reduces a layer, and one of the embeddings
    assert steps[32].exchanges == (f"5 x all-reduce of {32 * 512 * 2:,} bytes",)
    for bucket in steps.values():
        assert 0.3 < bucket.seconds / bucket.predicted_seconds < 3
    closed = plan_serve(folder, topology, CONFIG, predicted=True)
    assert plan.memory.weights == closed.memory.weights
    assert plan.memory.cache == closed.memory.cache
    assert {point.origin for point in plan.decode} == {"compiled", "predicted"}
