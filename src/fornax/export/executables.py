"""Programs compiled ahead of time: native code for exactly one kind of machine and compiler.

Such code can do anything, so a loader uses it only when it is told to trust the bundle; where the
machine, the compiler or its flags differ it is left alone, and the function is compiled.
"""

import functools
import hashlib
import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from fornax.config.environment import compiler_flags
from fornax.export import _exported
from fornax.export.manifest import Executable
from fornax.export.program import Memory

__all__ = ["DIRECTORY", "deserialize", "find", "key_of", "memory_of", "names"]

DIRECTORY = "executables"
_LOG = logging.getLogger("fornax.export")
_HARMLESS = "--xla_force_host_platform_device_count"


def key_of(device: Any) -> dict[str, str]:
    """What native code depends on: device, compiler, its flags, and the processor's features."""
    flags = [
        flag
        for value in compiler_flags().values()
        for flag in value.split()
        if not flag.startswith(_HARMLESS)
    ]
    optimized = not jax.config.read("jax_disable_most_optimizations")
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "platform_version": device.client.platform_version,
        "jaxlib": jaxlib.__version__,
        "flags": " ".join(sorted(flags)),
        "optimized": str(optimized).lower(),
        "processor": _processor(),
    }


@functools.cache
def _processor() -> str:
    """The machine's architecture, and a hash of the processor's model and features."""
    wanted = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = [platform.processor(), platform.platform()]
    else:
        lines = [line for line in lines if line.split("\t")[0].strip() in wanted]
    found = "\n".join(sorted(set(lines)))
    return f"{platform.machine()}-{hashlib.sha256(found.encode()).hexdigest()[:16]}"


def names(key: Mapping[str, str], functions: Mapping[str, int]) -> Iterator[tuple[str, int, str]]:
    """(function, number of its shape, file) for functions with so many shapes."""
    folder = hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:16]
    for function, shapes in functions.items():
        for number in range(shapes):
            yield function, number, f"{DIRECTORY}/{folder}/{function}.{number}.bin"


def find(
    executables: Sequence[Executable], function: str, dims: Mapping[str, int], device: Any
) -> Executable | None:
    """The executable for a function's bucket on this device; says so where all are for others."""
    candidates = [e for e in executables if e.function == function and dict(e.dims) == dict(dims)]
    key = key_of(device)
    for candidate in candidates:
        if dict(candidate.key) == key:
            return candidate
    if candidates:
        theirs = candidates[0].key
        differing = [name for name in key if theirs.get(name) != key[name]]
        _LOG.warning(
            "%s %s is compiled: the bundle's executable was made for another %s",
            function,
            dict(dims),
            ", ".join(f"{n} ({theirs.get(n)!r}, here {key[n]!r})" for n in differing),
        )
    return None


def deserialize(data: bytes, device: Any, what: str) -> Any | None:
    """A loaded executable, or None, saying so, where the runtime does not take it."""
    try:
        return _exported.load_executable(data, device)
    except Exception as error:
        _LOG.warning("%s is compiled: its executable does not load (%s)", what, error)
        return None


def memory_of(stats: Any) -> Memory:
    """What the compiler or the runtime says of a program's memory."""
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )
