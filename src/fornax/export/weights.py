"""The weights of a bundle: arrays in an OCDBT database, read in parallel into any sharding.

Each weight is a zarr array without compression, under its own path.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
import tensorstore as ts

from fornax.config.errors import BundleError
from fornax.export.dtypes import Shaped, numpy_dtype
from fornax.export.manifest import Weight
from fornax.export.placement import Placement

__all__ = ["DIRECTORY", "Weights", "read", "write"]

DIRECTORY = "weights"
_CHUNK = 8 << 20
_AHEAD = 1 << 30
_FILE = 64 << 20
"""About the size of a data file: several, so that all cores can hash them."""
_LOOK = 1.0
"""Seconds between looks at the files while they are waited for."""
_NATIVE = {"bool", "bfloat16", "complex64", "complex128"}

T = TypeVar("T")
_Part = tuple["ts.Future[np.ndarray]", list[jax.Device]]
"""A piece of a weight that is being read, and the devices that hold it."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """A bundle's weights on their devices: `params` by path, `bytes` of all devices together."""

    params: Mapping[str, jax.Array]

    @property
    def bytes(self) -> int:
        """Bytes on all devices of this process."""
        return sum(
            shard.data.nbytes
            for array in self.params.values()
            for shard in array.addressable_shards
        )


def describe(array: Shaped, axes: tuple[str | None, ...] | None) -> Weight:
    """How an array is stored."""
    dtype = np.dtype(array.dtype).name
    numpy_dtype(dtype)
    itemsize = np.dtype(array.dtype).itemsize
    native = dtype in _NATIVE or (dtype.startswith(("int", "uint", "float")) and hasattr(np, dtype))
    chunks = _chunks(tuple(array.shape), itemsize)
    return Weight(
        shape=tuple(array.shape),
        dtype=dtype,
        stored=dtype if native else "uint8",
        chunks=chunks if native else (*chunks, itemsize),
        axes=axes,
    )


def _chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Chunks of at most 8 MiB, cut along the first dimensions."""
    chunks = list(shape)
    for d, size in enumerate(shape):
        rest = itemsize * math.prod(shape[d + 1 :])
        if rest * size <= _CHUNK:
            break
        chunks[d] = max(1, min(size, _CHUNK // max(1, rest)))
    return tuple(max(1, c) for c in chunks)


def _spec(root: Path, name: str, weight: Weight) -> dict[str, object]:
    stored = weight.shape
    if weight.stored != weight.dtype:
        stored = (*stored, numpy_dtype(weight.dtype).itemsize)
    return {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{root / DIRECTORY}/"},
            "path": f"{name}/",
            "target_data_file_size": _FILE,
        },
        "dtype": weight.stored,
        "store_data_equal_to_fill_value": True,
        "metadata": {"shape": list(stored), "chunks": list(weight.chunks), "compressor": None},
    }


def write(root: Path, arrays: Mapping[str, object], weights: Mapping[str, Weight]) -> None:
    """Write all arrays below `root/weights` in one transaction.

    Raises:
      BundleError: when they cannot be written.
    """
    context = ts.Context()
    try:
        with ts.Transaction() as transaction:
            pending = [
                ts.open(_spec(root, name, w), create=True, context=context, transaction=transaction)
                .result()
                .write(_stored(arrays[name], w))
                for name, w in weights.items()
            ]
            for future in pending:
                future.result()
    except ValueError as error:  # what tensorstore raises for a full disk, for example
        raise BundleError(f"the weights cannot be written: {error}") from None


def _stored(array: object, weight: Weight) -> np.ndarray:
    host = np.asarray(array)
    if weight.stored == weight.dtype:
        return host
    return host.reshape((*host.shape, 1)).view(np.uint8)


def read(
    root: Path,
    weights: Mapping[str, Weight],
    placement: Placement,
    still: Callable[[], None] = lambda: None,
) -> Weights:
    """Read weights, each straight into the placement's sharding.

    Several are read at a time; no more than about a gigabyte of them waits in host memory. `still`
    is called now and then while they are waited for; what it raises ends that.

    Raises:
      BundleError: naming a weight that is missing or damaged.
      ShardingError: naming one that does not divide; nothing is read then.
    """
    shardings = {n: placement.sharding(n, w.shape, w.axes) for n, w in weights.items()}
    context = ts.Context()
    waiting: collections.deque[tuple[str, list[_Part]]] = collections.deque()
    held = 0
    params: dict[str, jax.Array] = {}
    for name, weight in weights.items():
        waiting.append((name, _start(root, name, weight, shardings[name], context, still)))
        held += _bytes(weight)
        while held > _AHEAD:
            done, parts = waiting.popleft()
            params[done] = _finish(root, done, weights[done], shardings[done], parts, still)
            held -= _bytes(weights[done])
    while waiting:
        done, parts = waiting.popleft()
        params[done] = _finish(root, done, weights[done], shardings[done], parts, still)
    return Weights(params)


def _bytes(weight: Weight) -> int:
    return math.prod(weight.shape) * numpy_dtype(weight.dtype).itemsize


def _finish(
    root: Path,
    name: str,
    weight: Weight,
    sharding: jax.sharding.Sharding,
    parts: list[_Part],
    still: Callable[[], None],
) -> jax.Array:
    """Wait for a weight's parts and put each on its devices."""
    dtype = numpy_dtype(weight.dtype)
    pieces = []
    with jax.enable_x64(True):
        for future, devices in parts:
            try:
                host = _result(future, still)
            except BundleError:
                raise
            except Exception as error:
                raise BundleError(
                    f"weight {name!r} in {root / DIRECTORY} cannot be read: {error}"
                ) from None
            if weight.stored != weight.dtype:
                host = host.view(dtype).reshape(host.shape[:-1])
            pieces += [jax.device_put(host, device) for device in devices]
        return jax.make_array_from_single_device_arrays(weight.shape, sharding, pieces, dtype=dtype)


def _result(future: ts.Future[T], still: Callable[[], None]) -> T:
    while True:
        try:
            return future.result(timeout=_LOOK)
        except TimeoutError:
            still()


def _start(
    root: Path,
    name: str,
    weight: Weight,
    sharding: jax.sharding.Sharding,
    context: ts.Context,
    still: Callable[[], None],
) -> list[_Part]:
    try:
        opening = ts.open(
            {**_spec(root, name, weight), "fill_missing_data_reads": False},
            open_mode=ts.OpenMode(open=True, assume_metadata=True),
            context=context,
        )
        store = _result(opening, still)
    except BundleError:
        raise
    except Exception as error:
        raise BundleError(
            f"weight {name!r} in {root / DIRECTORY} cannot be opened: {error}"
        ) from None
    shared: dict[tuple[tuple[int, int, int], ...], _Part] = {}
    for device, index in sharding.addressable_devices_indices_map(weight.shape).items():
        assert index is not None
        key = tuple(s.indices(n) for s, n in zip(index, weight.shape, strict=True))
        if key not in shared:
            piece = tuple(slice(start, stop) for start, stop, _ in key)
            shared[key] = (store[piece].read() if piece else store.read(), [])
        shared[key][1].append(device)
    return list(shared.values())
