"""The compiler's words about memory become figures; errors cross from the child as they are."""

import pytest

from fornax.config.errors import FornaxError, ShardingError
from fornax.plan.compile.errors import (
    CompileError,
    OutOfMemoryError,
    from_mapping,
    no_memory,
    to_mapping,
)

_GIB = 2**30
_SHORT = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(18.03G) exceeds available HBM (15.75G)."
)
_LONG = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. \
Ran out of memory in memory space hbm. Used 30.21G of 15.48G hbm. Exceeded hbm capacity by 14.73G.

Total hbm usage >= 30.73G:
    reserved        530.00M
    program          14.31G
    arguments        15.90G

Output size 1.0K; shares 0B with arguments.

  Largest program allocations in hbm:

  1. Size: 144.00M
     Operator: op_name="jit(step)/mlp/up[dims=\\"a\\"]" source_file="/m/layers.py" source_line=3
     Shape: bf16[3072,24576]{1,0:T(8,128)(2,1)}
     Unpadded size: 144.00M
     XLA label: fusion.2 = fusion(x)
     Allocation type: HLO temp
     ==========================

  2. Size: 1.50G
     Shape: f32[4096,1]{1,0:T(8,128)}
     Unpadded size: 12.00M
     Extra memory due to padding: 1.49G (128.0x expansion)
     XLA label: convert.15982 = convert(param.72)
     Allocation type: HLO temp
     ==========================
"""
_EARLY = (
    "Aborting compilation early because it's unlikely to have enough device memory. Requires "
    "3.47T, has 14.49G available."
)


@pytest.mark.parametrize(
    ("text", "used", "limit"),
    [
        (_SHORT, 18.03 * _GIB, 15.75 * _GIB),
        (_LONG, 30.21 * _GIB, 15.48 * _GIB),
        (_EARLY, 3.47 * 1024 * _GIB, 14.49 * _GIB),
    ],
    ids=["0.0.42", "long", "early"],
)
def test_every_form_of_the_complaint_gives_figures(text: str, used: float, limit: float) -> None:
    found = no_memory(text, "train_step", "v5e:2x2")
    assert found is not None
    assert (found.used, found.limit) == (int(used), int(limit))
    assert str(found).startswith("train_step does not fit on v5e:2x2: it needs ")
    assert "\n" not in str(found)


def test_the_largest_allocations_are_listed() -> None:
    found = no_memory(_LONG, "train_step", "v5e:2x2")
    assert found is not None
    first, second = found.allocations
    assert (first.bytes, first.unpadded_bytes) == (int(1.5 * _GIB), 12 * 2**20)
    assert (first.op_name, first.source) == ("", "")
    assert second.op_name == 'jit(step)/mlp/up[dims="a"]'
    assert second.source == "/m/layers.py:3"
    assert second.shape == "bf16[3072,24576]{1,0:T(8,128)(2,1)}"
    assert second.kind == "HLO temp"


@pytest.mark.parametrize("text", ["", "RESOURCE_EXHAUSTED: vmem", "Used 3 of 4 hands"])
def test_other_complaints_are_not_about_memory(text: str) -> None:
    assert no_memory(text, "train_step", "v5e:2x2") is None


@pytest.mark.parametrize(
    "error",
    [no_memory(_LONG, "train_step", "v5e:2x2"), CompileError("no"), ShardingError("so not")],
    ids=lambda e: type(e).__name__,
)
def test_errors_stay_what_they_are(error: FornaxError) -> None:
    again = from_mapping(to_mapping(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    if isinstance(error, OutOfMemoryError):
        assert isinstance(again, OutOfMemoryError)
        assert again.allocations == error.allocations
        assert (again.used, again.limit) == (error.used, error.limit)


def test_an_unknown_kind_is_a_compile_error() -> None:
    assert isinstance(from_mapping({"kind": "Surprise", "message": "oh"}), CompileError)
