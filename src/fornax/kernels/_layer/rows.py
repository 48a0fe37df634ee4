"""Rows of the table of embeddings.

XLA's CPU backend divides the reading of one row among threads by the size of the whole table, and
waking a thread takes 40 microseconds.

Legend: V rows of the table, D width, M rows taken.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fornax.config.errors import KernelError
from fornax.kernels._grouped.call import free_devices
from fornax.kernels._layer import native
from fornax.kernels.registry import Implementation, Operation, Work, current_platform, register

__all__ = ["TakeRowsCall", "take_rows", "take_rows_operation"]


@dataclass(frozen=True)
class TakeRowsCall:
    """One call: what implementations look at when they decline."""

    platform: str
    table_rows: int
    width: int
    rows: int
    table_dtype: str
    dtype: str
    devices: int
    """Over which XLA divides what is computed here."""


def take_rows(
    table_VD: jax.Array,
    index: jax.Array,
    *,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Return rows of a table. The gradient of a row is summed over its occurrences in float32.

    Args:
        table_VD: floating.
        index: int32 [...]; a negative one counts from the end, and one beyond gives NaN.
        dtype: of the result; None for the table's.
        implementation: name of one implementation to run, no other.

    Returns:
        x [..., D].

    Raises:
        KernelError: arguments of other axes or dtypes, or `implementation` cannot run the call.
    """
    if table_VD.ndim != 2 or not jnp.issubdtype(index.dtype, jnp.integer):
        raise KernelError(
            f"take_rows: table{table_VD.shape} and index{index.shape} {index.dtype} must be [V, D] "
            "and integers"
        )
    wanted = jnp.dtype(table_VD.dtype if dtype is None else dtype)
    return _take_rows(wanted, implementation, table_VD, index)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _take_rows(
    dtype: jnp.dtype, implementation: str | None, table_VD: jax.Array, index: jax.Array
) -> jax.Array:
    if native.is_open(table_VD, index) or index.dtype != jnp.int32:
        return _take(table_VD, index, dtype)
    call = TakeRowsCall(
        platform=current_platform(),
        table_rows=table_VD.shape[0],
        width=table_VD.shape[1],
        rows=math.prod(index.shape),
        table_dtype=jnp.dtype(table_VD.dtype).name,
        dtype=dtype.name,
        devices=free_devices(),
    )
    return take_rows_operation.choose(call, implementation).run(table_VD, index, dtype)


@_take_rows.defjvp
def _take_rows_jvp(
    dtype: jnp.dtype, _: str | None, primals: tuple, tangents: tuple
) -> tuple[jax.Array, jax.Array]:
    # A bfloat16 sum of ones ends at 256.
    table_VD, index = primals
    wide_VD = tangents[0].astype(jnp.promote_types(table_VD.dtype, jnp.float32))
    tangent = jnp.take(wide_VD, index, axis=0).astype(table_VD.dtype)
    return _take(table_VD, index, dtype), tangent.astype(dtype)


def _take(table_VD: jax.Array, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.take(table_VD, index, axis=0).astype(dtype)


def _native(table_VD: jax.Array, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
    index_M = index.reshape(-1)
    x = jax.ShapeDtypeStruct((*index_M.shape, table_VD.shape[1]), dtype)
    call = jax.ffi.ffi_call("fornax_take_rows", x, vmap_method="sequential")
    return call(table_VD, index_M).reshape(*index.shape, table_VD.shape[1])


def _benchmark(call: TakeRowsCall, run: Callable[..., jax.Array]) -> Callable[[], object]:
    table_VD = jnp.ones((call.table_rows, call.width), call.table_dtype)
    index_M = jnp.arange(call.rows, dtype=jnp.int32) % call.table_rows
    work = jax.jit(functools.partial(run, dtype=jnp.dtype(call.dtype)))
    return lambda: work(table_VD, index_M)


def _work(call: TakeRowsCall) -> Work:
    items = jnp.dtype(call.table_dtype).itemsize + jnp.dtype(call.dtype).itemsize
    return Work(flops=0.0, bytes=float(call.rows * call.width * items), dtype=call.dtype)


take_rows_operation: Operation[TakeRowsCall] = register(
    Operation(
        "take_rows",
        (
            Implementation(
                "native",
                _native,
                lambda call: native.declines(call.devices, call.table_dtype, call.dtype),
                platform="cpu",
            ),
            Implementation("xla", _take, lambda call: None),
        ),
        _benchmark,
        work=_work,
        call=TakeRowsCall,
    )
)
