"""A tree of arrays to a directory and back: Orbax writes it, TensorStore reads what Orbax wrote."""

import itertools
import logging
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from fornax.config.errors import CheckpointError
from fornax.mesh import clear_caches, hosts

__all__ = [
    "check_fits",
    "count_alike",
    "forget_group",
    "load_arrays",
    "save_arrays",
    "table",
]

_SHOWN = 5
_NAME = "state"
_READERS = 16
"""Arrays that are read at a time."""
_ALIGNMENT = 64
"""Bytes to which XLA aligns the buffers of a CPU; it copies from others."""


def table(state: object) -> dict[str, tuple[tuple[int, ...], str]]:
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


def save_arrays(directory: Path, state: object, *, timeout_seconds: int) -> Any:
    """Start saving; the result's `.result()` blocks until Orbax has committed the directory."""
    from orbax.checkpoint import v1 as ocp

    logging.getLogger("absl").addFilter(_not_raised_again)
    context = ocp.Context()
    context.async_options.timeout_secs = timeout_seconds
    # Trained weights hardly compress, and compressing them is what makes a save slow.
    context.array.saving.use_compression = False
    with context:
        return ocp.save_checkpointables_async(str(directory), {_NAME: _staged(state)})


def _staged(state: object) -> Any:
    """The state in memory that no program owns, for what a CPU's devices hold.

    Orbax writes such arrays from where they are. The next step could not reuse them meanwhile, and
    would wait for the kernel to hand out as much memory again, in pages of 4 KiB; a copy made here,
    by all cores and in large pages, takes a fraction of that. Arrays of other devices stay as they
    are: Orbax copies them before it returns.
    """
    leaves, structure = jax.tree.flatten(state)
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="stage") as pool:
        return structure.unflatten(pool.map(_copied, leaves))


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if next(iter(leaf.sharding.device_set)).platform != "cpu":
        return leaf
    pieces: dict[str, np.ndarray] = {}
    shards = []
    for shard in leaf.addressable_shards:
        place = str(shard.index)
        if place not in pieces:
            pieces[place] = _aligned(shard.data.shape, leaf.dtype)
            np.copyto(pieces[place], np.asarray(shard.data))
        shards.append(jax.device_put(pieces[place], shard.device))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def forget_group() -> None:
    """Have Orbax forget the group of processes that this one leaves, and its devices.

    Its caches hold the client of the coordination service and shardings. It numbers the operations
    of a process, and the names at which processes meet carry the number: a process that stays must
    count from where a new one does.
    """
    if "orbax.checkpoint" not in sys.modules:
        return
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

    clear_caches("orbax.")
    OperationIdGenerator._operation_id_counter = itertools.count()
    OperationIdGenerator.next_operation_id()


def count_alike() -> None:
    """Have all processes number their next save alike, after one in which some did not begin."""
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

    last = hosts.most(int(OperationIdGenerator.get_current_operation_id()))
    OperationIdGenerator._operation_id_counter = itertools.count(last)
    OperationIdGenerator.next_operation_id()


def load_arrays(directory: Path, abstract: object) -> Any:
    """Load a tree like `abstract`, each array in the sharding and dtype it asks for.

    Each process reads what its devices hold, several arrays at a time, from mapped files straight
    into the buffers that devices of a CPU take over: one copy of each byte.

    Raises:
      CheckpointError: with several processes, for a leaf without a sharding.
      ValueError: of TensorStore, for an array that is not there or cannot be read.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    wanted = [(jax.tree_util.keystr(p, simple=True, separator="."), leaf) for p, leaf in leaves]
    context = ts.Context({"file_io_mode": {"mode": "memmap"}})
    with ThreadPoolExecutor(_READERS, thread_name_prefix="restore") as pool:
        arrays = pool.map(lambda pair: _load(directory, context, *pair), wanted)
        return structure.unflatten(arrays)


def _load(directory: Path, context: Any, name: str, leaf: Any) -> jax.Array:
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    sharding = _sharding(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _load_key(directory, context, name, leaf, sharding)
    return _load_array(directory, context, name, leaf, sharding)


def _load_key(
    directory: Path, context: Any, name: str, leaf: Any, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Random keys are stored as their data: unsigned integers with one dimension more."""
    implementations: list[Any] = []

    def data(key: jax.Array) -> jax.Array:
        implementations.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    stored = jax.eval_shape(data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    if isinstance(sharding, jax.sharding.NamedSharding):
        padding = [None] * (len(leaf.shape) - len(sharding.spec) + 1)
        spec = jax.sharding.PartitionSpec(*sharding.spec, *padding)
        sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
    words = _load_array(directory, context, name, stored, sharding)
    return jax.random.wrap_key_data(words, impl=implementations[0])


def _load_array(
    directory: Path, context: Any, name: str, leaf: Any, sharding: jax.sharding.Sharding
) -> jax.Array:
    kvstore = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{directory / _NAME}/"},
        "path": f"{name}/",
    }
    spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
    store = ts.open(spec, open=True, context=context).result()
    pieces: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}
    shards = []
    for device, index in sharding.devices_indices_map(tuple(leaf.shape)).items():
        if device.process_index != jax.process_index():
            continue
        place = tuple(s.indices(n) for s, n in zip(index, leaf.shape, strict=True))
        if place not in pieces:
            part = store[index] if index else store
            piece = _aligned(part.shape, store.dtype.numpy_dtype)
            ts.array(piece).write(part.translate_to[(0,) * part.rank]).result()
            pieces[place] = piece.astype(leaf.dtype, copy=False)
        shards.append(jax.device_put(pieces[place], device))
    return jax.make_array_from_single_device_arrays(tuple(leaf.shape), sharding, shards)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of anything, where a device of a CPU can use its memory as it is."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    """Where a leaf asks to go; one that does not say goes to the first device."""
    if getattr(leaf, "sharding", None) is not None:
        return leaf.sharding
    if jax.process_count() > 1:
        raise CheckpointError(
            f"an array of shape {tuple(leaf.shape)} has no sharding, and with "
            f"{jax.process_count()} processes it must say where it goes; give every leaf of the "
            "abstract state a NamedSharding"
        )
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def check_fits(
    abstract: object, saved: Mapping[str, tuple[tuple[int, ...], str]], *, partial: bool, where: str
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
