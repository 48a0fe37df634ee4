"""What is read off a compiled program: owners of memory, arrays left whole, unasked exchanges; and
what is said of one that the compiler refuses."""

import dataclasses
import math

import pytest

from fornax.hlo import Buffer, Peak
from fornax.mesh.rules import DEFAULT_RULES, merge_rules
from fornax.plan.artifact import Allocation, ArrayFact, Artifact, MemoryFacts, Owner
from fornax.plan.compile import OutOfMemoryError
from fornax.plan.compile.memory import largest_buffers, memory_parts
from fornax.plan.cost.compiled import refused_program
from fornax.plan.cost.findings import unasked, whole_arrays
from fornax.plan.facts import CollectiveTime
from fornax.plan.topology import parse_topology

MESH = {"slice": 1, "data": 1, "stage": 1, "fsdp": 4, "expert": 1, "context": 1, "tensor": 2}
LOGICAL = {
    "layers/mlp/up/kernel": ("layers", "embed", "mlp"),
    "embed/embedding": ("vocab", "embed"),
}


def array(
    name: str, owner: Owner, shape: tuple[int, ...], axes: tuple[tuple[str, ...], ...]
) -> ArrayFact:
    size = 4 * math.prod(shape)
    parts = math.prod(MESH[axis] for entry in axes for axis in entry)
    return ArrayFact(
        name=name,
        owner=owner,
        shape=shape,
        dtype="float32",
        axes=axes,
        bytes_device=size // parts,
    )


UP = array(
    "params/layers/mlp/up/kernel", "parameters", (32, 1024, 4096), ((), ("fsdp",), ("tensor",))
)
TABLE = array("params/embed/embedding", "parameters", (65536, 1024), ((), ("fsdp",)))
MOMENT = array("optimizer/mu/embed/embedding", "optimizer", (65536, 1024), ((), ("fsdp",)))
TOKENS = array("batch/tokens", "batch", (16, 128), (("fsdp",), ()))


def artifact(*arrays: ArrayFact, temporaries: int = 0) -> Artifact:
    held = sum(one.bytes_device for one in arrays)
    return Artifact(
        program="train_step",
        topology="v5p:2x2x2",
        mesh=MESH,
        devices=(),
        arguments=arrays,
        memory=MemoryFacts(
            arguments=held + 1000,
            outputs=held + 64,
            aliased=held,
            temporaries=temporaries,
            code=5000,
        ),
        hlo="",
        versions={},
        lower_seconds=0.0,
        compile_seconds=0.0,
    )


def buffer(op_name: str, shape: str, size: int, kind="temporary", source: str = "") -> Buffer:
    return Buffer(
        name="fusion.1",
        bytes=size,
        unpadded_bytes=size,
        shape=shape,
        op_name=op_name,
        source=source,
        fornax_source="",
        kind=kind,
    )


FORWARD = "jit(step)/jvp()/while/body/checkpoint/mlp/dot_general"
BACKWARD = "jit(step)/transpose(jvp())/while/body/checkpoint/mlp/dot_general"
LOSS = "jit(step)/jvp(linear_cross_entropy)/dot_general"
BUFFERS = (
    buffer(FORWARD, "bf16[32,4,128,1024]", 700),
    buffer(BACKWARD, "f32[32,256,2048]", 600),  # as large as a chip's share of UP
    buffer(BACKWARD, "f32[4,128,4096]", 500),
    buffer(LOSS, "f32[512,65536]", 400),
    buffer("", "f32[7]", 50),
    buffer("state.params['layers']['mlp']['up']['kernel']", "f32[32,256,2048]", 900, "argument"),
    buffer("state.optimizer[1][0].mu['embed']['embedding']", "f32[65536,256]", 800, "argument"),
)
PEAK = Peak(bytes=0, temporaries=0, instruction="", buffers=BUFFERS)


def test_owners_sum_to_what_the_compiler_says():
    one = artifact(UP, TABLE, MOMENT, TOKENS, temporaries=3000)
    parts = {part.owner: part.bytes for part in memory_parts(one, PEAK, 1)}
    assert sum(parts.values()) == one.memory.total
    assert parts["parameters"] == UP.bytes_device + TABLE.bytes_device
    assert parts["optimizer"] == MOMENT.bytes_device
    assert parts["batch"] == TOKENS.bytes_device
    assert parts["gradients"] == 600
    assert parts["activations"] == 700
    assert parts["temporaries"] == 3000 - 600 - 700
    assert parts["other"] == 1000 + 5000 + 64


