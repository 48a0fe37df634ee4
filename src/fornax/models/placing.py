"""Parameters from stored tensors: each part cut, converted and put on its devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from fornax.models.families import Tensor
from fornax.models.layout import Block

__all__ = ["Source", "put", "stacked", "write_layer", "zeros"]

Source = tuple[Tensor, Block]
"""A stored tensor, and what a parameter takes of it."""


def put(sources: list[Source], place: Any, dtype: np.dtype) -> jax.Array:
    """One parameter, or one layer of it, on its devices.

    Args:
      sources: where its values are, those of experts in order.
      place: its sharding.
      dtype: to convert to.
    """
    if sources[0][1].slot.expert is not None:
        return _put_experts(sources, place, dtype)
    (source,) = sources
    ours = _ours(*source)

    def cut(index: tuple[slice, ...] | None) -> np.ndarray:
        return np.array(ours[index if index is not None else ...], dtype, order="C")

    return jax.make_array_from_callback(ours.shape, place, cut).block_until_ready()


def _ours(stored: Tensor, block: Block) -> np.ndarray:
    """Our layout of what a parameter takes of a tensor."""
    return block.slot.from_stored(block.cut(stored.view()))


def _put_experts(sources: list[Source], place: Any, dtype: np.dtype) -> jax.Array:
    """See `put`. One expert's tensor is read at a time, once for all devices with parts of it."""
    shape = (len(sources), *sources[0][1].slot.shape)
    indices = place.addressable_devices_indices_map(shape).values()
    parts = {
        bounds: np.empty([stop - start for start, stop in bounds], dtype)
        for bounds in dict.fromkeys(_bounds(index, shape) for index in indices)
    }
    for number, source in enumerate(sources):
        holders = [bounds for bounds in parts if bounds[0][0] <= number < bounds[0][1]]
        if holders:
            ours = _ours(*source)
            for bounds in holders:
                part = tuple(slice(*each) for each in bounds[1:])
                parts[bounds][number - bounds[0][0]] = ours[part]
    return jax.make_array_from_callback(
        shape, place, lambda index: parts[_bounds(index, shape)]
    ).block_until_ready()


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Start and stop of each axis."""
    slices = index if index is not None else (slice(None),) * len(shape)
    return tuple(each.indices(size)[:2] for each, size in zip(slices, shape, strict=True))


def stacked(layer: jax.Array) -> Any:
    """Where a stack of such arrays lies: its layers are not divided."""
    place = layer.sharding
    if not isinstance(place, NamedSharding):
        return place
    return NamedSharding(place.mesh, PartitionSpec(None, *place.spec))


def zeros(layers: int, layer: jax.Array, place: object) -> jax.Array:
    """A stack of this many arrays like one."""
    shape = (layers, *layer.shape)
    return jax.jit(lambda: jnp.zeros(shape, layer.dtype), out_shardings=place)()


@functools.cache
def write_layer(place: NamedSharding | SingleDeviceSharding) -> Any:
    """A compiled, in-place write of one layer into a stack."""

    def write(stack: jax.Array, part: jax.Array, layer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, part, layer, 0)

    return jax.jit(write, donate_argnums=0, out_shardings=place)
