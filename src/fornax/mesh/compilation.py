"""Compiled programs as bytes: what they depend on, and how jax is given one in place of compiling.

jax has no public way to use an executable that was compiled elsewhere for a program that it has
lowered. It looks into its compilation cache before it compiles, and for one program `compile_as`
is that cache. What the cache holds, an image, is opaque here: jax's own format.
"""

import contextlib
import functools
import hashlib
import json
import platform
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import jax
import jaxlib
import numpy as np
from jax._src import compilation_cache as jax_cache
from jax.experimental.compilation_cache import compilation_cache

from fornax.config.environment import compiler_flags

__all__ = ["Made", "compile_as", "compiled_anew", "machine_key", "program_key"]

_HARMLESS = "--xla_force_host_platform_device_count"
_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"
_NOT_LOADED = "Error reading persistent compilation cache entry"
_lock = threading.Lock()


def machine_key(device: jax.Device) -> dict[str, str]:
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


def program_key(lowered: jax.stages.Lowered, devices: np.ndarray) -> str:
    """What an executable depends on, as 64 hexadecimal digits; the same in all its processes.

    The program (StableHLO with shardings and donation), the machine's kind, jax's version, and the
    mesh's devices with the processes that hold them, in order. The rank is not in it: on CPU the
    executable of one process runs in the others (a test runs it there), and on GPU and TPU jax's
    own cache gives them that of process 0.

    Args:
      lowered: the program.
      devices: of its mesh.
    """
    facts = {
        **machine_key(devices.flat[0]),
        "jax": jax.__version__,
        "devices": [[device.id, device.process_index] for device in devices.flat],
        "processes": jax.process_count(),
    }
    digest = hashlib.sha256(json.dumps(facts).encode())
    digest.update(lowered.as_text().encode())
    return digest.hexdigest()


class Made(Protocol):
    """What `compile_as` leaves."""

    image: bytes | None
    """The executable as jax's cache keeps it. None where jax keeps none: of what processes other
    than the first compile, and of programs that call back into Python."""
    loaded: bool
    """Whether it was loaded, from the image that was given or from jax's own cache."""


def compile_as(
    lowered: jax.stages.Lowered, image: bytes | None, *, anew: bool = False
) -> tuple[jax.stages.Compiled, Made]:
    """Compile a program, or load it from an image of it; one that does not load is compiled.

    Args:
      lowered: the program.
      image: of an earlier call, in any process of a group that agrees in `program_key`. It is
        native code, which can do anything. None compiles, or reads jax's own cache.
      anew: not to read jax's own cache.
    """
    with (
        _lock,
        _in_place_of_cache(image, anew=anew) as program,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        compiled = lowered.compile()
    for each in caught:
        if not str(each.message).startswith(_NOT_LOADED):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        elif program.loaded:  # it was compiled, and jax gives nothing that could be kept
            program.loaded, program.image = False, None
    return compiled, program


class _Program:
    """One program as jax's compilation cache, for the thread that made it."""

    def __init__(
        self,
        base: jax_cache.CacheInterface | None,
        image: bytes | None,
        least: float,
        *,
        anew: bool,
    ) -> None:
        self._base, self._given, self._least, self._anew = base, image, least, anew
        self._thread = threading.get_ident()
        self._asked_at = 0.0
        self.image: bytes | None = None
        self.loaded = False

    def get(self, key: str) -> bytes | None:
        if threading.get_ident() != self._thread:
            return None if self._base is None else self._base.get(key)
        self._asked_at = time.monotonic()
        self.image = self._given
        if self.image is None and self._base is not None and not self._anew:
            self.image = self._base.get(key)
        self.loaded = self.image is not None
        return self.image

    def put(self, key: str, value: bytes) -> None:
        """Called by process 0 with what it compiled."""
        if threading.get_ident() != self._thread:
            return
        self.image, self.loaded = value, False
        if self._base is not None and time.monotonic() - self._asked_at >= self._least:
            self._base.put(key, value)


@contextlib.contextmanager
def _in_place_of_cache(image: bytes | None, *, anew: bool) -> Iterator[_Program]:
    enabled = jax.config.values["jax_enable_compilation_cache"]
    base = jax_cache._get_cache(jax.local_devices()[0].client) if enabled else None
    names = ("_cache", "_cache_initialized", "_cache_checked", "_cache_used")
    before = {name: getattr(jax_cache, name) for name in names}
    least = jax.config.values[_LEAST_SECONDS]
    program = _Program(base, image, least, anew=anew)
    jax.config.update(_LEAST_SECONDS, 0.0)
    jax_cache._cache = program  # pyrefly: ignore[bad-assignment]
    jax_cache._cache_initialized = jax_cache._cache_checked = jax_cache._cache_used = True
    try:
        yield program
    finally:
        jax.config.update(_LEAST_SECONDS, least)
        for name, value in before.items():
            setattr(jax_cache, name, value)


@contextlib.contextmanager
def compiled_anew(wanted: bool) -> Iterator[None]:
    """Compile everything in this process meanwhile, if `wanted`: nothing is read from jax's cache.

    What was read from it cannot be serialized: the result loads, and fails when it runs (jaxlib
    0.10.2: `Function … not found`).
    """
    if not wanted:
        yield
        return
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether it is in use is asked once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
