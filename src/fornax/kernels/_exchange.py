"""Rows sent between the devices of a group, as many to each as there are: a ragged all-to-all.

Legend: P devices of the group, N rows held, R rows of the result, D width.
"""

import functools

import jax
import jax.numpy as jnp

from fornax.kernels.registry import current_platform

__all__ = ["exchange_rows"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def exchange_rows(
    x_ND: jax.Array, counts_PP: jax.Array, size: int, most: int, axes: tuple[str, ...]
) -> jax.Array:
    """Send each device of the group its rows -> y [size, D]; called inside `shard_map`.

    TPU and GPU send only the rows that there are (`lax.ragged_all_to_all`). XLA has no such
    collective for CPU, where each pair of devices exchanges `most` rows.

    Args:
      x_ND: rows of device 0 first, then those of device 1, and so on; what follows stays.
      counts_PP: int32 rows that the device of the line sends to that of the column; the same
        on all devices.
      size: R, at least the sum of any column. Rows beyond what was received are zeros.
      most: at least any of the counts.
      axes: mesh axes of the group.

    Returns:
      y [R, D]: the rows from device 0 first, then those from device 1, and so on. Its gradient
      travels back the same way; rows that were not sent get zeros.
    """
    send = _send_padded if current_platform() == "cpu" else _send_ragged
    return send(x_ND, counts_PP, size, most, axes)


def _forward(
    x_ND: jax.Array, counts_PP: jax.Array, size: int, most: int, axes: tuple[str, ...]
) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return exchange_rows(x_ND, counts_PP, size, most, axes), (counts_PP, len(x_ND))


def _backward(
    size: int, most: int, axes: tuple[str, ...], saved: tuple[jax.Array, int], dy_RD: jax.Array
) -> tuple[jax.Array, None]:
    counts_PP, rows = saved
    return exchange_rows(dy_RD, counts_PP.T, rows, most, axes), None


exchange_rows.defvjp(_forward, _backward)


def _starts(counts: jax.Array) -> jax.Array:
    """Return the sum of the counts before each, along the first axis."""
    return jnp.cumsum(counts, axis=0) - counts


def _send_ragged(
    x_ND: jax.Array, counts_PP: jax.Array, size: int, most: int, axes: tuple[str, ...]
) -> jax.Array:
    own = jax.lax.axis_index(axes)
    return jax.lax.ragged_all_to_all(
        x_ND,
        jnp.zeros((size, x_ND.shape[1]), x_ND.dtype),
        _starts(counts_PP[own]),
        counts_PP[own],
        _starts(counts_PP)[own],
        counts_PP[:, own],
        axis_name=axes,
    )


def _send_padded(
    x_ND: jax.Array, counts_PP: jax.Array, size: int, most: int, axes: tuple[str, ...]
) -> jax.Array:
    own, group = jax.lax.axis_index(axes), len(counts_PP)
    first_P1 = _starts(counts_PP[own])[:, None]
    parts_PmD = x_ND.at[first_P1 + jnp.arange(most)].get(mode="fill", fill_value=0)
    parts_PmD = jax.lax.all_to_all(parts_PmD, axes, 0, 0)
    received_P = counts_PP[:, own]
    rows_R = jnp.arange(size)
    source_R = jnp.searchsorted(jnp.cumsum(received_P), rows_R, side="right")
    within_R = rows_R - _starts(received_P)[jnp.minimum(source_R, group - 1)]
    index_R = jnp.where(source_R < group, source_R * most + within_R, group * most)
    flat_XD = parts_PmD.reshape(group * most, -1)
    return flat_XD.at[index_R].get(mode="fill", fill_value=0)
