"""What the compiler writes down: allocations in HBM, counted once."""

from pathlib import Path

from fornax.plan.compile import dump

_ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <1 x @0> (size=512,offset=0): f32[]
allocation 1: size 1000, parameter 1, shape |f32[250]| at ShapeIndex {}, maybe-live-out:
 value: <2 p.1 @0> (size=1000,offset=0): f32[250]
allocation 2: size 600, parameter 0, shape |f32[150]| at ShapeIndex {}:
allocation 3: size 40, maybe-live-out:
allocation 4: size 8, constant:
allocation 5: size 5000, preallocated-temp:
allocation 6: size 7777, color 1, preallocated-temp:
allocation 7: size 9999, color 5, preallocated-temp:
"""


def test_allocations_in_hbm_add_up(tmp_path: Path) -> None:
    name = "module_0000.jit_step.cl_1.after_optimizations"
    (tmp_path / f"{name}.txt").write_text("HloModule jit_step\n")
    (tmp_path / f"{name}-buffer-assignment.txt").write_text(_ASSIGNMENT)
    (tmp_path / "module_0001.jit_small.cl_1.after_optimizations.txt").write_text("HloModule")
    found = dump.read(tmp_path)
    assert found is not None
    assert found.hlo == "HloModule jit_step\n"
    assert (found.arguments, found.outputs, found.aliased) == (1600, 1040, 1000)
    assert found.temporaries == 5008
    assert found.total == 1600 + 40 + 5008


def test_a_compiler_that_wrote_nothing_is_no_error(tmp_path: Path) -> None:
    assert dump.read(tmp_path) is None
    (tmp_path / "module_0000.jit_step.cl_1.after_optimizations.txt").write_text("HloModule")
    assert dump.read(tmp_path) is None
