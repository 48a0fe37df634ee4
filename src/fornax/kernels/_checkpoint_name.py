"""Names of what the backward pass may keep of a layer."""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax import ad_checkpoint, lax

from fornax.config.errors import KernelError
from fornax.kernels.registry import current_platform

__all__ = ["checkpoint_name", "keeping_bits", "name_in_rule", "wants_bits"]

_keeping: contextvars.ContextVar[bool] = contextvars.ContextVar("keeping bits", default=False)


@contextlib.contextmanager
def keeping_bits() -> Iterator[None]:
    """While a layer is traced whose backward pass keeps some of its activations by name, keep those
    of bfloat16 as their bits on CPU.

    XLA's backend there writes bfloat16 into the stacks of a loop one element at a time, and widens
    whole stacks to float32 before the loop that reads them. The layer's derivative cannot be
    differentiated again then, and raises a KernelError.
    """
    token = _keeping.set(True)
    try:
        yield
    finally:
        _keeping.reset(token)


def checkpoint_name(x: jax.Array, name: str) -> jax.Array:
    """Return x under a name for `jax.checkpoint_policies`, as `jax.ad_checkpoint` does.

    Args:
        x: any shape and dtype; bfloat16 is kept as its bits while `keeping_bits`.
        name: what policies call it.
    """
    return _named(name, x) if wants_bits(x) else ad_checkpoint.checkpoint_name(x, name)


def wants_bits(x: jax.Array) -> bool:
    """Whether the bits of x are kept, of a layer that is being traced."""
    return _keeping.get() and x.dtype == jnp.bfloat16 and current_platform() == "cpu"


def name_in_rule(x: jax.Array, name: str, *, bits: bool) -> jax.Array:
    """`checkpoint_name` in a rule of derivatives, with what `wants_bits` said when the layer was
    traced: of what a rule calls that has a rule of its own policies see no names."""
    if not bits:
        return ad_checkpoint.checkpoint_name(x, name)
    return lax.bitcast_convert_type(ad_checkpoint.checkpoint_name(_bits(x), name), x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _named(name: str, x: jax.Array) -> jax.Array:
    return ad_checkpoint.checkpoint_name(x, name)


@_named.defjvp
def _named_jvp(name: str, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return name_in_rule(x, name, bits=True), dx


@jax.custom_jvp
def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16)


@_bits.defjvp
def _bits_jvp(*_: object) -> NoReturn:
    """The rule of `lax` is a gradient of zero: a wrong one, unsaid."""
    raise KernelError(
        "of a layer in bfloat16 that is rematerialised on CPU the backward pass keeps bits, which "
        "have no derivative; for second derivatives set remat to none, or compute in float32"
    )
