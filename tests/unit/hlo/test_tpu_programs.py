"""What is read from programs of the TPU compiler, of two versions: see `fixtures/README.md`."""

import dataclasses
import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from fornax.hlo import (
    Collective,
    Done,
    Item,
    Loop,
    Operation,
    ProgramFacts,
    Run,
    Start,
    analyse,
    parse,
)

_FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("libtpu-*"))
_AXES = {
    "mlp_v5e": {"data": 1, "fsdp": 4, "tensor": 2},
    "mlp_v6e": {"data": 1, "fsdp": 16, "tensor": 1},
    "collectives": {"data": 2, "fsdp": 4},
    "across": {"data": 2, "fsdp": 2, "tensor": 2},
    "conditional": {"data": 1, "fsdp": 2, "tensor": 2},
    "offload": {"data": 1, "fsdp": 2, "tensor": 2},
    "slices": {"data": 2, "fsdp": 2, "tensor": 2},
    "pallas": {"data": 2, "fsdp": 1, "tensor": 2},
}


@dataclasses.dataclass(frozen=True)
class Fixtures:
    """The programs of one version of the compiler."""

    folder: Path

    def facts(self, name: str) -> ProgramFacts:
        text = gzip.decompress((self.folder / f"{name}.hlo.gz").read_bytes()).decode()
        return analyse(parse(text), _AXES[name])

    def memory(self, name: str) -> dict[str, int]:
        return json.loads((self.folder / f"{name}.json").read_text())


def started(facts: ProgramFacts) -> set[str]:
    """Names of what runs beside other work."""
    return {item.what.name for item in flat(facts.schedule) if isinstance(item, Start)}


@pytest.fixture(params=_FIXTURES, ids=[folder.name for folder in _FIXTURES])
def programs(request: pytest.FixtureRequest) -> Fixtures:
    return Fixtures(request.param)


def flat(schedule: Iterable[Item]) -> list[Run | Start | Done]:
    return [
        each
        for item in schedule
        for each in (flat(item.body) if isinstance(item, Loop) else [item])
    ]


def by_kind(facts: ProgramFacts, kind: str) -> list[Collective]:
    return [each for each in facts.collectives if each.kind == kind]


@pytest.mark.parametrize("name", ["mlp_v5e", "mlp_v6e"])
def test_the_peak_is_the_compilers(programs: Fixtures, name: str) -> None:
    told = programs.memory(name)["peak_memory_in_bytes"]
    # The older version leaves out a buffer that its own schedule keeps alive.
    near = 0.001 if "0.0.51" in programs.folder.name else 0.05
    assert programs.facts(name).peak.bytes == pytest.approx(told, rel=near)


@pytest.mark.parametrize("name", ["collectives", "offload", "slices", "pallas"])
def test_the_peak_of_small_programs_is_near_their_memory(name: str) -> None:
    # Of the version whose `temp_size` is the memory that is set aside for HBM.
    programs = Fixtures(next(folder for folder in _FIXTURES if "0.0.51" in folder.name))
    memory = programs.memory(name)
    used = memory["argument_size_in_bytes"] + memory.get("temp_size_in_bytes", 0)
    used += memory["output_size_in_bytes"] - memory.get("alias_size_in_bytes", 0)
    assert programs.facts(name).peak.bytes == pytest.approx(used, rel=0.06)


@pytest.mark.parametrize(("name", "devices"), [("mlp_v5e", 8), ("mlp_v6e", 16)])
def test_products_written_as_convolutions_count_as_products(
    programs: Fixtures, name: str, devices: int
) -> None:
    facts = programs.facts(name)
    rows, width, inner, layers = 4096, 2048, 8192, 4
    assert facts.flops == 3 * layers * 2 * (2 * rows * width * inner) / devices
    assert {each.dtype for each in facts.operations if each.flops} == {"bfloat16"}


def test_the_slice_of_a_stack_counts_and_not_the_stack(programs: Fixtures) -> None:
    facts = programs.facts("mlp_v5e")
    (slicing,) = (e for e in facts.operations if e.name == "constant_dynamic-slice_fusion.9")
    # A layer's part of bf16[4,512,4096] is read; it is written to vector memory.
    assert slicing.bytes == 512 * 4096 * 2
    assert slicing.count == 4
    (storing,) = (e for e in facts.operations if e.name == "bitcast_dynamic-update-slice_fusion.9")
    assert storing.bytes == 1024 * 2048 * 2


def test_an_asynchronous_gather_spans_the_product_that_hides_it(programs: Fixtures) -> None:
    facts = programs.facts("mlp_v5e")
    (loop,) = (i for i in facts.schedule if isinstance(i, Loop) and i.name == "while.36")
    assert (loop.count, loop.exact) == (4, True)
    names = [(type(item).__name__, item.what) for item in flat(loop.body)]
    start = next(n for n, (kind, _) in enumerate(names) if kind == "Start")
    done = next(n for n, (kind, _) in enumerate(names) if kind == "Done")
    gather = names[start][1]
    assert names[done][1] is gather
    assert isinstance(gather, Collective)
    assert (gather.kind, gather.axes, gather.group_size) == ("all-gather", ("fsdp",), 4)
    assert gather.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert gather.bytes == 4096 * 2048 * 2
    assert gather.count == 4
    between = [what for _, what in names[start + 1 : done]]
    assert [what.category for what in between if isinstance(what, Operation)] == ["matmul"]


def test_what_starts_ends_once(programs: Fixtures) -> None:
    for name in _AXES:
        items = flat(programs.facts(name).schedule)
        started = [id(item.what) for item in items if isinstance(item, Start)]
        done = [id(item.what) for item in items if isinstance(item, Done)]
        assert sorted(started) == sorted(done), name
        assert len(set(started)) == len(started), name


