"""What a command that trains on CPUs is restarted with; the allocator in processes of its own."""

import os
import platform
import subprocess
import sys

import pytest

from fornax.config import allocation, allocator_library, cxx, environment

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or cxx.compiler() is None,
    reason="needs glibc and a C++ compiler",
)


def _run(program: str, *words: str, **variables: str) -> tuple[int, str]:
    """The process's number and what it printed."""
    others = {name: v for name, v in os.environ.items() if name not in ("GLIBC_TUNABLES",)}
    command = [sys.executable, "-c", program, *words]
    child = subprocess.Popen(command, env=others | variables, stdout=subprocess.PIPE, text=True)
    out, _ = child.communicate(timeout=240)
    assert child.returncode == 0
    return child.pid, out


_RESTARTED = """
import os, re, sys
from pathlib import Path
from fornax.config import allocation

allocation.restart_with_training_memory()
block = bytearray(64 << 20)
huge = re.search(r"AnonHugePages: +([0-9]+)", Path("/proc/self/smaps_rollup").read_text())[1]
loaded = "caching_allocator.so" in Path("/proc/self/maps").read_text()
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), huge, loaded, *sys.argv[1:])
"""


@pytest.mark.skipif(
    "glibc.malloc.hugetlb=1" not in allocation.training_memory().get("GLIBC_TUNABLES", ""),
    reason="Linux gives huge pages to all, or to none",
)
def test_a_command_that_trains_gets_huge_pages_and_the_allocator():
    """The process stays the same, with its arguments; who chose is left alone."""

    def restarted(**variables):
        pid, out = _run(_RESTARTED, "a b", "--c", **variables)
        same, tunables, huge, loaded, *words = out.split()
        assert (int(same), words) == (pid, ["a", "b", "--c"])
        return tunables, int(huge), loaded == "True"

    tunables, huge, loaded = restarted()
    assert tunables == "glibc.malloc.hugetlb=1"
    assert huge > 40 << 10  # KiB, of 64 MiB
    assert loaded
    assert restarted(GLIBC_TUNABLES="glibc.malloc.perturb=0")[0] == (
        "glibc.malloc.perturb=0:glibc.malloc.hugetlb=1"
    )
    assert restarted(GLIBC_TUNABLES="glibc.malloc.hugetlb=0", LD_PRELOAD="") == (
        *("glibc.malloc.hugetlb=0", 0),
        False,
    )


