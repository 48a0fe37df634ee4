"""A program that the compiler refuses is reported with the compiler's figure."""

import pytest

from fornax.plan.artifact import Allocation
from fornax.plan.compile import OutOfMemoryError
from fornax.plan.report.refused import refused_program
from fornax.plan.topology import parse_topology

GIB = 1 << 30
HOG = Allocation(
    bytes=9 * GIB,
    unpadded_bytes=3 * GIB,
    shape="bf16[8,8192,14336]{2,1,0:T(8,128)(2,1)}",
    op_name="jit(step)/jvp()/while/body/mlp/dot_general",
    source="/x/fornax/models/layers.py:248",
    kind="HLO temp",
)


def error(program: str = "train_step", limit: int = 31 * GIB) -> OutOfMemoryError:
    return OutOfMemoryError(program, "v6e:2x4", used=60 * GIB, limit=limit, allocations=(HOG,))


def sizes(report) -> dict[str, int]:
    return {part.owner: part.bytes for part in report.memory.parts}


def test_the_total_is_the_compilers_and_the_state_stays(make_plan):
    guessed = make_plan().main
    report = refused_program(guessed, error(), parse_topology("v6e:2x4"))
    assert report.memory.total == pytest.approx(60 * GIB, abs=8)
    assert report.memory.usable == 31 * GIB
    assert not report.memory.fits
    before, after = sizes(guessed), sizes(report)
    assert all(after[owner] == before[owner] for owner in ("parameters", "optimizer", "batch"))
    assert after["activations"] / after["gradients"] == pytest.approx(
        before["activations"] / before["gradients"]
    )
    assert "the compiler refuses train_step" in report.notes[0]


def test_the_compilers_largest_allocations_are_shown(make_plan):
    report = refused_program(make_plan().main, error(), parse_topology("v6e:2x4"))
    [hog] = report.memory.buffers
    assert (hog.bytes, hog.padding, hog.shape) == (9 * GIB, 3.0, "bf16[8,8192,14336]")
    assert hog.name == "mlp/dot_general"


def test_a_chip_of_two_devices_needs_and_has_twice(make_plan):
    report = refused_program(make_plan().main, error(), parse_topology("tpu7x:2x2x1"))
    assert report.memory.total == pytest.approx(120 * GIB, abs=8)
    assert report.memory.usable == 62 * GIB


def test_the_time_of_another_program_than_training_is_not_known(make_plan):
    report = refused_program(make_plan().main, error("eval_step"), parse_topology("v6e:2x4"))
    assert report.name == "eval_step"
    assert sizes(report)["activations"] == 0
    assert sizes(report)["gradients"] == 0
    assert report.memory.total == pytest.approx(60 * GIB, abs=8)
    assert report.work == ()
    assert report.step_seconds == 0
    assert "its time is not known" in report.notes[0]
