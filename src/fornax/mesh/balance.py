"""Balanced order of the length: each device has as many early tokens of a row as late ones.

A causal query sees the keys before it, so that of n devices that divide a row's length in order the
last one would compute 2 - 1/n times the mean. Here the row is cut into 2 n parts and device i has
parts i and 2 n - 1 - i, as in Llama 3 (Meta 2024, section 3.3.2).

Legend: n devices that divide the length, C tokens of a part.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fornax.mesh.rules import (
    axes_in_use,
    constrain,
    current_rules,
    mesh_in_use,
    partition_spec,
    shards,
)

__all__ = [
    "balance_ids",
    "balance_length",
    "balance_routed",
    "balanced_order",
    "balances",
    "gather_balanced",
    "restore_length",
]

_LANES = 128
"""What a kernel's blocks of tokens are multiples of."""


def balances(length: int, devices: int) -> bool:
    """Whether rows of `length` tokens are balanced over that many devices.

    Not where the parts would be no whole blocks of a kernel, and a device's tokens are.
    """
    if devices == 1 or length % (2 * devices):
        return False
    own = length // devices
    return own % _LANES != 0 or own % (2 * _LANES) == 0


def balanced_order(devices: int) -> np.ndarray:
    """Which part of a row lies where: int [2 n], two parts per device."""
    first = np.arange(devices)
    return np.stack([first, 2 * devices - 1 - first], axis=1).reshape(-1)


def balance_ids(ids_BT: jax.Array) -> jax.Array:
    """Ids or positions of rows in order [B, T], in balanced order over the mesh in use."""
    B, T = ids_BT.shape
    order = balanced_order(shards(axes_in_use("length")))
    ids_BPC = ids_BT.reshape(B, len(order), -1)
    return constrain(ids_BPC[:, order].reshape(B, T), ("batch", "length"))


def balance_routed(x_LBTK: jax.Array) -> jax.Array:
    """Integers of each layer and token in order [L, B, T, K], in balanced order."""
    L, B, T, K = x_LBTK.shape
    order = balanced_order(shards(axes_in_use("length")))
    x_LBPCK = x_LBTK.reshape(L, B, len(order), -1, K)
    return constrain(x_LBPCK[:, :, order].reshape(L, B, T, K), (None, "batch", "length", None))


def restore_length(x_BTD: jax.Array) -> jax.Array:
    """Activations [B, T, D] in balanced order, back in order: two halves of a device are sent."""
    return _exchange(x_BTD, back=True)


def balance_length(x_BTD: jax.Array) -> jax.Array:
    """Activations [B, T, D] of rows in order, in balanced order."""
    return _exchange(x_BTD, back=False)


def gather_balanced(x_BTKH: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The whole length, in order, of what lies in balanced order; within `shard_map`.

    Args:
      x_BTKH: a device's own tokens along the second dimension.
      axes: the mesh axes that divide the length.
    """
    early, late = jnp.split(x_BTKH, 2, axis=1)
    early = jax.lax.all_gather(early, axes, axis=1, tiled=True)
    late_BnC = jnp.flip(jax.lax.all_gather(late, axes, axis=1), axis=1)
    return jnp.concatenate([early, late_BnC.reshape(early.shape)], axis=1)


def _exchange(x_BTD: jax.Array, *, back: bool) -> jax.Array:
    axes = axes_in_use("length")
    spec = partition_spec(("batch", "length", "activation_embed"), current_rules())
    return jax.shard_map(
        functools.partial(_send, axes=axes, devices=shards(axes), back=back),
        mesh=mesh_in_use(),
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )(x_BTD)


def _send(x_BTD: jax.Array, *, axes: tuple[str, ...], devices: int, back: bool) -> jax.Array:
    """Send each part to its device: those of even numbers, then those of odd ones.

    Of parts i and 2 n - 1 - i one is even. In order part p lies on device p // 2, the even ones
    first.
    """
    swapped = jax.lax.axis_index(axes) % 2 == 1
    evens, odds = [], []
    for device in range(devices):
        parts = device, 2 * devices - 1 - device
        even, odd = parts if device % 2 == 0 else parts[::-1]
        evens.append((device, even // 2))
        odds.append((device, odd // 2))
    first, second = jnp.split(x_BTD, 2, axis=1)
    if back:
        first, second = _swap(first, second, swapped)
        moves = evens, odds
    else:
        moves = [[(to, of) for of, to in pairs] for pairs in (evens, odds)]
    first = jax.lax.ppermute(first, axes, moves[0])
    second = jax.lax.ppermute(second, axes, moves[1])
    if not back:
        first, second = _swap(first, second, swapped)
    return jnp.concatenate([first, second], axis=1)


def _swap(one: jax.Array, other: jax.Array, swapped: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.where(swapped, other, one), jnp.where(swapped, one, other)
