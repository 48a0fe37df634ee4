"""Regions of shared memory: their bounds, and names that reach for something else."""

import contextlib
import os
from pathlib import Path

import pytest

from fornax.config import ServingCode, ServingError
from fornax.serving.v2.shared_memory import SharedMemory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "object").write_bytes(bytes(range(100)))
    (tmp_path / "secret").write_bytes(b"secret" * 100)
    return tmp_path / "shm"


def test_a_region_reads_and_writes_its_span(folder):
    memory = SharedMemory(folder=folder)
    memory.register("a", "/object", 50, 10)
    region = memory.get("a")
    assert region.read(5, 3) == bytes([15, 16, 17])
    region.write(48, b"xy")
    assert (folder / "object").read_bytes()[58:60] == b"xy"
    assert (folder / "object").stat().st_size == 100
    assert [each.name for each in memory.regions()] == ["a"]


@pytest.mark.parametrize(("offset", "size"), [(49, 2), (-1, 1), (0, 51), (2**62, 2**62), (0, -1)])
def test_a_span_outside_is_refused(folder, offset, size):
    memory = SharedMemory(folder=folder)
    memory.register("a", "object", 50)
    with pytest.raises(ServingError, match="outside of it"):
        memory.get("a").read(offset, size)


@pytest.mark.parametrize(
    "key", ["../secret", "/../secret", "link", "", "/", ".", "..", "a/b", "sem.x", "pipe", "x\0y"]
)
def test_nothing_but_a_plain_object_is_opened(folder, key):
    (folder / "link").symlink_to(folder.parent / "secret")
    (folder / "sem.x").write_bytes(b"1" * 10)
    os.mkfifo(folder / "pipe")
    with pytest.raises(ServingError) as refused:
        SharedMemory(folder=folder).register("a", key, 1)
    assert refused.value.code is ServingCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("size", "offset"), [(101, 0), (1, 100), (0, 0), (-1, 0), (1, -1), (True, 0), (2**70, 0)]
)
def test_a_region_beyond_its_object_is_refused(folder, size, offset):
    memory = SharedMemory(folder=folder)
    with pytest.raises(ServingError):
        memory.register("a", "object", size, offset)
    assert memory.regions() == []


def test_an_owner_that_truncates_costs_an_error_and_no_signal(folder):
    memory = SharedMemory(folder=folder)
    memory.register("a", "object", 100)
    os.truncate(folder / "object", 10)
    for use in (lambda: memory.get("a").read(5, 20), lambda: memory.get("a").write(5, bytes(20))):
        with pytest.raises(ServingError, match="truncated"):
            use()
    assert (folder / "object").stat().st_size == 10


def open_files(path):
    """How often this process has a file open."""
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of another thread, which closed it
            found += os.readlink(f"/proc/self/fd/{each}") == str(path)
    return found


def test_unregistering_ends_a_region_and_frees_its_name(folder):
    memory = SharedMemory(folder=folder)
    memory.register("a", "object", 100)
    region = memory.get("a")
    assert open_files(folder / "object") == 1
    with pytest.raises(ServingError, match="registered already"):
        memory.register("a", "object", 100)
    memory.unregister("a")
    memory.unregister("a")
    with pytest.raises(ServingError, match="unregistered while"):
        region.read(0, 1)
    with pytest.raises(ServingError, match="not registered"):
        memory.get("a")
    assert open_files(folder / "object") == 0


def test_it_may_be_switched_off_or_narrowed(folder):
    with pytest.raises(ServingError, match="switched off"):
        SharedMemory(enabled=False, folder=folder).register("a", "object", 1)
    narrow = SharedMemory(prefixes=["tensor_"], folder=folder)
    with pytest.raises(ServingError, match="must begin with tensor_"):
        narrow.register("a", "/object", 1)
    (folder / "tensor_1").write_bytes(b"1")
    narrow.register("a", "/tensor_1", 1)
