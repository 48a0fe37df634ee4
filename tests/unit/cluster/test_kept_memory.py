"""Which files of memory the launch holds for how long, and which of them a new agent takes up."""

import contextlib
import os
from collections.abc import Iterator

import pytest

from fornax.cluster.kept_memory import KeptMemory, adopt, memory_files, name_of, whole_steps
from fornax.config.snapshot_file import FIRST, SnapshotFile


class Agent:
    """The memory of one, with snapshots of some steps; two files at least."""

    def __init__(self, number: int, rank: int, *steps: int) -> None:
        self.number, self.rank = number, rank
        self.files = memory_files("test")
        for file, step in zip(self.files, steps, strict=False):
            self.write(file, step)

    @staticmethod
    def write(file: int, step: int) -> None:
        SnapshotFile(file).begin(FIRST)
        SnapshotFile(file).finish(b"{}", FIRST, step)

    def told(self, kept: KeptMemory) -> None:
        kept.hold(self.rank, self.number, [name_of(each) for each in self.files], None)

    def end(self) -> None:
        while self.files:
            os.close(self.files.pop())


@pytest.fixture
def kept() -> Iterator[KeptMemory]:
    found = KeptMemory()
    yield found
    found.close()


def adopted(kept: KeptMemory, rank: int) -> list[int]:
    memory = adopt(memory_files("test"), kept.places()[rank]["files"])
    try:
        assert len(memory) == 2
        return whole_steps(memory)
    finally:
        for each in memory:
            os.close(each)


def memory_files_open() -> int:
    """How many files of memory this process holds."""
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of another thread, which closed it
            found += os.readlink(f"/proc/self/fd/{each}").startswith("/memfd:test")
    return found


def test_snapshots_outlive_their_agents_and_the_two_newest_are_taken_up(kept: KeptMemory):
    """The second agent of rank 1 had fetched one of the two of the first when both ended."""
    agents = [Agent(10, 0, 7, 8), Agent(11, 1, 7, 8), Agent(12, 1, 8)]
    for agent in agents:
        agent.told(kept)
        agent.end()
    assert adopted(kept, 0) == [7, 8]
    assert adopted(kept, 1) == [7, 8]
    open_before = memory_files_open()
    kept.settle([10, 12], 2, 9)
    assert adopted(kept, 1) == [8]
    assert memory_files_open() == open_before - 2


def test_a_file_that_is_no_more_is_not_mistaken_for_another(kept: KeptMemory):
    agent = Agent(10, 0, 7, 8)
    names = [name_of(each) for each in agent.files]
    agent.end()
    other = Agent(11, 0, 3, 4)  # with the numbers of the first's descriptors
    kept.hold(0, 10, names, None)
    assert kept.places()[0]["files"] == []
    other.end()


def test_what_ranks_had_that_a_smaller_group_has_not_stays_until_that_has_snapshots(
    kept: KeptMemory,
):
    agents = [Agent(10 + rank, rank, 7, 8) for rank in range(3)]
    for agent in agents:
        agent.told(kept)
    kept.settle([10, 11], 2, 9)
    kept.prune()
    assert adopted(kept, 2) == [7, 8]
    for agent, step in ((agents[0], 11), (agents[1], 11)):
        kept.prune()
        assert 2 in kept.places()
        agent.write(agent.files[0], step)
    kept.prune()
    assert set(kept.places()) == {0, 1}
    for agent in agents:
        agent.end()
