"""Names of the input pipeline's stages in profiles."""

import contextlib
import sys
from contextlib import AbstractContextManager

__all__ = ["stage"]


def stage(name: str) -> AbstractContextManager[object]:
    """Within the block a profile shows `input/<name>` in this thread.

    A process that has not imported jax, as data workers have not, has no profiler.
    """
    profiler = sys.modules.get("jax.profiler")
    if profiler is None:
        return contextlib.nullcontext()
    return profiler.TraceAnnotation(f"input/{name}")