def test_two_devices_of_a_chip_need_twice_the_memory():
    one = artifact(UP, temporaries=3000)
    sums = [sum(part.bytes for part in memory_parts(one, PEAK, devices)) for devices in (1, 2)]
    assert sums[1] == 2 * sums[0]


def test_what_is_made_is_never_more_than_the_arena():
    parts = {
        part.owner: part.bytes for part in memory_parts(artifact(UP, temporaries=650), PEAK, 1)
    }
    assert (parts["gradients"], parts["activations"], parts["temporaries"]) == (600, 50, 0)


def test_the_largest_buffers_have_owners_and_names():
    shown = largest_buffers(artifact(UP, TABLE), PEAK)
    assert [(one.bytes, one.owner) for one in shown] == [
        (900, "parameters"),
        (800, "optimizer"),
        (700, "activations"),
        (600, "gradients"),
        (500, "temporaries"),
        (400, "temporaries"),
        (50, "temporaries"),
    ]
    assert shown[0].name == "params/layers/mlp/up/kernel"
    assert shown[2].name == "mlp/dot_general"


def test_an_array_left_whole_is_named_with_the_rule_that_divides_it():
    rules = merge_rules(DEFAULT_RULES, {"vocab": ()})
    [table] = whole_arrays(artifact(UP, TABLE), LOGICAL, rules)
    assert table.what == "params/embed/embedding float32[65536, 1024] is whole over tensor"
    assert table.bytes == 65536 * 1024 * 4 // 4
    assert table.fix == "add tensor to mesh.rules.vocab, now []"


def test_arrays_divided_as_far_as_they_go_are_not_mentioned():
    assert whole_arrays(artifact(UP, TOKENS), LOGICAL, DEFAULT_RULES) == []


def test_small_arrays_may_be_whole():
    scale = array("params/final_norm/scale", "parameters", (1024,), ((),))
    assert whole_arrays(artifact(scale), LOGICAL, DEFAULT_RULES) == []


BASE = CollectiveTime(
    kind="all-gather",
    axes=("fsdp",),
    link="ici",
    bytes=1 << 28,
    count=2,
    seconds=0.5,
    exposed_seconds=0.0,
    what="params/layers/mlp/up/kernel",
    source="models/layers.py:250 (MLP.__call__)",
)
RESIDUAL = 1 << 20


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kind": "collective-permute"},  # a window of the weight at a time
        {"kind": "reduce-scatter", "what": "mlp/dot_general"},
        {"kind": "all-reduce", "axes": ("tensor",), "what": "mlp/dot_general"},
        {"kind": "all-gather", "axes": ("tensor",), "what": "add", "bytes": 2 * RESIDUAL},
        {"kind": "all-gather", "axes": ("context",), "what": "attention"},
        {"kind": "all-to-all", "axes": ("expert",), "what": "shard_map/ragged_all_to_all"},
        {"kind": "collective-permute", "axes": ("stage",), "what": "shard_map/ppermute"},
        {"kind": "all-to-all", "what": "tiny", "bytes": 1000, "count": 1},
        {"kind": "all-to-all", "what": "quick", "seconds": 1e-6},
    ],
)
def test_what_the_rules_lead_to_is_not_mentioned(changes):
    one = dataclasses.replace(BASE, **changes)
    assert list(unasked([one], DEFAULT_RULES, 1.0, RESIDUAL)) == []


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"kind": "all-to-all", "what": "mlp/reshape"}, "activation_mlp"),
        ({"axes": ("tensor",)}, "activation_mlp"),  # of a parameter, over another axis than fsdp's
        ({"axes": ("tensor",), "what": "attention/dot_general"}, "activation_mlp"),
        ({"kind": "collective-permute", "axes": ("fsdp",), "what": "transpose"}, "activation_mlp"),
        (
            {"kind": "all-to-all", "what": "scatter-add", "source": "models/layers.py:9 (Embed)"},
            "activation_embed",
        ),
    ],
)
def test_what_nobody_asked_for_is_named_with_its_line_and_rule(changes, rule):
    one = dataclasses.replace(BASE, **changes)
    [found] = unasked([one, one], DEFAULT_RULES, 1.0, RESIDUAL)
    assert found.what == f"{one.kind} over {' x '.join(one.axes)} of {one.what}"
    assert found.source == one.source
    assert found.seconds == 1.0
    assert found.bytes == 4 * one.bytes
    assert found.fix.startswith(f"look at mesh.rules.{rule}, now ")


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
