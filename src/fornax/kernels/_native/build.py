"""Find or compile the native CPU kernels on first use; keep what was compiled for later processes.

Each unit (one .cc file) is a library of its own. A wheel carries each compiled for the instruction
sets of `units.PREBUILT`, and the widest that the processor has is loaded. From a source install a
unit is compiled when an operation first asks for it; its folder is named after everything that
shapes it: sources, compiler, flags, the processor's features, jaxlib. It is written beside its
place and renamed into it, so concurrent processes only ever see whole files. Without a compiler the
kernels decline, and one notice says so.
"""

import ctypes
import functools
import hashlib
import logging
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jaxlib

from fornax.config import environment
from fornax.config.cxx import CxxError, compile_library, compiler, version
from fornax.kernels._native import units

__all__ = ["build_all", "compiled", "compiler", "has_features", "library_path", "unavailable"]

_log = logging.getLogger("fornax.kernels")

_PREBUILT = units.SOURCES / "prebuilt"

_locks = {unit: threading.Lock() for unit in units.UNITS}
_reasons: dict[str, str | None] = {}
"""Unit to why it cannot be used, or to None once it is registered."""


def unavailable(unit: str) -> str | None:
    """Build, load and register a unit's kernels; return None, or why they cannot be used.

    Done once, whichever thread asks first: XLA knows a call target by one library for as long as
    the process runs. The reason is logged once.
    """
    with _locks[unit]:
        if unit not in _reasons:
            _reasons[unit] = _register(unit)
        return _reasons[unit]


def _register(unit: str) -> str | None:
    try:
        library = _load(library_path(unit))
    except CxxError as error:
        _notice(str(error))
        return str(error)
    if not all(hasattr(library, target) for target in units.UNITS[unit]):
        return "the processor, or what the library was compiled for, has no instructions for it"
    for target in units.UNITS[unit]:
        jax.ffi.register_ffi_target(
            target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu"
        )
    return None


def build_all() -> None:
    """Build every unit that this machine has not built before, at once rather than in turn."""
    with ThreadPoolExecutor(len(units.UNITS)) as pool:
        list(pool.map(unavailable, units.UNITS))


@functools.cache
def _notice(reason: str) -> None:
    """Say a reason once, however many units it keeps from running."""
    _log.warning("native CPU kernels are off, XLA's are used instead: %s", reason)


@functools.cache
def _announce() -> None:
    """Say once why the first use of this machine takes longer."""
    _log.warning("compiling native CPU kernels for this processor; later runs reuse them")


def compiled() -> tuple[int, int]:
    """How many units have a library, the wheel's or one compiled before, and how many there are.

    Compiles none.
    """
    cxx = compiler()
    found = 0
    for unit in units.UNITS:
        try:
            there = _prebuilt(unit) is not None or (cxx is not None and _place(cxx, unit).exists())
        except CxxError:
            there = False
        found += there
    return found, len(units.UNITS)


def library_path(unit: str) -> Path:
    """Return a unit's library: the wheel's, or one compiled now if this machine has none yet."""
    prebuilt = _prebuilt(unit)
    if prebuilt is not None:
        return prebuilt
    cxx = compiler()
    if cxx is None:
        raise CxxError("no C++ compiler was found; install g++ or clang++, or set CXX")
    path = _place(cxx, unit)
    if not path.exists():
        _compile(cxx, unit, path)
    return path


def _place(cxx: str, unit: str) -> Path:
    """Return where this machine keeps a unit that it compiled."""
    return environment.cache_dir() / "native" / _fingerprint(cxx, unit) / f"{unit}.so"


def _prebuilt(unit: str) -> Path | None:
    """Return the wheel's library for this processor, or None if there is none."""
    if not _PREBUILT.is_dir():  # a source install
        return None
    path = _PREBUILT / str(units.instruction_set(_features())) / f"{unit}.so"
    return path if path.exists() else None


def has_features(*names: str) -> bool:
    """Return whether the processor has all of these features, by their names in /proc/cpuinfo."""
    return frozenset(names) <= _features()


@functools.cache
def _features() -> frozenset[str]:
    """Return the processor's features by their names in /proc/cpuinfo."""
    lines = _cpuinfo() if platform.machine() == "x86_64" else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _fingerprint(cxx: str, unit: str) -> str:
    """Name everything that a unit's library depends on."""
    digest = hashlib.sha256()
    for part in (version(cxx), *units.FLAGS, *units.NATIVE, _processor(), jaxlib.__version__):
        digest.update(part.encode() + b"\0")
    for name in (*units.HEADERS, f"{unit}.cc"):
        digest.update((units.SOURCES / name).read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _processor() -> str:
    """Name the processor's features, which `-march=native` compiles for."""
    wanted = ("model name", "flags", "Features", "CPU part")
    found = sorted({line for line in _cpuinfo() if line.startswith(wanted)})
    return "\n".join(found) or f"{platform.machine()} {platform.processor()}"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return []


def _compile(cxx: str, unit: str, path: Path) -> None:
    include = jax.ffi.include_dir()

    def command(output: str) -> list[str]:
        _announce()
        return units.compile_command(cxx, unit, output, include=include, march=units.NATIVE)

    compile_library(command, f"{unit}.cc", path)


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CxxError(
            f"{path} could not be loaded and was removed ({error}); start again to recompile it"
        ) from error
