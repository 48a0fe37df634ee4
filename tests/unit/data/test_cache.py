"""The cache of remote files: bounded, the least recently used leave, what is in use stays."""

import fcntl
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fornax.config.errors import DataError
from fornax.data.cache import FileCache
from fornax.data.files import Storage

# Gets each key named, of 40 bytes that spell it, waits for a line, checks what it got, and leaves.
_USER = """
import sys, time
from pathlib import Path
from fornax.config.errors import DataError
from fornax.data.cache import FileCache

root, limit, *keys = sys.argv[1:]
cache = FileCache(Path(root), int(limit))
def fetch(key, path):
    with path.open("wb") as file:
        for byte in (key * 40)[:40].encode():
            file.write(bytes([byte])); file.flush(); time.sleep(0.0005)
try:
    paths = {key: cache.get(key, "file", 40, lambda p, key=key: fetch(key, p)) for key in keys}
except DataError as error:
    print("refused", error, flush=True)
    sys.exit(3)
print("has", flush=True)
sys.stdin.readline()
for key, path in paths.items():
    assert path.read_bytes() == (key * 40)[:40].encode(), (key, path)
"""


def start(root: Path, limit: int, *keys: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", _USER, str(root), str(limit), *keys],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def use(root: Path, limit: int, *keys: str) -> None:
    """Get keys in a process that then ends."""
    process = start(root, limit, *keys)
    output, _ = process.communicate("\n", timeout=240)
    assert process.returncode == 0, output


def kept(root: Path) -> set[str]:
    return {path.parent.name for path in root.glob("*/file")}


def test_it_lies_in_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path))
    assert Storage().cache.root == tmp_path / "data"


@pytest.mark.slow
def test_the_least_recently_used_leaves(tmp_path: Path):
    use(tmp_path, 100, "a", "b")
    os.utime(tmp_path / "b", (1, 1))
    os.utime(tmp_path / "a", (0, 0))
    use(tmp_path, 100, "a")
    use(tmp_path, 100, "c")
    assert kept(tmp_path) == {"a", "c"}


@pytest.mark.slow
def test_what_a_live_process_uses_stays_until_it_is_killed(tmp_path: Path):
    holder = start(tmp_path, 100, "a", "b")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "has\n"
    refused = start(tmp_path, 100, "c")
    output, _ = refused.communicate("\n", timeout=240)
    assert refused.returncode == 3
    assert "refused file does not fit" in output
    assert "raise cache_gib" in output
    assert kept(tmp_path) == {"a", "b"}
    holder.kill()
    holder.communicate()
    use(tmp_path, 100, "c")
    assert "c" in kept(tmp_path)
    assert len(kept(tmp_path)) == 2


@pytest.mark.exhaustive
@pytest.mark.fault
def test_processes_that_come_and_go_never_hold_more_than_the_limit(tmp_path: Path):
    """The second wave needs all of the room that the first one filled."""
    limit = 8 * 40
    for wave in "xy":
        users = [start(tmp_path, limit, f"{wave}{u}", f"{wave}{u}+") for u in range(4)]
        deadline = time.monotonic() + 240
        while len(list(tmp_path.glob(f"{wave}*/file"))) < 8:
            assert held(tmp_path) <= limit
            assert time.monotonic() < deadline
        outputs = [user.communicate("\n", timeout=240)[0] for user in users]
        assert [user.returncode for user in users] == [0] * 4, outputs
    assert {key[0] for key in kept(tmp_path)} == {"y"}


def held(root: Path) -> int:
    """Bytes in the cache, at a moment at which nobody deletes."""
    with (root / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        files = [path for path in root.glob("*/*") if path.parent.name != ".leases"]
        sizes = []
        for path in files:
            with suppress(FileNotFoundError):  # a finished download, renamed meanwhile
                sizes.append(path.stat().st_size)
        return sum(sizes)


def test_a_failed_fetch_leaves_nothing(tmp_path: Path):
    def broken(path: Path) -> None:
        path.write_bytes(b"half")
        raise DataError("cut")

    cache = FileCache(tmp_path, None)
    with pytest.raises(DataError, match="cut"):
        cache.get("key", "file", 8, broken)
    assert not list((tmp_path / "key").iterdir())
    assert cache.get("key", "file", 4, lambda path: path.write_bytes(b"good") and None).is_file()
