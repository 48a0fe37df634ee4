"""The key/value cache: one pytree for all layers, written at the same slots for every row.

Legend: B batch, S cache slots, K key/value heads, H head width, L layers.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from fornax.models.config import DecoderConfig

__all__ = ["Cache", "CacheLayer", "init_cache"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens seen so far, with their positions and documents."""

    k_LBSKH: jax.Array
    v_LBSKH: jax.Array
    positions_BS: jax.Array
    """int32 position of each slot's token."""
    segment_ids_BS: jax.Array
    """int32 document of each slot's token; 0: padding or not yet written."""
    used: jax.Array
    """int32 scalar: slots written so far, the next slot to write."""

    @property
    def num_slots(self) -> int:
        """S, the tokens that fit."""
        return self.positions_BS.shape[1]

    def append(self, positions_BT: jax.Array, segment_ids_BT: jax.Array) -> "Cache":
        """The cache with T more slots marked as written; layers fill in keys and values."""

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0, self.used))

        return replace(
            self,
            positions_BS=put(self.positions_BS, positions_BT),
            segment_ids_BS=put(self.segment_ids_BS, segment_ids_BT),
            used=self.used + positions_BT.shape[1],
        )


@dataclass(frozen=True)
class CacheLayer:
    """One layer's view of the stacked keys and values, which it updates in place."""

    k_LBSKH: jax.Array
    v_LBSKH: jax.Array
    layer: jax.Array
    """int32 scalar: which layer."""
    slot: jax.Array
    """int32 scalar: first slot to write."""

    def keys(self) -> jax.Array:
        """This layer's keys [B, S, K, H]."""
        return jax.lax.dynamic_index_in_dim(self.k_LBSKH, self.layer, keepdims=False)

    def values(self) -> jax.Array:
        """This layer's values [B, S, K, H]."""
        return jax.lax.dynamic_index_in_dim(self.v_LBSKH, self.layer, keepdims=False)

    def write(self, k_BTKH: jax.Array, v_BTKH: jax.Array) -> "CacheLayer":
        """The cache with T tokens' keys and values in this layer's next slots."""

        def put(stack: jax.Array, new: jax.Array) -> jax.Array:
            start = (self.layer, 0, self.slot, 0, 0)
            return jax.lax.dynamic_update_slice(stack, new[None].astype(stack.dtype), start)

        return replace(self, k_LBSKH=put(self.k_LBSKH, k_BTKH), v_LBSKH=put(self.v_LBSKH, v_BTKH))


def init_cache(config: DecoderConfig, batch: int, length: int, dtype=jnp.float32) -> Cache:
    """An empty cache.

    Args:
      config: the model's.
      batch: B, rows.
      length: S, how many tokens a row can hold, padding included.
      dtype: of keys and values.
    """
    shape = (config.num_layers, batch, length, config.kv_heads, config.head_width)
    return Cache(
        k_LBSKH=jnp.zeros(shape, dtype),
        v_LBSKH=jnp.zeros(shape, dtype),
        positions_BS=jnp.zeros((batch, length), jnp.int32),
        segment_ids_BS=jnp.zeros((batch, length), jnp.int32),
        used=jnp.zeros((), jnp.int32),
    )
