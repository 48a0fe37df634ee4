"""How a process that trains on CPUs gets its memory: in huge pages, from an allocator that keeps
large blocks.

Both are read when a process starts. XLA takes a step's temporaries again each step, gigabytes of
them: mapped and zeroed by 4 KiB they cost a seventh of the processor time of a step of 36M
parameters, and in huge pages up to a tenth of one of 150M (docs/guides/kernels.md).
"""

import functools
import hashlib
import platform
from pathlib import Path

from fornax.config import allocator_library, environment
from fornax.config.cxx import CxxError, compile_library, compiler

__all__ = ["restart_with_training_memory", "training_memory"]

_HUGE_PAGES_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def training_memory() -> dict[str, str]:
    """What a process that trains on CPUs needs in its environment; nothing where the user chose,
    where it trains elsewhere, or where the C library is not glibc.

    Huge pages are asked for where Linux gives them to those that ask. Without a C++ compiler, or a
    wheel that has the allocator, there is no allocator.
    """
    if not environment.trains_on_cpu() or platform.libc_ver()[0] != "glibc":
        return {}
    return {**_huge_pages(), **environment.preloading(_allocator())}


def restart_with_training_memory() -> None:
    """Run this command from its start with `training_memory`; returns where nothing changes."""
    changes = training_memory()
    if changes:
        environment.restart(changes)


def _huge_pages() -> dict[str, str]:
    try:
        on_request = "[madvise]" in _HUGE_PAGES_MODE.read_text()
    except OSError:
        return {}
    return environment.with_tunable("glibc.malloc.hugetlb", "1") if on_request else {}


@functools.cache
def _allocator() -> Path | None:
    """The library: the wheel's, or one compiled now if this machine has none yet."""
    if allocator_library.SHIPPED.exists():
        return allocator_library.SHIPPED
    cxx = compiler()
    if cxx is None:
        return None
    source = allocator_library.SOURCE
    words = " ".join(allocator_library.compile_command(cxx, ""))
    key = hashlib.sha256(source.read_bytes() + f"{words} {platform.machine()}".encode())
    path = environment.cache_dir() / "native" / key.hexdigest()[:24] / "caching_allocator.so"
    command = functools.partial(allocator_library.compile_command, cxx)
    try:
        if not path.exists():
            compile_library(command, source.name, path)
    except CxxError:
        return None
    return path
