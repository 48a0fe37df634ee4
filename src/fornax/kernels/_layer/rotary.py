"""Rotary position embedding (Su et al. 2021): pairs of a head's elements turned by their angles.

Legend: B batch, T tokens, N heads, H head width, r pairs that turn (2 r <= H).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError
from fornax.kernels._grouped.call import free_devices
from fornax.kernels._layer import native
from fornax.kernels.registry import Implementation, Operation, Work, current_platform, register

__all__ = ["RotaryCall", "rotary_embedding", "rotary_embedding_operation"]


@dataclass(frozen=True)
class RotaryCall:
    """One call: what implementations look at when they decline."""

    platform: str
    tokens: int
    heads: int
    head_dim: int
    rotated_dim: int
    interleaved: bool
    dtype: str
    devices: int
    """Over which XLA divides what is computed here."""


def rotary_embedding(
    x_BTNH: jax.Array,
    cos_BTr: jax.Array,
    sin_BTr: jax.Array,
    interleaved: bool = False,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Turn the first 2 r dimensions of each head, in float32, rounded once; the others stay.

    Cosines and sines have no gradient on TPU.

    Args:
        x_BTNH: floating.
        cos_BTr: float32, of each pair's angle.
        sin_BTr: likewise.
        interleaved: whether a pair is two neighbours, as in GPT-J, in place of elements i and
            i + r, as in GPT-NeoX and Llama. They come out as the latter would: of queries and keys
            alike, so that their products are the same.
        implementation: name of one implementation to run, no other.

    Returns:
        [B, T, N, H] in the dtype of x.

    Raises:
        KernelError: arguments that do not fit together, or `implementation` cannot run the call.
    """
    fits = x_BTNH.ndim == 4 and cos_BTr.shape == sin_BTr.shape and cos_BTr.ndim == 3
    if not fits or cos_BTr.shape[:2] != x_BTNH.shape[:2] or 2 * cos_BTr.shape[2] > x_BTNH.shape[3]:
        raise KernelError(
            f"rotary_embedding: x{x_BTNH.shape}, cos{cos_BTr.shape} and sin{sin_BTr.shape} must be "
            "[B, T, N, H], [B, T, r] and [B, T, r], with 2 r at most H"
        )
    if native.is_open(x_BTNH, cos_BTr):
        return _formula(x_BTNH, cos_BTr, sin_BTr, interleaved)
    B, T, N, H = x_BTNH.shape
    call = RotaryCall(
        platform=current_platform(),
        tokens=B * T,
        heads=N,
        head_dim=H,
        rotated_dim=2 * cos_BTr.shape[2],
        interleaved=interleaved,
        dtype=jnp.dtype(x_BTNH.dtype).name,
        devices=free_devices(),
    )
    chosen = rotary_embedding_operation.choose(call, implementation)
    return chosen.run(x_BTNH, cos_BTr, sin_BTr, interleaved)


def _formula(
    x_BTNH: jax.Array, cos_BTr: jax.Array, sin_BTr: jax.Array, interleaved: bool
) -> jax.Array:
    cos, sin = cos_BTr[:, :, None, :], sin_BTr[:, :, None, :]
    half = cos.shape[-1]
    if interleaved:
        x_BTNH = _halves(x_BTNH, half)
    first, second, *rest = _split(x_BTNH.astype(jnp.float32), half, 2 * half)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*turned, *rest], axis=-1).astype(x_BTNH.dtype)


def _halves(x_BTNH: jax.Array, half: int) -> jax.Array:
    """The first numbers of all pairs, then the second ones, then what does not turn."""
    pairs, *rest = _split(x_BTNH, 2 * half)
    return jnp.concatenate([pairs[..., ::2], pairs[..., 1::2], *rest], axis=-1)


