"""From a schedule to a prediction, on programs small enough to work out by hand."""

import dataclasses

import pytest

from fornax.hlo import (
    Calibration,
    Category,
    Collective,
    Done,
    Loop,
    Operation,
    Rates,
    Run,
    Start,
    operation_seconds,
)
from fornax.mesh.hardware import find_chip
from fornax.plan.artifact import DeviceFact
from fornax.plan.cost.network import GroupLayout, PhysicalAxis
from fornax.plan.cost.schedule import collective_layouts, predict_schedule
from fornax.plan.topology import parse_topology

TOPOLOGY = parse_topology("v6e:16x16")
CHIP = TOPOLOGY.chip
EXACT = Calibration(
    matmul=1, attention=0.5, memory=1, links=1, outside=1, host=1, hop_seconds=0, overhead=0
)
NOWHERE = {"op_name": "", "source": "", "fornax_source": ""}


def operation(name="product", *, category: Category = "matmul", flops=0.0, moved=0, cycles=None):
    return Operation(
        name=name,
        opcode="fusion",
        category=category,
        flops=flops,
        vector_flops=0,
        transcendentals=0,
        bytes=moved,
        dtype="bfloat16",
        count=1,
        cycles=cycles,
        **NOWHERE,
    )


def gather(name="gather", *, size, groups=()):
    return Collective(
        name=name,
        kind="all-gather",
        axes=("fsdp",),
        groups=groups,
        group_size=16,
        bytes=size,
        dtype="bfloat16",
        count=1,
        **NOWHERE,
    )


RING = (GroupLayout(axes=(PhysicalAxis(dimension=0, size=16, ring=True),)),)
SECOND = CHIP.peak("bfloat16")
"""FLOPs of one second."""


def bytes_for(seconds):
    """V of an all-gather over `RING` that takes `seconds`."""
    return round(seconds * 2 * CHIP.link_bandwidth * 16 / 15)


def test_arithmetic_or_memory_decides_whichever_takes_longer():
    rates = Rates(chip=CHIP, calibration=EXACT)
    product = operation(flops=CHIP.peak("bfloat16"), moved=1)
    timed = operation_seconds(product, rates)
    assert (timed.seconds, timed.bound) == (pytest.approx(1), "compute")
    copy = operation(category="copy", moved=round(CHIP.memory_bandwidth))
    timed = operation_seconds(copy, rates)
    assert (timed.seconds, timed.bound) == (pytest.approx(1), "memory")


def test_a_share_of_the_compiler_s_cycles_is_the_least_time():
    rates = Rates(chip=CHIP, calibration=dataclasses.replace(EXACT, clock=1e9, cycles=0.5))
    padded = operation(flops=0.1 * SECOND, cycles=4e9)
    assert operation_seconds(padded, rates).seconds == pytest.approx(2)
    hopeful = operation(flops=SECOND, cycles=1)
    assert operation_seconds(hopeful, rates).seconds == pytest.approx(1)


def test_attention_reaches_its_own_share():
    rates = Rates(chip=CHIP, calibration=EXACT)
    kernel = operation(category="attention", flops=CHIP.peak("bfloat16"))
    assert operation_seconds(kernel, rates).seconds == pytest.approx(2)


def test_a_device_of_two_is_half_a_chip():
    chip = find_chip("tpu7x")
    product = operation(flops=chip.peak("bfloat16"))
    timed = operation_seconds(product, Rates(chip=chip, calibration=EXACT))
    assert timed.seconds == pytest.approx(2)


def test_what_is_scheduled_beside_computation_is_hidden():
    moved = gather(size=bytes_for(3))
    layouts = {"gather": RING}
    schedule = (Start(moved), Run(operation(flops=2 * SECOND)), Done(moved))
    found = predict_schedule(schedule, layouts, TOPOLOGY, EXACT)
    assert found.step_seconds == pytest.approx(3)
    assert found.compute_seconds == pytest.approx(2)
    assert found.exposed_seconds == pytest.approx(1)
    assert (found.optimistic_seconds, found.pessimistic_seconds) == pytest.approx((3, 5))
    assert found.bound == "compute"
    (one,) = found.collectives
    assert one.link == "ici"
    assert (one.seconds, one.exposed_seconds) == pytest.approx((3, 1))


def test_what_runs_alone_is_exposed():
    moved = gather(size=bytes_for(3))
    found = predict_schedule((Run(moved),), {"gather": RING}, TOPOLOGY, EXACT)
    assert found.exposed_seconds == pytest.approx(3)
    assert found.bound == "ici"
    assert any("exposed" in note for note in found.notes)


def test_loops_count_by_their_turns():
    body = (Run(operation(flops=SECOND)), Run(gather(size=bytes_for(1))))
    loop = Loop(name="layers", kind="while", count=32, exact=True, body=body)
    found = predict_schedule((loop,), {"gather": RING}, TOPOLOGY, EXACT)
    assert found.step_seconds == pytest.approx(64)
    assert found.work[0].flops == pytest.approx(32 * SECOND)
    assert found.collectives[0].seconds == pytest.approx(32)


def test_a_copy_that_was_moved_ahead_runs_beside_the_core():
    copy = operation("copy", category="copy", moved=round(2 * CHIP.memory_bandwidth))
    schedule = (Start(copy), Run(operation(flops=SECOND)), Done(copy))
    found = predict_schedule(schedule, {}, TOPOLOGY, EXACT)
    assert found.step_seconds == pytest.approx(2)
    assert found.bound in ("memory", "compute")


def test_groups_that_differ_take_the_slowest():
    devices = [
        DeviceFact(coords=(row, column), core=0, slice=0)
        for row in range(16)
        for column in range(16)
    ]
    ring, part = tuple(range(16)), tuple(range(16, 20))
    moved = gather(size=1000, groups=(ring, part))
    layouts = collective_layouts((Run(moved),), devices, TOPOLOGY)
    assert {axis.ring for layout in layouts["gather"] for axis in layout.axes} == {True, False}
    slow = predict_schedule((Run(moved),), layouts, TOPOLOGY, EXACT).step_seconds
    assert slow == pytest.approx(1000 * 3 / 4 / CHIP.link_bandwidth)
