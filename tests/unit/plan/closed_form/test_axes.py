"""Experts and stages in a plan: bytes and products are those of the step that XLA makes."""

import math
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from fornax.config import from_mapping
from fornax.config.errors import ConfigError
from fornax.hlo import ProgramFacts, analyse, parse
from fornax.models import DecoderConfig
from fornax.plan.cost.estimate import Estimate, estimate
from fornax.plan.search.space import meshes
from fornax.plan.topology import parse_topology
from fornax.train import Ledger, TrainConfig, pretrain_task
from fornax.train.session import prepare
from fornax.train.step import make_train_step

pytestmark = pytest.mark.usefixtures("optimized")

ROWS, LENGTH = 16, 64
MODEL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}
EXPERTS = {
    "num_experts": 8,
    "experts_per_token": 2,
    "intermediate_size": 64,
    "shared_intermediate_size": 32,
}


def configure(mesh: dict[str, int], **more: Any) -> TrainConfig:
    told = {"model": MODEL, "batch_size": ROWS, "seq_len": LENGTH, "mesh": mesh}
    return from_mapping(TrainConfig, {**told, **more})


def with_experts(exchange: str = "auto", **more: Any) -> dict[str, Any]:
    return {**MODEL, "experts": {**EXPERTS, "exchange": exchange, **more}}


def compiled(config: TrainConfig) -> ProgramFacts:
    """The facts of the trainer's own step for virtual CPU devices."""
    programs = prepare(config, pretrain_task(config), Ledger(), jax.devices())
    numbers = ("tokens", "targets", "segment_ids", "positions")
    rows = {name: np.zeros((ROWS, LENGTH), np.int32) for name in numbers}
    rows["loss_weights"] = np.zeros((ROWS, LENGTH), np.float32)
    step = jax.jit(make_train_step(programs.parts), donate_argnums=0)
    program = step.lower(programs.abstract, programs.shapes_of(rows)).compile()
    return analyse(parse(program.as_text()), dict(config.mesh.axis_sizes()))