def _split(x_BTNH: jax.Array, *ends: int) -> list[jax.Array]:
    """Heads cut at these elements; no part is empty.

    An empty one in a loop makes XLA's conversion of jaxlib 0.12 drop the attributes of the native
    calls beside it ("No registered implementation for untyped custom call").
    """
    return jnp.split(x_BTNH, [end for end in ends if end < x_BTNH.shape[-1]], axis=-1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _native(
    x_BTNH: jax.Array, cos_BTr: jax.Array, sin_BTr: jax.Array, interleaved: bool
) -> jax.Array:
    y = jax.ShapeDtypeStruct(x_BTNH.shape, x_BTNH.dtype)
    call = jax.ffi.ffi_call("fornax_rotary_embedding", y, vmap_method="sequential")
    return call(x_BTNH, cos_BTr, sin_BTr, interleaved=np.bool_(interleaved))


@_native.defjvp
def _native_jvp(interleaved: bool, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(functools.partial(_formula, interleaved=interleaved), primals, tangents)


def _product(
    x_BTNH: jax.Array, cos_BTr: jax.Array, sin_BTr: jax.Array, interleaved: bool
) -> jax.Array:
    """Find each number's other one by a product with a permutation, which is exact.

    Slices of a head's lanes are copies of their own on a TPU, and their gradients sums of padded
    arrays; a product takes what is elementwise around it along, so that a rotation and its gradient
    each read their input and write their result and no more.
    """
    if interleaved:
        x_BTNH = _halves(x_BTNH, cos_BTr.shape[-1])
    return _turned_by_product(x_BTNH, cos_BTr, sin_BTr)


@jax.custom_vjp
def _turned_by_product(x_BTNH: jax.Array, cos_BTr: jax.Array, sin_BTr: jax.Array) -> jax.Array:
    H, half = x_BTNH.shape[-1], cos_BTr.shape[-1]
    other_H = (jnp.arange(H) + half) % (2 * half)
    swap_HH = (jnp.arange(H)[:, None] == other_H).astype(x_BTNH.dtype)
    over = (((3,), (0,)), ((), ()))
    others = jax.lax.dot_general(x_BTNH, swap_HH, over, preferred_element_type=jnp.float32)
    rest = ((0, 0), (0, 0), (0, H - 2 * half))
    cos = jnp.pad(jnp.concatenate([cos_BTr, cos_BTr], axis=-1), rest, constant_values=1)
    sin = jnp.pad(jnp.concatenate([-sin_BTr, sin_BTr], axis=-1), rest)
    turned = x_BTNH.astype(jnp.float32) * cos[:, :, None] + others * sin[:, :, None]
    return turned.astype(x_BTNH.dtype)


def _turned_forwards(x_BTNH: jax.Array, cos_BTr: jax.Array, sin_BTr: jax.Array) -> Any:
    return _turned_by_product(x_BTNH, cos_BTr, sin_BTr), (cos_BTr, sin_BTr)


def _turned_backwards(angles_BTr: Any, dy_BTNH: jax.Array) -> Any:
    cos_BTr, sin_BTr = angles_BTr
    return _turned_by_product(dy_BTNH, cos_BTr, -sin_BTr), None, None


_turned_by_product.defvjp(_turned_forwards, _turned_backwards)


def _declines_product(call: RotaryCall) -> str | None:
    return None if call.dtype == "bfloat16" else f"it takes bfloat16, not {call.dtype}"


def _benchmark(call: RotaryCall, run: Callable[..., jax.Array]) -> Callable[[], object]:
    x_BTNH = jnp.ones((1, call.tokens, call.heads, call.head_dim), call.dtype)
    angles_BTr = jax.random.uniform(jax.random.key(0), (1, call.tokens, call.rotated_dim // 2))
    cos_BTr, sin_BTr = jnp.cos(angles_BTr), jnp.sin(angles_BTr)
    work = jax.jit(lambda *arrays: run(*arrays, call.interleaved))
    return lambda: work(x_BTNH, cos_BTr, sin_BTr)


def _work(call: RotaryCall) -> Work:
    moved = 2.0 * call.tokens * call.heads * call.head_dim * jnp.dtype(call.dtype).itemsize
    return Work(flops=0.0, bytes=moved + 4.0 * call.tokens * call.rotated_dim, dtype=call.dtype)


rotary_embedding_operation: Operation[RotaryCall] = register(
    Operation(
        "rotary_embedding",
        (
            Implementation(
                "native",
                _native,
                lambda call: native.declines(call.devices, call.dtype),
                platform="cpu",
                steady=True,
            ),
            Implementation("product", _product, _declines_product, platform="tpu"),
            Implementation("xla", _formula, lambda call: None),
        ),
        _benchmark,
        work=_work,
        call=RotaryCall,
    )
)
