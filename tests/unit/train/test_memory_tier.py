"""Snapshots in memory: what comes back, from which of the two, and how often they are made."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fornax.config.snapshot_file import FIRST, SnapshotFile
from fornax.train.memory_tier import MemoryTier, peer_of
from fornax.train.state import TrainState

METADATA = {"total": 12.0, "batches": 3, "skipped_batches": []}


def state(seed: int) -> TrainState:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))

    def lay(x: Any, *names: str | None) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*names)))

    rng = np.random.default_rng(seed)
    return TrainState(
        step=lay(jnp.int32(seed)),
        updates=lay(jnp.int32(seed)),
        params={"w": lay(rng.normal(size=(8, 6)).astype(np.float32), "a", "b")},
        other={"half": lay(jnp.asarray(rng.normal(size=5), jnp.bfloat16))},
        optimizer=[lay(rng.normal(size=(4, 3)).astype(np.float32), None, None)],
        guard=lay(jnp.float32(seed)),
        rng=lay(jnp.arange(2, dtype=jnp.uint32)),
    )


def abstract() -> TrainState:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0)
    )


@pytest.fixture
def paths() -> Iterator[list[Path]]:
    """As an agent makes them: without a name, reached through the process that holds them."""
    files = [os.memfd_create(f"test-{n}") for n in range(2)]
    yield [Path(f"/proc/{os.getpid()}/fd/{file}") for file in files]
    for file in files:
        os.close(file)


class Clock:
    """A millisecond passes at each look, and what a test adds."""

    now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def tier(paths: list[Path], config: str = "steps: 9") -> MemoryTier:
    return MemoryTier(paths, 100.0, config)


def test_another_process_finds_the_two_newest_and_gets_their_arrays(paths: list[Path]):
    first = tier(paths)
    for step in (3, 5, 8):
        first.write(state(step), step, {0: {"at": step}, 2: {"at": 7}}, METADATA)
    second = tier(paths)
    found = second.newest(abstract())
    assert list(found) == [5, 8]
    assert dict(found[8].data) == {0: {"at": 8}, 2: {"at": 7}}
    assert found[8].metadata == METADATA
    for step in (8, 5):
        back = second.restore(step, abstract())
        jax.tree.map(np.testing.assert_array_equal, back, state(step))
        assert jax.tree.map(lambda x: x.sharding, back) == jax.tree.map(
            lambda x: x.sharding, abstract()
        )
    second.write(state(9), 9, {}, METADATA)  # what was restored is not what is overwritten
    jax.tree.map(np.testing.assert_array_equal, back, state(5))
    assert list(tier(paths).newest(abstract())) == [8, 9]


def test_what_is_not_whole_or_of_another_run_is_passed_over(paths: list[Path]):
    memory = tier(paths)
    assert not memory.newest(abstract())
    memory.write(state(3), 3, {}, METADATA)
    memory.write(state(4), 4, {}, METADATA)
    assert not tier(paths, "steps: 10").newest(abstract())
    other = abstract()
    wider = jax.ShapeDtypeStruct((9, 6), jnp.float32, sharding=other.params["w"].sharding)
    assert not tier(paths).newest(
        TrainState(**{**vars(other), "params": {"w": wider}})  # a model of another width
    )
    with paths[1].open("r+b") as file:  # one bit of the second array
        file.seek(FIRST + 64 + 5)
        byte = file.read(1)[0]
        file.seek(FIRST + 64 + 5)
        file.write(bytes([byte ^ 4]))
    assert list(tier(paths).newest(abstract())) == [3]
    with paths[0].open("r+b") as file:  # killed while it wrote: the marker comes last
        file.seek(8)
        file.write(struct.pack("<Q", 0))
    assert not tier(paths).newest(abstract())


def test_a_run_that_fails_more_often_keeps_more(paths: list[Path]):
    kept = {}
    for mtbf in (0.01, 1e6):
        clock = Clock()
        memory = MemoryTier(paths, mtbf, "", clock=clock)
        memory.begin(10)
        kept[mtbf] = []
        for step in range(11, 31):
            clock.now += 0.02  # what a step takes
            if memory.is_due(step):
                memory.write(state(step), step, {}, METADATA)
                kept[mtbf].append(step)
    assert kept[1e6] == [12]  # from the first step to this one it learns what a step takes
    assert kept[0.01] == list(range(12, 31))


def test_the_newer_snapshot_stays_until_the_other_host_has_it(paths: list[Path]):
    """Else the replica of a host that is lost could be older than all that the others hold."""
    memory = MemoryTier(paths, 100.0, "", peer=1)
    memory.begin(0)
    memory.write(state(2), 2, {}, METADATA)
    files = [SnapshotFile(os.open(path, os.O_RDWR)) for path in paths]

    def steps() -> set[int]:
        return {found.step for file in files if (found := file.found()) is not None}

    for step in range(3, 7):
        memory.write(state(step), step, {}, METADATA)
        assert steps() == {2}
    memory.write(state(7), 7, {}, METADATA)  # a peer that is gone does not end snapshots
    assert steps() == {2, 7}
    for file in files:
        if (found := file.found()) is not None and found.step == 7:
            assert found.peer == 1
            file.set_replicated(found)
    memory.write(state(8), 8, {}, METADATA)
    assert steps() == {7, 8}
    for file in files:
        os.close(file.descriptor)


def test_a_run_that_goes_on_from_an_earlier_step_forgets_the_later_ones(paths: list[Path]):
    memory = tier(paths)
    memory.write(state(3), 3, {}, METADATA)
    memory.write(state(8), 8, {}, METADATA)
    memory.begin(3)
    assert list(tier(paths).newest(abstract())) == [3]


def copied(paths: list[Path], directory: Path, seconds: float = 1.0) -> list[int]:
    """As an agent does: the steps of the marked snapshots, of which there are files now."""
    found = []
    for path in paths:
        with path.open("r+b") as memory:
            file = SnapshotFile(memory.fileno())
            each = file.found()
            if each is not None and each.to_disk and file.copied(each) is None:
                directory.mkdir(exist_ok=True)
                (directory / f"0-{each.step}").write_bytes(path.read_bytes())
                file.set_copied(each, seconds)
                found.append(each.step)
    return found


def forget(paths: list[Path]) -> None:
    """As when the agent is gone with its memory."""
    for path in paths:
        with path.open("r+b") as file:
            SnapshotFile(file.fileno()).erase()


def test_where_memory_is_lost_the_newest_on_disk_that_is_whole_comes_back(
    paths: list[Path], tmp_path: Path
):
    disk = tmp_path / "disk"

    def on_disk(config: str = "steps: 9") -> MemoryTier:
        return MemoryTier(paths, 0.0, config, disk=disk)

    first = on_disk()
    for step in (3, 5, 8):
        first.write(state(step), step, {0: {"at": step}}, METADATA)
        assert copied(paths, disk) == [step]
    assert {found.tier for found in on_disk().newest(abstract()).values()} == {"memory"}
    forget(paths)
    second = on_disk()
    found = second.newest(abstract())
    assert [(step, each.tier) for step, each in found.items()] == [(8, "local disk")]
    assert found[8].metadata == METADATA
    assert dict(found[8].data) == {0: {"at": 8}}
    jax.tree.map(np.testing.assert_array_equal, second.restore(8, abstract()), state(8))
    assert not second.passed_over
    assert list(on_disk().newest(abstract(), lambda metadata: metadata["total"] > 0)) == []
    another = on_disk("steps: 10")
    assert not another.newest(abstract())
    assert another.passed_over == [f"{disk}/0-{n} was made with another config" for n in (3, 5, 8)]
    for step, where in ((8, FIRST + 64 + 5), (5, -3)):  # of an array, and of the header
        whole = bytearray((disk / f"0-{step}").read_bytes())
        whole[where] ^= 4
        (disk / f"0-{step}").write_bytes(whole)
    third = on_disk()
    assert list(third.newest(abstract())) == [3]
    assert third.passed_over == [f"{disk}/0-{step} is damaged" for step in (5, 8)]
    third.begin(3)  # what comes after is not done again the same way
    assert [each.name for each in disk.iterdir()] == ["0-3"]


def test_copies_are_as_far_apart_as_they_cost_and_never_two_at_a_time(
    paths: list[Path], tmp_path: Path
):
    clock = Clock()
    memory = MemoryTier(paths, 50.0, "", disk=tmp_path, clock=clock)
    memory.write_now(state(1), 1, {}, METADATA)
    memory.write_now(state(2), 2, {}, METADATA)
    memory.begin(2)
    for step in (3, 4, 5, 6):
        memory.write(state(step), step, {}, METADATA)  # in place of the one that is being copied
        assert copied([], tmp_path) == []
        assert steps_in(paths) == {1, 2}
    assert copied(paths, tmp_path, seconds=1e-2) == [1]
    memory.write(state(7), 7, {}, METADATA)  # 1 s after the last: sqrt(2 x 0.01 s x 50 s)
    assert copied(paths, tmp_path) == []
    clock.now += 1.01
    memory.write(state(8), 8, {}, METADATA)
    assert copied(paths, tmp_path, seconds=1e4) == [8]
    clock.now += 0.11
    memory.write(state(9), 9, {}, METADATA)
    assert copied(paths, tmp_path) == []


def steps_in(paths: list[Path]) -> set[int]:
    found = set()
    for path in paths:
        with path.open("rb") as file:
            if (each := SnapshotFile(file.fileno()).found()) is not None:
                found.add(each.step)
    return found


class _Device:
    def __init__(self, process: int) -> None:
        self.process_index = process


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([[0]], [None]),
        ([[0, 0, 1, 1, 2, 2]], [1, 2, 0]),
        ([[0, 1], [2, 3]], [2, 3, 0, 1]),
        ([[0, 1], [2, 3], [4, 5]], [2, 3, 4, 5, 0, 1]),
        ([[0], [0]], [None]),  # one process that plays two slices
        ([[0, 1], [0, 1]], [1, 0]),
    ],
)
def test_a_replica_lies_in_another_slice_where_there_are_slices(
    slices: list[list[int]], expected: list[int | None]
):
    class _Mesh:
        devices = np.array([[_Device(process) for process in each] for each in slices])

    processes = sorted({process for each in slices for process in each})
    assert [peer_of(process, _Mesh()) for process in processes] == expected  # pyrefly: ignore
