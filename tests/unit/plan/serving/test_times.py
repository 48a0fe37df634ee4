"""Bounds on latency against arithmetic done by hand."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.unit.plan.serving.conftest import MODELS
from tests.unit.plan.serving.test_engine import planned, served

from fornax import kernels
from fornax.hlo import Item, Loop, Operation, analyse, parse
from fornax.llm.config import EngineConfig
from fornax.llm.programs import make_programs
from fornax.mesh.hardware import find_chip
from fornax.plan.cost.step import DeviceRates
from fornax.plan.serving.engine import Engine, describe_engine
from fornax.plan.serving.latency import decode_latencies, largest_batches, prompt_latencies
from fornax.plan.serving.linear import LinearAttention
from fornax.plan.serving.times import StepTime, StepTimes, without_attention
from fornax.plan.serving.work import attention_of, step_sizes
from fornax.plan.topology import Topology, parse_topology

pytestmark = pytest.mark.usefixtures("optimized")


def times_of(engine: Engine, **changes: float) -> StepTimes:
    """Memory of one byte a second, arithmetic and links that cost nothing unless changed."""
    rates = {"matmul": 1e30, "attention": 1e30, "memory": 1.0, "link": 1e30, **changes}
    link = rates.pop("link")
    return StepTimes(
        rates=DeviceRates(**rates),
        exchange=lambda kind, size: size / link,
        sizes=step_sizes(engine),
        steps=engine.sizes.steps,
        samples=engine.sizes.samples,
        decodes=engine.sizes.decodes,
        attention=lambda tokens: attention_of(engine, tokens),
        compiled_layers={},
        compiled_sampling={},
    )


def implementation(engine: Engine, tokens: int) -> str:
    """The one that runs."""
    [choice] = attention_of(engine, tokens).choices
    return choice.implementation


def test_decoding_reads_weights_once_and_the_cache_for_every_sequence() -> None:
    engine = planned("llama", "float32", 1)
    model = MODELS["llama"]
    table = model.vocab_size * model.hidden_size * 4
    body = engine.weights.nbytes - 2 * table  # but the table's rows and the output projection
    step = times_of(engine).decode(batch=2, context=64)
    key = 2 * 4 * 16 * 4
    written = 2 * 4 * key  # of a token of each sequence in each layer
    assert step.weights == body + 2 * model.hidden_size * 4 + written
    assert step.cache == 4 * 2 * 64 * key
    assert step.sampling == table + 2 * model.vocab_size * 8
    assert step.exchange == step.compute == 0


def test_states_are_read_and_written_whatever_the_context() -> None:
    for devices in (1, 4):
        linear = attention_of(planned("linear", "float32", devices), 32).linear
        assert linear is not None
        state = 8 // devices * 16 * 24
        work = linear.decode(3)
        assert (work.bytes, work.flops) == (2 * 3 * 2 * state * 4, 2 * 3 * 6 * state)
        assert linear.prompt(65) == linear.prompt(128)
        assert linear.prompt(128).bytes == 2 * linear.prompt(64).bytes == 2 * 2 * 2 * state * 4
    engine = planned("linear", "float32", 1)
    near, far = (attention_of(engine, 32).decode(2, context) for context in (32, 64))
    key = 2 * 4 * 16 * 4
    assert far.bytes - near.bytes == 2 * 2 * 32 * key
    assert near.bytes == 2 * 2 * 32 * key + 2 * 2 * 2 * (8 * 16 * 24) * 4


@pytest.mark.parametrize("corrects", [True, False])
def test_a_chunk_costs_what_its_program_counts(corrects: bool) -> None:
    """The flops that XLA counts in the lowered chunked rule of 64 tokens, products alone."""
    linear = LinearAttention(
        layers=1,
        key_heads=2,
        value_heads=4,
        key_dim=32,
        value_dim=48,
        corrects=corrects,
        slowdown=1.0,
    )
    shapes = ((1, 64, 2, 32), (1, 64, 2, 32), (1, 64, 2, 2, 48), (1, 64, 2, 2), (1, 64, 2, 2))
    inputs: list[Any] = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    inputs[-1] = inputs[-1] if corrects else None
    cost = jax.jit(kernels.gated_delta_rule).lower(*inputs).compile().cost_analysis()
    assert 1.0 < cost["flops"] / linear.prompt(64).flops < 1.3


def test_b_and_c_are_whole_where_heads_are_divided() -> None:
    """A Mamba-2 state is written and read, and nothing is looked up in it."""
    for devices in (1, 4):
        linear = attention_of(planned("mamba", "float32", devices), 32).linear
        assert linear is not None
        assert (linear.key_heads, linear.value_heads) == (2, 8 // devices)
        state = 8 // devices * 12 * 16
        work = linear.decode(3)
        assert (work.bytes, work.flops) == (2 * 3 * 2 * state * 4, 2 * 3 * 4 * state)


def test_layers_that_share_keys_read_them_and_write_none() -> None:
    attention = attention_of(planned("shared", "float32", 1), 32)
    own, wide = 2 * 4 * 16 * 4, 2 * 2 * 32 * 4
    assert attention.written_bytes == own + wide
    assert attention.decode(3, 64).bytes == 3 * 2 * (24 * own + 64 * wide)
    assert attention.decode(3, 64).flops == 3 * 2 * 8 * (24 * 4 * 16 + 64 * 4 * 32)


def test_a_token_reads_its_row_of_further_inputs() -> None:
    """And of layers without an MLP one sum is exchanged."""
    sizes = step_sizes(planned("shared", "float32", 1))
    assert sizes.table_row_bytes == (64 + 4 * 8) * 4
    assert step_sizes(planned("mamba", "float32", 4)).reductions == 2 * 2 + 2 * 1 + 1
    assert step_sizes(planned("pageless", "float32", 4)).reductions == 4 + 1


def test_all_heads_read_one_latent() -> None:
    """Scores and sums are as wide as the latent and the rotated key, 40 + 8, on each device."""
    for devices in (1, 4):
        engine = planned("latent", "float32", devices)
        work = attention_of(engine, 32).decode(3, 64)
        assert implementation(engine, 32) == "native"
        assert work.bytes == 4 * 3 * 64 * 48 * 4
        assert work.flops == 4 * 3 * 64 * (8 // devices) * 2 * (48 + 48)


def test_windows_bound_what_is_read() -> None:
    times = times_of(planned("windowed", "float32", 1))
    key = 2 * 4 * 16 * 4
    near, far = times.decode(1, 24), times.decode(1, 128)
    assert near.cache == 4 * 24 * key
    assert far.cache - near.cache == (128 - 24) * key  # one layer of four sees everything


def test_arithmetic_counts_the_bucket() -> None:
    engine = planned("llama", "float32", 1)
    times = times_of(engine, memory=1e30, matmul=1.0, attention=1e30)
    model = MODELS["llama"]
    width = model.hidden_size * 16
    layer = width * (2 * 8 + 2 * 4) + 3 * model.hidden_size * model.intermediate_size
    assert times.layers(12).compute == 2 * 12 * 4 * layer
    assert times.decode(3, 8).compute == 2 * 4 * 4 * layer  # a bucket of four


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    """Two of eight each: one token reads a quarter of them, two 1 - (3/4)^2 where they differ."""
    engine = planned("experts", "float32", 1)
    times, model = times_of(engine), MODELS["experts"]
    experts = 2 * 8 * 3 * model.hidden_size * 48 * 4  # of two layers
    rest = step_sizes(engine).body_bytes
    assert rest + experts == engine.weights.nbytes - 2 * model.vocab_size * model.hidden_size * 4
    one, two, many = (times.sizes.weight_bytes(tokens) for tokens in (1, 2, 1000))
    assert (one, two) == (rest + experts / 4, rest + experts * (1 - 0.75**2))
    assert many == rest + experts
    assert step_sizes(planned("experts", "float32", 4)).expert_bytes * 4 == experts
    arithmetic = times_of(engine, memory=1e30, matmul=1.0, attention=1e30)
    width = model.hidden_size * 16
    attention = width * (2 * 8 + 2 * 4)
    routed = 2 * 3 * model.hidden_size * 48 + 3 * model.hidden_size * 96 + model.hidden_size * 8
    dense = 3 * model.hidden_size * model.intermediate_size
    assert arithmetic.layers(5).compute == 2 * 5 * (4 * attention + 2 * routed + 2 * dense)


def test_parallelism_divides_the_work_and_exchanges_activations() -> None:
    one, four = planned("llama", "float32", 1), planned("llama", "float32", 4)
    whole, part = step_sizes(one), step_sizes(four)
    assert part.body_products * 4 == whole.body_products
    assert part.reductions == 2 * 4 + 1  # after attention and MLP of each layer; the embedding
    times = times_of(four, link=1.0)
    activations = 9 * 2 * MODELS["llama"].hidden_size * 4
    assert times.decode(2, 8).exchange == activations
    assert step_sizes(planned("tied", "float32", 4)).reductions == 9


def test_a_prompt_goes_in_chunks() -> None:
    engine = planned("llama", "float32", 1)
    step, count = times_of(engine).prompt(80)
    assert count == 3  # of 32 tokens at most
    assert step.sampling == times_of(engine).sampling(1)
    assert times_of(engine).prompt(81)[0].seconds > step.seconds


def test_a_compiled_body_takes_the_place_of_the_closed_form() -> None:
    engine = planned("llama", "float32", 1)
    layers = StepTime(weights=1.0, compute=2.0, exchange=3.0, compiled=True)
    times = dataclasses.replace(
        times_of(engine), compiled_layers={4: layers}, compiled_sampling={4: 0.5}
    )
    step = times.decode(4, 8)
    assert (step.weights, step.compute, step.exchange, step.sampling) == (1.0, 2.0, 3.0, 0.5)
    assert step.compiled
    assert not times.decode(2, 8).compiled


def test_a_compiled_body_leaves_out_attention_and_nothing_else() -> None:
    engine = planned("llama", "float32", 1)
    arrays = engine.arrays
    programs = make_programs(engine.config, engine.weights, engine.limits, engine.sizes, arrays)
    schedule = analyse(parse(programs["step", 8].compile().as_text()), {}).schedule

    def operations(items: Iterable[Item]) -> Iterator[Operation]:
        for item in items:
            if isinstance(item, Loop):
                yield from operations(item.body)
            elif isinstance(item.what, Operation):
                yield item.what

    kept = {each.name for each in operations(without_attention(schedule))}
    left_out = [each for each in operations(schedule) if each.name not in kept]
    assert {each.category for each in left_out} == {"attention"}
    ours = [each for each in operations(schedule) if each.opcode == "custom-call"]
    assert any(each.category == "copy" and each.name in kept for each in ours), "the write"


def test_points_end_where_the_cache_does() -> None:
    engine = planned("llama", "float32", 1, num_gpu_blocks_override=24)
    times = times_of(engine, memory=1e9, matmul=1e9, attention=1e9)
    points = decode_latencies(engine, times, times, [64, 128])
    # 24 pages of 8 tokens: three sequences of 64, one of 128
    assert [(p.context, p.batch) for p in points] == [(64, 1), (64, 3), (128, 1)]
    for point in points:
        assert point.tokens_per_second_per_chip == pytest.approx(point.batch / point.seconds)
    (prompt,) = prompt_latencies(engine, times, times, [128])
    assert prompt.steps == 4


def test_finds_the_largest_batch_within_a_time() -> None:
    engine = planned("llama", "float32", 1)
    times = times_of(engine)
    limit = times.decode(2, 64).seconds
    found = largest_batches(engine, times, [64, 128], limit)
    assert [(one.batch, one.limited_by) for one in found] == [(2, "latency"), (1, "latency")]
    (none,) = largest_batches(engine, times, [64], 1.0)
    assert none.batch == 0
    (most,) = largest_batches(engine, times, [64], 1e30)
    assert (most.batch, most.limited_by) == (4, "max_num_seqs")


def test_knows_which_kernel_runs_and_what_it_reads_twice() -> None:
    three = dataclasses.replace(MODELS["llama"], num_heads=6, num_kv_heads=3)
    alone = EngineConfig(max_model_len=512)
    place = parse_topology("v6e:2x2")
    [tpu] = attention_of(describe_engine(served(three, "bfloat16"), alone, place), 256).choices
    assert tpu.implementation == "xla"
    assert "cannot tile 3 key heads" in dict(tpu.declined)["pallas_tpu"]
    model = served(MODELS["llama"], "bfloat16")  # heads of width 16, kept 128 wide
    config = EngineConfig(max_model_len=512, tensor_parallel_size=4)
    assert implementation(describe_engine(model, config, place), 256) == "pallas_tpu"
    gpu = Topology(chip=find_chip("h100"), shape=(1, 4))
    engine = describe_engine(model, config, gpu)
    found = attention_of(engine, 256)
    assert implementation(engine, 256) == "xla"
    # a prompt's keys are read again for every block of its queries
    assert found.prompt(0, 512).bytes > 2 * found.decode(1, 512).bytes
    wide = served(dataclasses.replace(MODELS["llama"], head_dim=64), "bfloat16")
    hopper, ampere = (
        attention_of(describe_engine(wide, config, parse_topology(name)), 256).groups[0]
        for name in ("h100:1x4", "a100:1x4")
    )
    assert (hopper.choice.implementation, ampere.choice.implementation) == ("pallas_gpu", "xla")
    assert "which a GPU of 8.0 does not have" in dict(ampere.choice.declined)["pallas_gpu"]
    assert hopper.decode(1, 512)[1] == ampere.decode(1, 512)[1] / 3