def test_training_asks_for_huge_pages_only_where_they_help(monkeypatch, tmp_path):
    mode = tmp_path / "enabled"
    monkeypatch.setattr(allocation, "_HUGE_PAGES_MODE", mode)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert allocation.training_memory() == {}
    for text, changes in (
        ("always [madvise] never", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
        ("[always] madvise never", {}),
        ("always madvise [never]", {}),
    ):
        mode.write_text(text)
        assert allocation.training_memory() == changes


@pytest.mark.parametrize("name", ["c++-that-is-not-there", "false"])
def test_without_a_compiler_that_works_nothing_is_preloaded(name, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", name)
    monkeypatch.setenv("FORNAX_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    allocation._allocator.cache_clear()
    assert "LD_PRELOAD" not in allocation.training_memory()
    allocation._allocator.cache_clear()
    assert not list(tmp_path.rglob("*.so*"))


_BLOCKS = """
import ctypes, os, random, resource, threading
from pathlib import Path

c = ctypes.CDLL(None)
for name in ("free", "malloc_usable_size", "realloc"):
    getattr(c, name).argtypes = [ctypes.c_void_p] + [ctypes.c_size_t] * (name == "realloc")
c.malloc_usable_size.restype = ctypes.c_size_t
c.realloc.restype = c.malloc.restype = ctypes.c_void_p
c.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
MIB = 1 << 20

def take(mib, write=True, align=64):
    to = ctypes.c_void_p()
    assert c.posix_memalign(ctypes.byref(to), align, int(mib * MIB)) == 0
    assert to.value % align == 0
    if write:
        ctypes.memset(to.value, 1, int(mib * MIB))
    return to.value

def status(name):
    return int(Path("/proc/self/status").read_text().split(name)[1].split()[0]) // 1024

def resident():
    return status("VmRSS:")

def most():
    return status("VmHWM:")  # ru_maxrss is no less than the parent's

base = resident()
"""


def _allocating(program: str) -> str:
    library = allocation._allocator()
    assert library is not None
    return _run(_BLOCKS + program, LD_PRELOAD=str(library))[1]


def test_a_freed_block_is_the_next_of_its_size():
    """Its pages stay: nothing is mapped, and what was written is still there."""
    _allocating("""
first = take(300)
ctypes.memset(first, 7, 300 * MIB)
c.free(first)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
second = take(299, write=False)
assert second == first and ctypes.string_at(second + 200 * MIB, 1) == b"\\7"
assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 20
c.free(second)
assert resident() - base > 290
third = take(200, write=False)  # too large a block for it
assert third != first
""")


def test_kept_blocks_never_add_to_the_most_that_was_in_use():
    """Of a size that grows, of two that alternate, of many at once."""
    _allocating("""
for mib in range(100, 400, 40):
    c.free(take(mib))
assert most() - base < 420
for mib in (380, 60) * 5:
    c.free(take(mib))
assert most() - base < 420
held = [take(40) for _ in range(8)]
for each in held:
    c.free(each)
c.free(take(350))
assert most() - base < 420
c.malloc_trim(0)
assert resident() - base < 40
""")


def test_blocks_of_two_programs_stay_where_both_were_in_use():
    _allocating("""
a, b = take(200), take(300)
c.free(a), c.free(b)
for _ in range(3):
    one, two = take(200), take(300)
    assert (one, two) == (a, b)
    c.free(one), c.free(two)
""")


def test_the_rest_of_malloc_knows_blocks():
    _allocating("""
block = take(40)
ctypes.memset(block, 5, 40 * MIB)
assert c.malloc_usable_size(block) >= 40 * MIB
block = c.realloc(block, 90 * MIB)
assert ctypes.string_at(block + 40 * MIB - 1, 1) == b"\\5"
block = c.realloc(block, 1000)
assert ctypes.string_at(block, 1000) == b"\\5" * 1000
assert 1000 <= c.malloc_usable_size(block) < 10_000
c.free(block)
small = take(1, align=4096)
c.free(small)
for align, size in ((3, 64), (24, 64 * MIB), (0, 64 * MIB)):
    assert c.posix_memalign(ctypes.byref(ctypes.c_void_p()), align, size) == 22  # EINVAL
assert c.posix_memalign(ctypes.byref(ctypes.c_void_p()), 64, 1 << 62) == 12  # ENOMEM
huge = take(33, align=1 << 24)
c.free(huge)
""")


def test_threads_and_forked_children_get_blocks_of_their_own():
    out = _allocating("""
def work(seed):
    chance, mine = random.Random(seed), []
    for turn in range(150):
        if mine and chance.random() < 0.5:
            at, size, mark = mine.pop(chance.randrange(len(mine)))
            for place in (0, size // 2, size - 1):
                assert ctypes.string_at(at + place, 1) == bytes([mark]), (seed, turn)
            c.free(at)
        else:
            size = chance.choice([1, 20, 33, 48, 64]) * MIB + chance.randrange(5000)
            at, mark = take(size / MIB, write=False), chance.randrange(256)
            for place in (0, size // 2, size - 1):
                ctypes.memset(at + place, mark, 1)
            mine.append((at, size, mark))
    done.append(seed)

done = []
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
for thread in threads:
    thread.start()
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads, which is meant
for _ in range(20):
    if (child := os.fork()) == 0:
        c.free(take(40))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
for thread in threads:
    thread.join()
print(sorted(done))
""")
    assert out.strip() == str(list(range(8)))


def test_the_library_needs_libc_alone():
    """It is loaded into every child of a command that trains, beside C++ libraries of all ages."""
    library = allocation._allocator()
    done = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True)
    assert "libstdc++" not in done.stdout
    assert "libgcc" not in done.stdout


def test_it_is_compiled_without_warnings(tmp_path):
    command = allocator_library.compile_command(str(cxx.compiler()), tmp_path / "library.so")
    done = subprocess.run(
        [*command, "-Wall", "-Wextra", "-Werror"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_only_cpus(monkeypatch, tmp_path):
    """Where another device may train, nothing changes."""
    monkeypatch.setattr(environment, "_ACCELERATORS", (str(tmp_path),))
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert allocation.training_memory() == {}