def test_a_reduction_of_which_a_part_is_kept_is_a_reduce_scatter(programs: Fixtures) -> None:
    facts = programs.facts("mlp_v5e")
    scatters = by_kind(facts, "reduce-scatter")
    assert {each.axes for each in scatters} == {("fsdp",)}
    assert [each.count for each in scatters] == [4, 4]
    assert all("/home/user/make.py" in each.source for each in scatters)
    assert {each.axes for each in by_kind(programs.facts("slices"), "reduce-scatter")} == {
        ("fsdp",)
    }


def test_a_collective_of_each_kind(programs: Fixtures) -> None:
    found = {each.kind: each for each in programs.facts("collectives").collectives}
    shard = 1024 * 1024 * 4
    assert {kind: (each.axes, each.group_size, each.bytes) for kind, each in found.items()} == {
        "all-gather": (("fsdp",), 4, 4 * shard),
        "reduce-scatter": (("fsdp",), 4, shard),
        "all-reduce": (("data", "fsdp"), 8, shard),
        "all-to-all": (("fsdp",), 4, 4 * shard),
        "collective-permute": (("data",), 2, shard),
    }
    began = started(programs.facts("collectives"))
    assert found["collective-permute"].name in began
    assert found["all-gather"].name not in began
    assert {each.dtype for each in found.values()} == {"float32"}
    assert found["all-to-all"].source.startswith("/home/user/make.py:")
    assert found["all-to-all"].source.endswith(" (each)")


def test_what_crosses_slices_is_a_collective_of_one_device_a_slice(programs: Fixtures) -> None:
    facts = programs.facts("slices")
    across = [each for each in facts.collectives if each.axes == ("data",)]
    assert {each.kind for each in across} == {"all-reduce"}
    assert {each.groups for each in across} == {((0, 4), (1, 5), (2, 6), (3, 7))}
    assert {each.name for each in across} <= started(facts)
    # Gradients of two weights: the loop's first three layers, and the last after it.
    weights = [each for each in across if each.dtype == "bfloat16"]
    assert sum(each.bytes * each.count for each in weights) == 2 * 4 * 1024 * 2048 * 2 // 4
    inside = [each for each in facts.collectives if each.axes == ("fsdp",)]
    assert {each.groups for each in inside} == {((0, 2), (1, 3))}


def test_each_kind_across_slices(programs: Fixtures) -> None:
    facts = programs.facts("across")
    found = {each.kind: each for each in facts.collectives if each.axes == ("data",)}
    shard = 2048 * 1024 * 4
    assert {kind: each.bytes for kind, each in found.items()} == {
        "all-gather": 2 * shard,
        "all-reduce": shard // 2,  # What is left to each after a reduce-scatter in its slice.
        "reduce-scatter": shard,
        "all-to-all": 2 * shard,
        "send-recv": shard,
    }
    assert {each.name for each in found.values()} <= started(facts)
    assert {each.group_size for each in found.values()} == {2}
    assert found["all-to-all"].source.endswith(" (each)")


def test_offloaded_activations_are_transfers_to_the_host(programs: Fixtures) -> None:
    facts = programs.facts("offload")
    moved = by_kind(facts, "host-transfer")
    activation = 2048 * 1024 * 2
    assert sum(each.bytes * each.count for each in moved) == 4 * 2 * activation
    assert {each.name for each in moved} <= started(facts)
    assert {each.kind for each in facts.peak.buffers} == {"argument", "temporary"}
    assert not [each for each in facts.peak.buffers if each.shape == "bf16[4,2048,1024]"]


def test_kernels_count_by_their_estimate_and_attention_by_closed_form(programs: Fixtures) -> None:
    facts = programs.facts("pallas")
    (kernel,) = (each for each in facts.operations if each.category == "kernel")
    assert (kernel.flops, kernel.transcendentals, kernel.bytes) == (12345, 7, 999)
    attention = {
        each.name.split("_")[2]: each for each in facts.operations if each.category == "attention"
    }
    product = 2 * 4 * 1024 * 1024 * 128
    assert attention["fwd"].flops == 2 * product
    assert attention["dkv"].flops == 4 * product
    assert attention["dq"].flops == 3 * product
    assert sum("does not say its cost" in note for note in facts.notes) == 3


def test_buffers_at_the_peak_are_named_by_what_they_hold(programs: Fixtures) -> None:
    buffers = {each.name: each for each in programs.facts("mlp_v5e").peak.buffers}
    weights = buffers["param.6"]
    assert (weights.kind, weights.op_name) == ("argument", "params['up']")
    # The stack of saved activations is made empty before the loop; the loop fills it.
    saved = [each for each in buffers.values() if each.shape == "bf16[4,1024,4096]"]
    assert {each.op_name.rsplit("/", 1)[1] for each in saved} >= {"dot_general", "mul", "div"}
    assert all("/home/user/make.py" in each.source for each in saved)


def test_a_gather_of_weights_names_them(programs: Fixtures) -> None:
    gathers = by_kind(programs.facts("mlp_v5e"), "all-gather")
    assert {each.argument for each in gathers} == {"params['up']", "params['down']"}
    assert {each.argument for each in by_kind(programs.facts("mlp_v5e"), "all-reduce")} == {""}


def test_the_heavier_branch_is_named(programs: Fixtures) -> None:
    notes = programs.facts("conditional").notes
    assert any("of 2 branches the one with the most work is counted" in note for note in notes)
