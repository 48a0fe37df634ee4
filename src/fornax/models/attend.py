"""How a layer attends through a cache: the small contract between layers and kinds of caches.

Legend: B batch, T query tokens, N query heads, K key/value heads, H head width.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

__all__ = ["AttendOptions", "KeyValueCache", "LayerCache", "Place"]


class Place(NamedTuple):
    """Which layer is attending; int32 scalars."""

    layer: jax.Array
    """Index among all layers."""
    among: jax.Array
    """Index among the layers with the same window."""


@dataclass(frozen=True)
class AttendOptions:
    """What is static about one layer's attention."""

    scale: float
    window: int | None
    softcap: float | None


class KeyValueCache(Protocol):
    """A pytree that keeps keys and values of all layers."""

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array | None,
        place: Place,
        options: AttendOptions,
        sinks_N: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Add this pass's keys and values of a layer; return o [B, T, N, H] and the new cache.

        Without values the keys are values too, in a cache of a model with latent attention.
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
        k_BTKH: jax.Array,
        v_BTKH: jax.Array | None,
        options: AttendOptions,
        sinks_N: jax.Array | None = None,
    ) -> tuple[jax.Array, "LayerCache"]:
        """Attend in this layer; see `KeyValueCache.attend`."""
        o_BTNH, cache = self.cache.attend(q_BTNH, k_BTKH, v_BTKH, self.place, options, sinks_N)
        return o_BTNH, LayerCache(cache, self.place)
