"""Programs compiled ahead of time: native code for exactly one kind of machine and compiler.

Such code can do anything, so a loader uses it only when it is told to trust the bundle; where the
machine, the compiler or its flags differ it is left alone, and the function is compiled.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from fornax.export import _exported
from fornax.export.manifest import Executable
from fornax.export.program import Memory
from fornax.mesh.compilation import machine_key

__all__ = ["DIRECTORY", "deserialize", "find", "memory_of", "names"]

DIRECTORY = "executables"
_LOG = logging.getLogger("fornax.export")


def names(key: Mapping[str, str], functions: Mapping[str, int]) -> Iterator[tuple[str, int, str]]:
    """(function, number of its shape, file) for functions with this many shapes."""
    folder = hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:16]
    for function, shapes in functions.items():
        for number in range(shapes):
            yield function, number, f"{DIRECTORY}/{folder}/{function}.{number}.bin"


def find(
    executables: Sequence[Executable], function: str, dims: Mapping[str, int], device: jax.Device
) -> Executable | None:
    """The executable for a function's bucket on this device; says so where all are for others."""
    candidates = [e for e in executables if e.function == function and dict(e.dims) == dict(dims)]
    key = machine_key(device)
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


def deserialize(data: bytes, device: jax.Device, what: str) -> Any | None:
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
