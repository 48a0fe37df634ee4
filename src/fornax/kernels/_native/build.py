"""Compile the native CPU kernels on first use and keep the libraries for later processes.

Each unit (one .cc file) is a library of its own, compiled when an operation first asks for it. Its
folder is named after everything that shapes it: sources, compiler, flags, the processor's features,
jaxlib. It is written beside its place and renamed into it, so concurrent processes only ever see
whole files. Without a compiler the kernels decline, and one notice says so.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jaxlib

from fornax.config import environment

__all__ = ["build_all", "compiler", "library_path", "unavailable"]

_HEADERS = ("simd.h", "crew.h", "paged_block.h")
_UNITS = {
    "attention": ("fornax_attention_forward", "fornax_attention_backward"),
    "paged_attention": ("fornax_paged_attention", "fornax_paged_write"),
    "linear": ("fornax_linear",),
    "norm": ("fornax_rms_norm",),
}
"""Unit, named after its .cc file, to the call targets that it exports."""

_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-w",  # jaxlib's headers warn; ours are compiled with warnings in the tests
)
_TIMEOUT_S = 300

_log = logging.getLogger("fornax.kernels")

_locks = {unit: threading.Lock() for unit in _UNITS}
_reasons: dict[str, str | None] = {}
"""Unit to why it cannot be used, or to None once it is registered."""


class _BuildError(Exception):
    """Why there is no library, as half a sentence."""


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
    except _BuildError as error:
        _notice(str(error))
        return str(error)
    for target in _UNITS[unit]:
        jax.ffi.register_ffi_target(
            target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu"
        )
    return None


def build_all() -> None:
    """Build every unit that this machine has not built before, at once rather than in turn."""
    with ThreadPoolExecutor(len(_UNITS)) as pool:
        list(pool.map(unavailable, _UNITS))


@functools.cache
def _notice(reason: str) -> None:
    """Say a reason once, however many units it keeps from running."""
    _log.warning("native CPU kernels are off, XLA's are used instead: %s", reason)


def compiler() -> str | None:
    """Return the C++ compiler's path: CXX if set, else the first of c++, g++, clang++."""
    named = environment.cxx()
    if named is not None:
        return shutil.which(named)
    return next((found for c in ("c++", "g++", "clang++") if (found := shutil.which(c))), None)


def library_path(unit: str) -> Path:
    """Return a unit's library, compiling it if this machine has not done so before."""
    cxx = compiler()
    if cxx is None:
        raise _BuildError("no C++ compiler was found; install g++ or clang++, or set CXX")
    folder = environment.cache_dir() / "native" / _fingerprint(cxx, unit)
    path = folder / f"{unit}.so"
    if not path.exists():
        _compile(cxx, unit, path)
    return path


def _fingerprint(cxx: str, unit: str) -> str:
    """Name everything that a unit's library depends on."""
    digest = hashlib.sha256()
    for part in (_version(cxx), *_FLAGS, _processor(), jaxlib.__version__):
        digest.update(part.encode() + b"\0")
    for name in (*_HEADERS, f"{unit}.cc"):
        digest.update((Path(__file__).parent / name).read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _version(cxx: str) -> str:
    try:
        done = subprocess.run(
            [cxx, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise _BuildError(f"{cxx} --version failed: {error}") from error
    return done.stdout


def _processor() -> str:
    """Name the processor's features, which `-march=native` compiles for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(cxx: str, unit: str, path: Path) -> None:
    source = Path(__file__).parent / f"{unit}.cc"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so.tmp")
    except OSError as error:
        raise _BuildError(
            f"{path.parent} cannot be written ({error.strerror}); set FORNAX_CACHE_DIR"
        ) from error
    os.close(handle)
    command = [cxx, *_FLAGS, f"-I{jax.ffi.include_dir()}", str(source), "-o", temporary]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        os.replace(temporary, path)
    except subprocess.CalledProcessError as error:
        first = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr)
        raise _BuildError(f"{cxx} failed to compile {source.name}: {first.strip()}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise _BuildError(f"{cxx} failed to compile {source.name}: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _BuildError(
            f"{path} could not be loaded and was removed ({error}); start again to compile it anew"
        ) from error
