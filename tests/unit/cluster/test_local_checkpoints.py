"""Snapshots that an agent copies from its memory to the disk of its host: real files of both."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fornax.cluster.kept_memory import memory_files
from fornax.cluster.local_checkpoints import LocalCheckpoints
from fornax.config.snapshot_file import FIRST, SnapshotFile

SECONDS = 300


class Agent:
    """What one holds in memory, its own and a replica of rank 1's, and what it reports."""

    def __init__(self, directory: Path) -> None:
        self.held = {rank: memory_files("test") for rank in (0, 1)}
        self.said: list[dict[str, Any]] = []
        self.local = LocalCheckpoints(directory, 0, self.said.append)

    def write(self, rank: int, step: int, body: bytes, *, marked: bool = True) -> SnapshotFile:
        """As a worker does, or the peer's agent, into the older of the two."""
        files = [SnapshotFile(each) for each in self.held[rank]]
        file = min(files, key=lambda each: -1 if (f := each.found()) is None else f.step)
        file.begin(FIRST + len(body))
        os.pwrite(file.descriptor, body, FIRST)
        file.finish(b"{}", FIRST + len(body), step, to_disk=marked)
        return file

    def copy(self, rank: int, step: int, body: bytes) -> float:
        """Until it is on disk, or is not to be; the seconds that took."""
        file = self.write(rank, step, body)
        found = file.found()
        assert found is not None
        self.until(lambda: file.copied(found) is not None)
        seconds = file.copied(found)
        assert seconds is not None
        return seconds

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline
            self.local.look(self.held)
            time.sleep(0.002)

    def close(self) -> None:
        self.local.close(remove=False)
        while self.held:
            for each in self.held.popitem()[1]:
                os.close(each)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[[], Agent]]:
    started: list[Agent] = []

    def start() -> Agent:
        started.append(Agent(tmp_path / "run" / "host-0"))
        return started[-1]

    yield start
    for each in started:
        each.close()


def content(path: Path) -> tuple[int, bytes]:
    """Step and parts of a file that is whole."""
    with path.open("rb") as file:
        snapshot = SnapshotFile(file.fileno())
        found = snapshot.found()
        assert found is not None
        assert snapshot.header(found) == b"{}"
        return found.step, os.pread(file.fileno(), found.at - FIRST, FIRST)


def test_the_two_newest_that_are_marked_are_there_of_each_rank(agent: Any, tmp_path: Path):
    host, directory = agent(), tmp_path / "run" / "host-0"
    bodies = {(rank, step): os.urandom(9_000_000 + step) for rank in (0, 1) for step in (3, 5, 8)}
    for (rank, step), body in bodies.items():
        assert host.copy(rank, step, body) > 0
    left = {path.name: content(path) for path in directory.iterdir()}
    assert left == {
        f"{rank}-{step}": (step, body) for (rank, step), body in bodies.items() if step > 3
    }
    host.write(0, 9, b"state", marked=False)
    host.copy(1, 9, b"replica")
    assert {path.name for path in directory.iterdir()} == {"0-5", "0-8", "1-8", "1-9"}
    (directory / ".0-7.killed").write_bytes(b"half")
    host.close()
    another = agent()
    another.until(lambda: another.said)
    (found,) = another.said
    assert (found["kind"], found["steps"]) == ("on_disk", [5, 8, 9])
    another.copy(0, 11, b"state")
    assert {path.name for path in directory.iterdir()} == {"0-8", "0-11", "1-8", "1-9"}
    another.local.close(remove=True)
    assert not (tmp_path / "run").exists()


def test_one_that_is_replaced_while_it_is_copied_is_not_there_by_half(agent: Any, tmp_path: Path):
    host = agent()
    for step in range(1, 6):
        file = host.write(0, step, os.urandom(64 << 20))
        host.local.look(host.held)
        time.sleep(0.003)
        file.begin(FIRST)
    host.copy(0, 6, b"state")  # one after the other
    assert [each["written"] for each in host.said] in ([], [False, True])
    for path in (tmp_path / "run" / "host-0").iterdir():
        assert content(path)[0] == int(path.name.partition("-")[2])  # that is all of it, or none


def test_a_disk_that_refuses_is_named_once_and_tried_again(agent: Any, tmp_path: Path):
    (tmp_path / "run").write_bytes(b"a file where the directory would be")
    host = agent()
    for step in (1, 2, 3):
        assert host.copy(0, step, b"state") == 0.0
    (tmp_path / "run").unlink()
    assert host.copy(0, 4, b"state") > 0
    assert host.copy(0, 5, b"state") > 0
    off, on = host.said
    assert not off["written"]
    assert "have no room or fail: " in off["text"]
    assert on["written"]
    assert {path.name for path in (tmp_path / "run" / "host-0").iterdir()} == {"0-4", "0-5"}
