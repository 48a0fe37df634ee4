"""The meeting with Orbax: a tree of arrays to a directory and back."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fornax.config.errors import CheckpointError

__all__ = ["check_fits", "load_arrays", "save_arrays", "table"]

_SHOWN = 5
_NAME = "state"


def table(state: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each array of a tree, by path."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _shape_and_dtype(leaf)
        for path, leaf in leaves
    }


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], str]:
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return tuple(array.shape), str(array.dtype)


def _not_raised_again(record: logging.LogRecord) -> bool:
    """Drops the traceback that Orbax prints of a background failure, which `save` then raises."""
    return not (record.exc_info and "orbax" in record.pathname)


def _context(timeout_seconds: int) -> Any:
    from orbax.checkpoint import v1 as ocp

    logging.getLogger("absl").addFilter(_not_raised_again)
    context = ocp.Context()
    context.async_options.timeout_secs = timeout_seconds
    # Trained weights hardly compress, and compressing them is what makes a save slow.
    context.array.saving.use_compression = False
    return context


def save_arrays(directory: Path, state: Any, *, timeout_seconds: int) -> Any:
    """Start saving; the result's `.result()` blocks until Orbax has committed the directory."""
    from orbax.checkpoint import v1 as ocp

    with _context(timeout_seconds):
        return ocp.save_checkpointables_async(str(directory), {_NAME: state})


def load_arrays(directory: Path, abstract: Any, *, partial: bool, timeout_seconds: int) -> Any:
    """Load a tree like `abstract`, each array in the sharding and dtype it asks for."""
    from orbax.checkpoint import v1 as ocp

    context = _context(timeout_seconds)
    context.pytree.loading.partial_load = partial
    with context:
        wanted = jax.tree.map(_with_sharding, abstract)
        return ocp.load_checkpointables(str(directory), {_NAME: wanted})[_NAME]


def _with_sharding(leaf: Any) -> Any:
    """Orbax needs to be told where each array goes."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    if getattr(leaf, "sharding", None) is not None:
        return leaf
    if jax.process_count() > 1:
        raise CheckpointError(
            f"an array of shape {tuple(leaf.shape)} has no sharding, and with "
            f"{jax.process_count()} processes it must say where it goes; give every leaf of the "
            "abstract state a NamedSharding"
        )
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)


def check_fits(
    abstract: Any, saved: Mapping[str, tuple[tuple[int, ...], str]], *, partial: bool, where: str
) -> None:
    """Compare what is asked for with what was saved, before any array is read.

    Raises:
      CheckpointError: naming arrays that are missing, left over, of another shape or another kind.
    """
    wanted = table(abstract)
    missing = [name for name in wanted if name not in saved]
    extra = [] if partial else [name for name in saved if name not in wanted]
    other = [
        f"{name} (saved {saved[name][0]} {saved[name][1]}, asked {shape} {dtype})"
        for name, (shape, dtype) in wanted.items()
        if name in saved and not _fits(saved[name], (shape, dtype))
    ]
    problems = [
        f"{what}: {', '.join(names[:_SHOWN])}" + (" and more" if len(names) > _SHOWN else "")
        for what, names in (
            ("not in the checkpoint", missing),
            ("only in the checkpoint", extra),
            ("different", other),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{where} holds another state than asked for; {'; '.join(problems)}. Restore with the "
            "config it was saved with"
        )


def _fits(saved: tuple[tuple[int, ...], str], asked: tuple[tuple[int, ...], str]) -> bool:
    return saved[0] == asked[0] and _kind(saved[1]) == _kind(asked[1])


def _kind(dtype: str) -> str:
    """Floats restore as any float, integers as any integer, keys as the same keys."""
    if dtype.startswith(("float", "bfloat")):
        return "float"
    return "int" if dtype.startswith(("int", "uint")) else dtype
