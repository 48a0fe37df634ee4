"""The shapes of a planned engine against what a real engine allocates and compiles."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.unit.plan.serving.conftest import MODELS

from fornax.llm.build import build_engine
from fornax.llm.config import EngineConfig
from fornax.llm.devices import DeviceSpec
from fornax.llm.weights import local_bytes
from fornax.models import CacheHeads, DecoderConfig, create_decoder
from fornax.plan.serving.engine import Engine, check_devices, describe_engine, parallel_sizes
from fornax.plan.serving.memory import memory_of
from fornax.plan.serving.model import ServedModel
from fornax.plan.serving.work import attention_of
from fornax.plan.topology import Topology, parse_topology

pytestmark = pytest.mark.usefixtures("optimized")

_LIMITS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "block_size": 8,
}


def cpu(devices: int) -> Topology:
    """A CPU whose speed is not measured."""
    chip = dataclasses.replace(
        parse_topology("h100:1").chip, name="cpu", platform="cpu", usable_bytes=8e9, node_chips=0
    )
    return Topology(chip=chip, shape=(devices,))


def served(config: DecoderConfig, dtype: str) -> ServedModel:
    return ServedModel(name="small", config=config, dtype=dtype, source="made up")


def planned(name: str, dtype: str, size: int, **options: Any) -> Engine:
    """An engine for eight CPU devices, as shapes."""
    config = EngineConfig(**{**_LIMITS, **options}, dtype=dtype, tensor_parallel_size=size)
    return describe_engine(served(MODELS[name], dtype), config, cpu(8))


def on_one_device(tree: Any) -> int:
    """Bytes of real arrays on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


FOUR = {"tensor_parallel_size": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("llama", "float32", {}),
        pytest.param("tied", "bfloat16", {}, marks=pytest.mark.exhaustive),
        ("windowed", "float32", FOUR),
        ("tied", "float32", FOUR),  # a cache that is whole on each device
        pytest.param("experts", "float32", FOUR, marks=pytest.mark.exhaustive),
        ("latent", "bfloat16", {}),
        # latents are whole on each device
        pytest.param("latent", "float32", FOUR, marks=pytest.mark.exhaustive),
        ("linear", "bfloat16", {}),
        pytest.param("linear", "float32", FOUR, marks=pytest.mark.exhaustive),
        ("windowed", "float32", {"quantization": "int4", "kv_cache_memory_bytes": 1 << 20}),
        pytest.param("mamba", "float32", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("mamba", "bfloat16", {}, marks=pytest.mark.exhaustive),
        pytest.param("pageless", "float32", {}, marks=pytest.mark.exhaustive),
        ("shared", "bfloat16", {}),
        ("llama", "bfloat16", {"kv_cache_dtype": "int8"}),
        ("windowed", "float32", {**FOUR, "kv_cache_dtype": "fp8"}),
        pytest.param("shared", "float32", FOUR, marks=pytest.mark.exhaustive),
    ],
)
def test_a_real_engine_allocates_what_was_planned(
    name: str, dtype: str, options: dict[str, Any]
) -> None:
    size = options.pop("tensor_parallel_size", 1)
    plan = planned(name, dtype, size, **options)
    real = build_engine(create_decoder(MODELS[name], dtype=jnp.dtype(dtype)), plan.config)
    runner = real.engine.runner
    assert plan.limits == real.limits
    assert plan.sizes.steps == runner.buckets
    assert plan.weights.nbytes == on_one_device(runner.weights.state)
    assert local_bytes(plan.arrays.kv) == on_one_device(runner.executor.kv)
    assert plan.account.states == on_one_device(runner.executor.states)
    state = (
        runner.executor.tables,
        runner.executor.hidden,
        runner.executor.sampler,
        runner.executor.all_allowed,
    )
    assert plan.account.sampler == on_one_device(state)
    pages = sum(
        count * size for count, size in zip(plan.limits.num_pages, plan.page_bytes, strict=True)
    )
    assert pages == on_one_device(runner.executor.kv)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "windowed"])
def test_the_compiler_counts_the_same_bytes(name: str) -> None:
    """The step's own arguments on one CPU device: weights, pages, hidden states, vectors."""
    plan = planned(name, "float32", 1)
    real = build_engine(create_decoder(MODELS[name]), plan.config)
    for size in (plan.sizes.steps[0], plan.sizes.steps[-1]):
        program = real.programs._makers["model", "step", size]()
        told = program.memory_analysis()
        vectors = 4 * (plan.sizes.layouts[size].size + plan.limits.max_num_seqs)
        head = plan.arrays.state["lm_head"]["kernel"].get_value()
        unused = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(head))
        kept = local_bytes((plan.arrays.kv, plan.arrays.tables, plan.arrays.hidden))
        assert told.argument_size_in_bytes == plan.weights.nbytes - unused + kept + vectors
        assert told.alias_size_in_bytes == kept


def test_sliding_layers_keep_only_their_pages() -> None:
    plan = planned("windowed", "float32", 1)
    report = memory_of(plan, 0, 0)
    by_window = {group.window: group for group in report.groups}
    assert (by_window[24].layers, by_window[None].layers) == (3, 1)
    # the window, the largest step and a page: 24 + 32 + 8 of 128 tokens
    assert by_window[24].pages_per_sequence == 8
    assert by_window[None].pages_per_sequence == 16
    token = 2 * 4 * 16 * 4  # keys and values of four heads of width 16 in float32
    assert by_window[None].bytes_per_token == token
    assert report.bytes_per_token == 4 * token
    assert report.bytes_per_sequence == 8 * (8 * 3 + 16) * token
    assert report.sequences == 4
    assert report.total == report.weights + report.cache + report.sampler


