"""The likeliest token of each row of logits.

Legend: M rows, V vocabulary, G x L the vocabulary in lanes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError
from fornax.kernels import reductions
from fornax.kernels._grouped.call import free_devices
from fornax.kernels._layer import native
from fornax.kernels.registry import Implementation, Operation, Work, current_platform, register

__all__ = ["ArgmaxCall", "argmax", "argmax_in_lanes", "argmax_operation"]


@dataclass(frozen=True)
class ArgmaxCall:
    """One call: what implementations look at when they decline."""

    platform: str
    rows: int
    width: int
    devices: int
    """Over which XLA divides what is computed here."""


def argmax(x_MV: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Return the first index of each row's maximum, int32 [M]; -1 where that is not finite.

    A row with a NaN has no finite maximum.

    Args:
        x_MV: float32.
        implementation: name of one implementation to run, no other.

    Raises:
        KernelError: another dtype or other axes, or `implementation` cannot run the call.
    """
    if x_MV.ndim != 2 or x_MV.dtype != jnp.float32:
        raise KernelError(f"argmax: x{x_MV.shape} of {x_MV.dtype} must be float32 [M, V]")
    if native.is_open(x_MV):
        return argmax_in_lanes(x_MV)
    call = ArgmaxCall(current_platform(), *x_MV.shape, devices=free_devices())
    return argmax_operation.choose(call, implementation).run(x_MV)


def argmax_in_lanes(x_MV: jax.Array) -> jax.Array:
    """Two reductions that run over lanes side by side, which XLA's own argmax does not."""
    x_MGL = reductions.split(x_MV, -jnp.inf)
    max_M = reductions.maximum(x_MGL)
    index_GL = jnp.arange(x_MGL[0].size, dtype=jnp.int32).reshape(x_MGL.shape[1:])
    found_MGL = jnp.where(x_MGL == max_M[:, None, None], index_GL, x_MGL[0].size - 1)
    # XLA's maximum on CPU may leave NaN out.
    finite_M = jnp.isfinite(max_M) & ~jnp.any(jnp.isnan(x_MV), axis=1)
    return jnp.where(finite_M, jnp.min(jnp.min(found_MGL, axis=1), axis=-1), -1)


def _native(x_MV: jax.Array) -> jax.Array:
    found = jax.ShapeDtypeStruct((x_MV.shape[0],), jnp.int32)
    return jax.ffi.ffi_call("fornax_argmax", found, vmap_method="sequential")(x_MV)


def _benchmark(call: ArgmaxCall, run: Callable[..., jax.Array]) -> Callable[[], object]:
    x_MV = jax.random.normal(jax.random.key(0), (call.rows, call.width))
    work = jax.jit(run)
    return lambda: work(x_MV)


def _work(call: ArgmaxCall) -> Work:
    return Work(flops=0.0, bytes=4.0 * call.rows * call.width, dtype="float32")


argmax_operation: Operation[ArgmaxCall] = register(
    Operation(
        "argmax",
        (
            Implementation(
                "native", _native, lambda call: native.declines(call.devices), platform="cpu"
            ),
            Implementation("xla", argmax_in_lanes, lambda call: None),
        ),
        _benchmark,
        work=_work,
        call=ArgmaxCall,
    )
)
