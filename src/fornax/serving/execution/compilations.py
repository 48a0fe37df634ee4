"""What XLA compiles in this process: where compiled programs are kept, and which came too late."""

import threading
from typing import Protocol

import jax
import jax.monitoring

from fornax.config import environment

__all__ = ["Compilations", "compilations", "keep_compiled"]

_COMPILED = "/jax/core/compile/backend_compile_duration"


def keep_compiled() -> None:
    """Let JAX keep compiled programs on disk, unless the user has chosen where, or not to."""
    chosen = jax.config.values["jax_compilation_cache_dir"]
    if chosen is None and environment.compilation_cache_enabled():
        jax.config.update("jax_compilation_cache_dir", str(environment.cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class Answering(Protocol):
    """What computes answers, and must find all it needs compiled."""

    late: int


class Compilations(threading.local):
    """What this thread answers for at the moment; None while it may compile."""

    answering: Answering | None = None


compilations = Compilations()
"""Set `answering` for as long as a thread computes answers: what is compiled then is `late`."""


def _heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
    del duration_secs, kwargs
    if event == _COMPILED and compilations.answering is not None:
        compilations.answering.late += 1


jax.monitoring.register_event_duration_secs_listener(_heard)
