"""Programs in memory that outlives the process: what comes back, and what is not trusted."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fornax.train import program_memory
from fornax.train.program_memory import ProgramMemory

pytestmark = pytest.mark.usefixtures("optimized")

KEYS = [hashlib.sha256(bytes([n])).hexdigest() for n in range(4)]


@pytest.fixture
def path() -> Iterator[Path]:
    file = os.memfd_create("programs")
    yield Path(f"/proc/{os.getpid()}/fd/{file}")
    os.close(file)


def test_another_process_finds_what_was_kept(path: Path):
    memory = ProgramMemory(path)
    memory.keep(KEYS[0], b"first")
    memory.keep(KEYS[1], b"second" * 1000)
    memory.keep(KEYS[0], b"first, made again")
    memory.keep_plan({"config": "steps: 3\n"})
    memory.close()
    again = ProgramMemory(path)
    assert again.find(KEYS[0]) == (b"first, made again", False)
    assert again.find(KEYS[1]) == (b"second" * 1000, False)
    assert again.find(KEYS[2]) == (None, False)
    assert again.plan() == {"config": "steps: 3\n"}


def test_a_program_that_began_and_did_not_end_is_not_used_again(path: Path):
    memory = ProgramMemory(path)
    memory.keep(KEYS[0], b"deadly")
    memory.begin_trial(KEYS[0])
    assert ProgramMemory(path).find(KEYS[0]) == (None, True)
    memory.keep(KEYS[0], b"another")
    memory.begin_trial(KEYS[0])
    memory.end_trial(KEYS[0])
    memory.begin_trial(KEYS[0])  # it ran here once: a fault later is not its own
    assert ProgramMemory(path).find(KEYS[0]) == (b"another", False)


@pytest.mark.parametrize("at", [81, 60])
def test_a_damaged_program_is_refused_and_the_next_is_found(path: Path, at: int):
    memory = ProgramMemory(path)
    memory.keep(KEYS[0], b"a program")
    memory.keep(KEYS[1], b"one more")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    assert memory.find(KEYS[0]) == (None, True)
    assert memory.find(KEYS[1]) == (b"one more", False)


def test_what_a_kill_left_half_written_is_written_over(path: Path):
    memory = ProgramMemory(path)
    memory.keep(KEYS[0], b"a program")
    whole = os.stat(path).st_size
    memory.keep(KEYS[1], b"cut short")
    os.truncate(path, os.stat(path).st_size - 3)
    assert memory.find(KEYS[1]) == (None, False)
    memory.keep(KEYS[2], b"next")
    assert os.stat(path).st_size == whole + (whole - len(b"a program")) + len(b"next")
    assert memory.find(KEYS[0]) == (b"a program", False)
    assert memory.find(KEYS[2]) == (b"next", False)


def test_the_oldest_leave_when_there_are_too_many(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program_memory, "LIMIT_BYTES", 250)
    memory = ProgramMemory(path)
    for number, key in enumerate(KEYS):
        memory.keep(key, bytes([number]) * 100)
    assert [memory.find(key)[0] is not None for key in KEYS] == [False, False, True, True]
    assert memory.find(KEYS[3]) == (b"\x03" * 100, False)