def test_linear_layers_keep_a_state_a_sequence_and_no_pages() -> None:
    one, four = (memory_of(planned("linear", "float32", size), 0, 0) for size in (1, 4))
    [group] = one.groups
    assert group.layers == 2
    assert one.bytes_per_token == 2 * 2 * 4 * 16 * 4
    inputs = 2 * 4 * (16 + 16 + 2 * 24)
    assert one.states == (4 + 2 * 4) * 2 * (8 * 16 * 24 + inputs) * 4
    assert four.states == one.states / 4
    assert one.total == one.weights + one.cache + one.sampler + one.states


def test_a_model_without_keys_has_states_alone() -> None:
    """As many sequences as can run, whatever their length."""
    report = memory_of(planned("pageless", "float32", 1), 0, 0)
    assert report.groups == ()
    assert (report.cache, report.cache_tokens, report.bytes_per_token) == (0, 0, 0)
    assert report.sequences == report.most_sequences == 4
    inputs = 3 * (8 * 12 + 2 * 16)
    assert report.states == (4 + 2 * 4) * 4 * (8 * 12 * 16 + inputs) * 4


def test_layers_that_share_keys_keep_none() -> None:
    """Two of four, each with the keys of one before it; full layers have heads of their own."""
    report = memory_of(planned("shared", "float32", 1), 0, 0)
    by_window = {group.window: group for group in report.groups}
    assert (by_window[24].layers, by_window[None].layers) == (1, 1)
    assert by_window[24].bytes_per_token == 2 * 4 * 16 * 4
    assert by_window[None].bytes_per_token == 2 * 2 * 32 * 4


def test_the_largest_cache_leaves_room_for_the_rest() -> None:
    report = memory_of(planned("llama", "float32", 1), 10**9, 10**6)
    rest = report.weights + report.sampler + 10**9 + 10**6
    assert report.most_cache == report.usable - rest
    assert report.most_sequences == report.most_cache / report.bytes_per_sequence
    page = report.bytes_per_token * 8
    assert 0 <= report.most_cache - report.most_tokens * report.bytes_per_token < page


def test_an_engine_for_an_accelerator_takes_its_share() -> None:
    topology = parse_topology("v6e:2x2")
    config = EngineConfig(tensor_parallel_size=4, max_model_len=512)
    plan = describe_engine(served(MODELS["llama"], "bfloat16"), config, topology)
    assert plan.target == DeviceSpec(platform="tpu", num_devices=4, memory=int(31.25 * 2**30))
    assert plan.limits.max_num_seqs == 256
    # 256 sequences need less than nine tenths of the memory: no more is taken
    # a device's share of 32 tokens is 16 KiB
    assert plan.limits.page_size == 32
    assert plan.limits.num_pages == (256 * math.ceil(512 / 32) + 1,)
    # as TPUs store them: one key head on a device is 128 wide, several are next to their values
    assert plan.limits.cache_heads == (CacheHeads(4, 128),)
    alone = EngineConfig(max_model_len=512)
    heads = describe_engine(served(MODELS["llama"], "bfloat16"), alone, topology).limits.cache_heads
    assert heads == (CacheHeads(4, 64, joined=True),)


@pytest.mark.parametrize(("codes", "tokens"), [("auto", 16), ("int8", 32), ("fp8", 32)])
def test_the_scales_of_a_page_fill_a_tpus_lanes(codes: Any, tokens: int) -> None:
    """16 tokens with two key heads on a device have 64 of them."""
    model = dataclasses.replace(MODELS["llama"], head_dim=256, num_heads=8, num_kv_heads=8)
    config = EngineConfig(tensor_parallel_size=4, max_model_len=512, kv_cache_dtype=codes)
    engine = describe_engine(served(model, "bfloat16"), config, parse_topology("v6e:2x2"))
    assert engine.limits.page_size == tokens
    [group] = attention_of(engine, 256).groups
    assert group.choice.implementation == "pallas_tpu"


def test_parallelism_prefers_to_divide_the_cache() -> None:
    assert parallel_sizes(MODELS["llama"], parse_topology("v6e:4x4")) == [4, 2, 1, 8]
    assert parallel_sizes(MODELS["llama"], parse_topology("h100:2x8")) == [4, 2, 1, 8]
    assert parallel_sizes(MODELS["llama"], cpu(8)) == [1]


def test_says_which_parallelisms_would_do() -> None:
    model = served(MODELS["llama"], "bfloat16")
    config = EngineConfig(tensor_parallel_size=3)
    with pytest.raises(Exception, match=r"8 heads, 4 key/value heads.*use one of 1, 2, 4"):
        check_devices(model, config, parse_topology("v6e:2x2"))
    config = EngineConfig(tensor_parallel_size=8)
    with pytest.raises(Exception, match=r"has 4 devices; use one of 1, 2, 4"):
        check_devices(model, config, parse_topology("v6e:2x2"))
