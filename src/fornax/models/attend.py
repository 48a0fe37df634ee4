"""How a layer attends through a cache: the small contract between layers and kinds of caches.

Legend: B batch, T query tokens, N query heads, K key/value heads, H head width,
V value width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fornax import kernels
from fornax.kernels import checkpoint_name
from fornax.models.config import QueryScaling
from fornax.models.context import LayerContext

__all__ = [
    "AttendOptions",
    "KeyValueCache",
    "LayerCache",
    "PassKeys",
    "Place",
    "attend_uncached",
    "grow_queries",
]


class Place(NamedTuple):
    """Which layer is attending; int32 scalars."""

    layer: jax.Array
    """Index among the layers with the same kind of attention."""
    among: jax.Array
    """Index among those with the same window too."""


@dataclass(frozen=True)
class AttendOptions:
    """What is static about one layer's attention."""

    scale: float
    window: int | None
    softcap: float | None
    chunked: bool = False
    """Whether windows lie side by side; see `LayerKind`."""
    kv_heads: int = 1
    """Key/value heads of the layer; of one that takes another's keys, that layer's."""

    def documents(
        self, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
    ) -> jax.Array | None:
        """int32 ids [B, T] of the tokens that see each other; 0 for padding, None where all do.

        Chunks are documents of their own. Keys a window away are not seen anyway, so neighbouring
        chunks need two numbers only.
        """
        if not self.chunked or self.window is None:
            return segment_ids_BT
        odd_BT = positions_BT // self.window % 2
        if segment_ids_BT is None:
            return 1 + odd_BT
        return jnp.where(segment_ids_BT == 0, 0, 2 * segment_ids_BT + odd_BT)


@jax.named_scope("core_attention")
def attend_uncached(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKV: jax.Array,
    context: LayerContext,
    options: AttendOptions,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Attend among this pass's own tokens -> o [B, T, N, V]; remat may keep what it takes."""
    documents_BT = options.documents(context.positions_BT, context.segment_ids_BT)
    keys_BT = documents_BT
    if context.seen_BT is not None:
        keys_BT = options.documents(context.positions_BT, context.seen_BT)
        documents_BT = options.documents(context.positions_BT, jnp.ones_like(context.seen_BT))
    return kernels.attention(
        checkpoint_name(q_BTNH, "query"),
        checkpoint_name(k_BTKH, "key"),
        checkpoint_name(v_BTKV, "value"),
        scale=options.scale,
        causal=True,
        positions_q_BT=context.positions_BT,
        positions_k_BS=context.positions_BT,
        consecutive=context.consecutive,
        balanced=context.balanced,
        segment_ids_q_BT=documents_BT,
        segment_ids_k_BS=keys_BT,
        window=options.window,
        softcap=options.softcap,
        sinks_N=sinks_N,
        exchange=context.exchange,
        implementation=context.implementation,
    )


def grow_queries(q_BTNH: jax.Array, positions_BT: jax.Array, scaling: QueryScaling) -> jax.Array:
    """Queries q [B, T, N, H] times what their position gives; see `QueryScaling`."""
    lengths_BT = ((positions_BT + scaling.shift) // scaling.length).astype(jnp.float32)
    factor_BT = 1 + scaling.beta * jnp.log1p(lengths_BT)
    return q_BTNH * factor_BT[:, :, None, None].astype(q_BTNH.dtype)


@dataclass(frozen=True)
class PassKeys:
    """Takes a cache's place in a pass without one, and hands keys and values to later layers.

    It holds those of the pass's own tokens, by the window of the layers that take them, 0 for none.
    """

    context: LayerContext
    kept: Mapping[int, tuple[jax.Array, jax.Array]]

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array | None,
        v_BTKH: jax.Array | None,
        options: AttendOptions,
        sinks_N: jax.Array | None = None,
    ) -> tuple[jax.Array, "PassKeys"]:
        """Attend, and keep what is given; without keys, attend to what was kept."""
        window = options.window or 0
        if k_BTKH is None or v_BTKH is None:
            k_BTKH, v_BTKH = self.kept[window]
        o_BTNH = attend_uncached(q_BTNH, k_BTKH, v_BTKH, self.context, options, sinks_N)
        return o_BTNH, PassKeys(self.context, {**self.kept, window: (k_BTKH, v_BTKH)})


class KeyValueCache(Protocol):
    """A pytree that keeps keys and values of all layers."""

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array | None,
        v_BTKH: jax.Array | None,
        place: Place,
        options: AttendOptions,
        sinks_N: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Add this pass's keys and values of a layer; return o [B, T, N, H] and the new cache.

        Without values the keys are values too, in a cache of a model with latent attention.
        Without keys nothing is added: the place is that of the layer whose keys are taken.
        Sinks are a logit a query head, in the softmax without a value.
        """
        ...


@dataclass(frozen=True)
class LayerCache:
    """One layer's hold on a cache of all layers."""

    cache: KeyValueCache
    place: Place

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array | None,
        v_BTKH: jax.Array | None,
        options: AttendOptions,
        sinks_N: jax.Array | None = None,
    ) -> tuple[jax.Array, "LayerCache"]:
        """Attend in this layer; see `KeyValueCache.attend`."""
        with jax.named_scope("core_attention"):
            o_BTNH, cache = self.cache.attend(q_BTNH, k_BTKH, v_BTKH, self.place, options, sinks_N)
        return o_BTNH, LayerCache(cache, self.place)
