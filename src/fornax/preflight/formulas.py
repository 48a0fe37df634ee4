"""The parts of plain formulas that several references share: products, norms, rotations, masks.

Nothing here is used by the trainer.

Legend: B rows, T query tokens, S key tokens, N heads, P rotated width, X channels.
"""

import jax
import jax.numpy as jnp

from fornax.models.config import LayerKind, QueryScaling
from fornax.models.context import LayerContext
from fornax.models.norm import RMSNorm
from fornax.models.projection import Projection
from fornax.models.rope import Rotation

__all__ = ["begins", "growth", "normed", "over_root_mean_square", "project", "seen", "turned"]


def project(formula: str, x: jax.Array, projection: Projection | None) -> jax.Array:
    """A projection by an einsum's formula, in float32, with its bias."""
    assert projection is not None
    y = jnp.einsum(formula, x, projection.kernel[...].astype(jnp.float32))
    return y if projection.bias is None else y + projection.bias[...].astype(jnp.float32)


def over_root_mean_square(x: jax.Array, axes: int, eps: float) -> jax.Array:
    """x / sqrt(mean of x^2 over the last axes + eps)."""
    last = tuple(range(-axes, 0))
    return x / jnp.sqrt(jnp.mean(x * x, axis=last, keepdims=True) + eps)


def normed(x: jax.Array, norm: RMSNorm | None, eps: float | None = None) -> jax.Array:
    """x [..., X] through an RMSNorm; as it is without one. `eps`: None for the norm's own."""
    if norm is None:
        return x
    scale = norm.scale[...].astype(jnp.float32) + norm.unit_offset
    return over_root_mean_square(x, scale.ndim, norm.eps if eps is None else eps) * scale


def turned(x_BTNP: jax.Array, rotation: Rotation | None) -> jax.Array:
    """The first numbers of each head in pairs, turned by matrices [[cos, -sin], [sin, cos]];
    queries and keys alike keep pairs in one order, which their products do not see."""
    if rotation is None:
        return x_BTNP
    half = rotation.cos_BTr.shape[-1]
    turning, rest = x_BTNP[..., : 2 * half], x_BTNP[..., 2 * half :]
    order = (-1, half, 2) if rotation.interleaved else (-1, 2, half)
    pairs = turning.reshape(*turning.shape[:2], *order)
    pairs = pairs if rotation.interleaved else jnp.swapaxes(pairs, -1, -2)
    cos, sin = rotation.cos_BTr, rotation.sin_BTr
    rows = [jnp.stack([cos, -sin], axis=-1), jnp.stack([sin, cos], axis=-1)]
    found = jnp.einsum("BTrij,BTNrj->BTNri", jnp.stack(rows, axis=-2), pairs)
    return jnp.concatenate([found.reshape(turning.shape), rest], axis=-1)


def seen(kind: LayerKind, context: LayerContext) -> jax.Array:
    """Which keys each query sees, bool [B, T, S]."""
    place = context.positions_BT
    distance_BTS = place[:, :, None] - place[:, None, :]
    seen_BTS = distance_BTS >= 0
    if kind.window is not None:
        seen_BTS &= distance_BTS < kind.window
        if kind.chunked:
            chunk_BT = place // kind.window
            seen_BTS &= chunk_BT[:, :, None] == chunk_BT[:, None, :]
    segments = context.segment_ids_BT
    if segments is not None:
        seen_BTS &= (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] > 0)
    return seen_BTS


def growth(scaling: QueryScaling | None, kind: LayerKind, context: LayerContext) -> jax.Array:
    """What multiplies a query's scores for its position, [B, T]."""
    if scaling is None or (scaling.layers == "unrotated" and kind.rope != "none"):
        return jnp.ones(context.positions_BT.shape)
    lengths_BT = jnp.floor((context.positions_BT + scaling.shift) / scaling.length)
    return 1 + scaling.beta * jnp.log(1 + lengths_BT)


def begins(context: LayerContext) -> jax.Array:
    """Which tokens are the first of a document, bool [B, T]."""
    segments = context.segment_ids_BT
    first_BT = jnp.zeros(context.positions_BT.shape, bool).at[:, 0].set(True)
    if segments is None:
        return first_BT
    return first_BT.at[:, 1:].set(segments[:, 1:] != segments[:, :-1])
