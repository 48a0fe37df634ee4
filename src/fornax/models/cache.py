"""The key/value cache: one pytree for all layers, written at the same slots for every row.

Legend: B batch, S cache slots, K key/value heads, H head width, L layers.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fornax import kernels
from fornax.models.attend import AttendOptions, Place
from fornax.models.config import DecoderConfig

__all__ = ["Cache", "init_cache"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens seen so far, with their positions and documents."""

    k_LBSKH: jax.Array
    v_LBSKH: jax.Array | None
    """None where the keys are values too."""
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
        """The cache with T more slots marked as written, which the layers then fill."""

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0, self.used))

        return replace(
            self,
            positions_BS=put(self.positions_BS, positions_BT),
            segment_ids_BS=put(self.segment_ids_BS, segment_ids_BT),
            used=self.used + positions_BT.shape[1],
        )

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array | None,
        place: Place,
        options: AttendOptions,
        sinks_N: jax.Array | None = None,
    ) -> tuple[jax.Array, "Cache"]:
        """Write the last T slots of one layer and attend to all that are written."""
        k_LBSKH = self._put(self.k_LBSKH, k_BTKH, place)
        v_LBSKH = self.v_LBSKH
        if v_LBSKH is not None and v_BTKH is not None:
            v_LBSKH = self._put(v_LBSKH, v_BTKH, place)
        length = q_BTNH.shape[1]
        o_BTNH = kernels.attention(
            q_BTNH,
            _layer(k_LBSKH, place).astype(q_BTNH.dtype),
            _layer(k_LBSKH if v_LBSKH is None else v_LBSKH, place).astype(q_BTNH.dtype),
            scale=options.scale,
            causal=True,
            positions_q_BT=self._last(self.positions_BS, length),
            positions_k_BS=self.positions_BS,
            segment_ids_q_BT=self._last(self.segment_ids_BS, length),
            segment_ids_k_BS=self.segment_ids_BS,
            window=options.window,
            softcap=options.softcap,
            sinks_N=sinks_N,
        )
        return o_BTNH, replace(self, k_LBSKH=k_LBSKH, v_LBSKH=v_LBSKH)

    def _put(self, stack: jax.Array, new: jax.Array, place: Place) -> jax.Array:
        start = (place.layer, 0, self.used - new.shape[1], 0, 0)
        return jax.lax.dynamic_update_slice(stack, new[None].astype(stack.dtype), start)

    def _last(self, row_BS: jax.Array, length: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(row_BS, self.used - length, length, axis=1)


def _layer(stack: jax.Array, place: Place) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, place.layer, keepdims=False)


def init_cache(
    config: DecoderConfig, batch: int, length: int, dtype: DTypeLike = jnp.float32
) -> Cache:
    """An empty cache.

    Args:
      config: the model's.
      batch: B, rows.
      length: S, how many tokens a row can hold, padding included.
      dtype: of keys and values.
    """
    latent = config.latent
    heads = (config.kv_heads, config.head_width) if latent is None else (1, latent.cached_dim)
    shape = (config.num_layers, batch, length, *heads)
    return Cache(
        k_LBSKH=jnp.zeros(shape, dtype),
        v_LBSKH=jnp.zeros(shape, dtype) if latent is None else None,
        positions_BS=jnp.zeros((batch, length), jnp.int32),
        segment_ids_BS=jnp.zeros((batch, length), jnp.int32),
        used=jnp.zeros((), jnp.int32),
    )