def moved(rows: Any, axis: str) -> Counter[str]:
    """Bytes of each kind of collective of a step over one axis alone, single numbers left out."""
    total: Counter[str] = Counter()
    for row in rows:
        if row.axes == (axis,) and row.bytes >= 1024:
            total[row.kind] += round(row.bytes * row.count)
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "remat", "capacity"),
    [
        ("all_to_all", "full", 1.25),
        pytest.param("all_to_all", "full", None, marks=pytest.mark.exhaustive),
        pytest.param("all_gather", "full", None, marks=pytest.mark.exhaustive),
        pytest.param("all_to_all", "none", None, marks=pytest.mark.exhaustive),
        pytest.param("all_gather", "none", None, marks=pytest.mark.slow),
        pytest.param("all_to_all", "none", 0.5, marks=pytest.mark.exhaustive),
    ],
)
def test_bytes_for_experts_are_the_compiled_programs(
    exchange: str, remat: str, capacity: float | None
) -> None:
    """Of tokens, outputs and gradients, what a policy does again, and weights that are gathered."""
    model = with_experts(exchange, capacity_factor=capacity)
    config = configure({"fsdp": 2, "expert": 4}, model=model, remat=remat)
    found = compiled(config)
    planned = estimate(config, parse_topology("cpu:8")).step.collectives
    assert moved(planned, "expert") == moved(found.collectives, "expert")
    if remat == "full":  # without, the loop keeps what it gathered
        weights = moved(found.collectives, "fsdp")
        assert weights["all-gather"] == moved(planned, "fsdp")["all-gather"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", ["none", "save_attention"])
@pytest.mark.parametrize("window", [None, 8])
def test_bytes_of_a_ring_are_the_compiled_programs(window: int | None, remat: str) -> None:
    """Keys and values with each pass, their gradients, and what reorders the rows. Of layers in
    a loop, without passes done again: where forward and backward pass are in one computation, XLA's
    CPU compiler drops the barrier between them and sends keys once."""
    model = {**MODEL, "context_exchange": "ring"}
    if window is not None:
        model |= {"sliding_window": window, "attention_pattern": ["sliding"]}
    config = configure({"fsdp": 2, "context": 4}, model=model, remat=remat)
    planned = estimate(config, parse_topology("cpu:8")).step.collectives
    found, expected = (
        moved(each, "context")["collective-permute"]
        for each in (compiled(config).collectives, planned)
    )
    assert found == pytest.approx(expected, rel=0.01)


def experts_of(found: Estimate) -> Any:
    return next(row for row in found.step.work if row.name == "experts")


def plan_experts(load: float = 1.0, topology: str = "v5e:2x4", **mesh: int) -> Estimate:
    config = configure(mesh, model=with_experts("all_to_all"))
    return estimate(config, parse_topology(topology), expert_load=load)


def test_a_capacity_makes_buffers_smaller() -> None:
    """Two experts per token, two of eight on a device: room for 4 times an even load, or
    1.25 times; and so much is the most that the busiest device runs."""
    mesh = {"fsdp": 2, "expert": 4}
    found = [
        estimate(
            configure(mesh, model=with_experts("all_to_all", capacity_factor=factor), remat="none"),
            parse_topology("v5e:2x4"),
            expert_load=4.0,
        )
        for factor in (None, 1.25)
    ]
    worst, limited = (experts_of(one).flops for one in found)
    assert limited == pytest.approx(worst * 1.25 / 4, rel=0.02)
    kept = [one.memory.owned("activations") for one in found]
    assert kept[1] < 0.6 * kept[0]
    room = math.ceil(1.25 * 2 * LENGTH / 8)
    assert any(f"room for {room} tokens of a row and drops" in note for note in found[1].step.notes)


def test_experts_are_divided_with_their_state() -> None:
    """And everything else is divided as by fsdp."""
    both = [plan_experts(fsdp=8), plan_experts(fsdp=2, expert=4)]
    for owner in ("parameters", "optimizer"):
        first, second = (one.memory.owned(owner) for one in both)
        assert second == pytest.approx(first, rel=0.02)
    assert experts_of(both[0]).flops == experts_of(both[1]).flops


def test_an_uneven_load_is_work_and_bytes_of_the_busiest_device_and_is_said() -> None:
    even, uneven = plan_experts(fsdp=2, expert=4), plan_experts(1.5, fsdp=2, expert=4)
    assert experts_of(uneven).flops == pytest.approx(1.5 * experts_of(even).flops, rel=0.01)
    sent = [moved(one.step.collectives, "expert")["all-to-all"] for one in (even, uneven)]
    assert sent[1] == pytest.approx(1.5 * sent[0])
    assert any("1.5 times the mean load (--expert-load: as given)" in n for n in uneven.step.notes)
    assert any("an even load, the default" in note for note in even.step.notes)
    assert even.memory.total == uneven.memory.total  # buffers have room for the worst case anyway


def test_no_device_has_more_than_all_tokens() -> None:
    """With two experts of a token and two on each of four devices: four times the mean."""
    worst = plan_experts(100.0, fsdp=2, expert=4)
    assert experts_of(worst).flops == experts_of(plan_experts(4.0, fsdp=2, expert=4)).flops


def test_an_uneven_load_slows_no_device_that_has_all_experts() -> None:
    assert plan_experts(1.5, fsdp=8).step_seconds == plan_experts(fsdp=8).step_seconds


def test_a_load_below_the_mean_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expert_load=0\.5 is less than the mean load; give 1"):
        plan_experts(0.5, fsdp=2, expert=4)


def test_a_link_between_servers_makes_the_exchange_slower() -> None:
    """GPUs of one server exchange over its switch, eight servers over the network."""
    inside = plan_experts(topology="h100:1x8", fsdp=1, expert=8)
    between = plan_experts(topology="h100:8x1", fsdp=1, expert=8)

    def seconds(found: Estimate) -> float:
        return sum(row.seconds for row in found.step.collectives if "experts" in row.what)

    assert seconds(between) > 2 * seconds(inside)


def test_a_search_tries_stages_and_every_division_of_the_experts() -> None:
    config = configure({"fsdp": -1}, model=with_experts())
    assert isinstance(config.model, DecoderConfig)
    found = list(meshes(config, config.model, parse_topology("v5e:2x4")))
    assert {mesh.expert for mesh in found} == {1, 2, 4, 8}
    assert {mesh.stage for mesh in found} == {1, 2}  # of three layers, with two devices of eight


PRODUCTS = ("attention_projections", "mlp", "experts", "logits_loss")


def products(found: Estimate) -> float:
    return sum(row.flops for row in found.step.work if row.name in PRODUCTS)


def passed_on(rows: Any) -> int:
    """Bytes of collective-permutes; a round of parts that all stay at home has no axis."""
    return sum(round(r.bytes * r.count) for r in rows if r.kind == "collective-permute")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "layers", "pipeline"),
    [
        ({"fsdp": 2, "stage": 4}, 8, {}),
        pytest.param(
            {"fsdp": 4, "stage": 2},
            8,
            {"repeats": 2, "microbatches": 4},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {"fsdp": 1, "data": 4, "stage": 2}, 7, {"microbatches": 2}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=["even", "repeats", "a layer too many"],
)
def test_a_pipeline_computes_and_passes_on_what_the_compiled_program_does(
    mesh: dict[str, int], layers: int, pipeline: dict[str, int]
) -> None:
    """Products of every tick, the bubble's too; microbatches, what belongs to them, and parts."""
    model = {**MODEL, "num_layers": layers}
    config = configure(mesh, model=model, remat="full", pipeline=pipeline)
    found = compiled(config)
    planned = estimate(config, parse_topology("cpu:8"))
    matmul = sum(row.flops * row.count for row in found.operations if row.category == "matmul")
    assert products(planned) == matmul
    assert passed_on(planned.step.collectives) == passed_on(found.collectives)
    if not pipeline:
        gathered = moved(found.collectives, "fsdp")["all-gather"]
        assert moved(planned.step.collectives, "fsdp")["all-gather"] == gathered


def staged(**pipeline: int) -> Estimate:
    model = {**MODEL, "num_layers": 8}
    mesh = {"fsdp": 1, "stage": 4}
    config = configure(mesh, model=model, batch_size=64, seq_len=4096, pipeline=pipeline)
    return estimate(config, parse_topology("v5e:2x2"))


def test_a_stage_has_the_parameters_of_its_layers() -> None:
    whole = estimate(
        configure({"fsdp": 1}, model={**MODEL, "num_layers": 8}), parse_topology("v5e:1x1")
    )
    fourth = staged().memory.owned("parameters") / whole.memory.owned("parameters")
    assert fourth == pytest.approx(1 / 4, rel=0.05)


def test_more_microbatches_and_repeats_make_the_bubble_smaller() -> None:
    """11 ticks of 8, 35 of 32, 19 of 16; said in the notes."""
    plans = [staged(microbatches=8), staged(microbatches=32), staged(microbatches=8, repeats=2)]
    layers = [products(one) - _logits(one) for one in plans]
    assert layers[1] / layers[0] == pytest.approx(35 / 32 / (11 / 8))
    assert layers[2] / layers[0] == pytest.approx(19 / 16 / (11 / 8))
    assert any("8 microbatches: its layers run 11 times, 3" in note for note in plans[0].step.notes)
    assert any("(27% of their time, the bubble)" in note for note in plans[0].step.notes)


def _logits(found: Estimate) -> float:
    return sum(row.flops for row in found.step.work if row.name == "logits_loss")
