"""The key/value cache: one pytree for all layers, written at the same slots for every row.

Legend: B batch, S cache slots, K key/value heads, H head width, L layers; of linear layers K key
heads (groups of Mamba-2), R value heads of a key head, H key width, V value width, W width of the
convolutions, X channels of a head.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fornax import kernels
from fornax.models.attend import AttendOptions, Place
from fornax.models.config import DecoderConfig
from fornax.models.delta_config import GatedDeltaConfig
from fornax.models.mamba_config import Mamba2Config

__all__ = ["Cache", "DeltaState", "init_cache", "no_state"]


class DeltaState(NamedTuple):
    """What linear layers keep of the tokens before: of one layer, or of all, stacked."""

    inputs: tuple[jax.Array, ...]
    """What each convolution saw last, [B, W - 1, K, X]; see `conv_channels` of its config."""
    memory_BKRHV: jax.Array
    """float32."""


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
    delta: DeltaState | None = None
    """Of all linear layers; None where there are none, as the next one is."""
    document_B: jax.Array | None = None
    """int32 document of the last token before those that were appended last; 0 for none."""

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
            document_B=None if self.delta is None else _last_document(self.segment_ids_BS),
        )

    def delta_of(self, place: Place) -> DeltaState:
        """What one linear layer keeps.

        Raises:
          ValueError: when the cache has no linear layers.
        """
        if self.delta is None:
            raise ValueError("the cache is of a model without linear layers")
        return jax.tree.map(lambda stack: _layer(stack, place), self.delta)

    def with_delta(self, state: DeltaState, place: Place) -> "Cache":
        """The cache with what one linear layer keeps now."""

        def put(stack: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(stack, new, place.layer, 0)

        return replace(self, delta=jax.tree.map(put, self.delta, state))

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array | None,
        v_BTKH: jax.Array | None,
        place: Place,
        options: AttendOptions,
        sinks_N: jax.Array | None = None,
    ) -> tuple[jax.Array, "Cache"]:
        """Write the last T slots of one layer and attend to all that are written."""
        k_LBSKH, v_LBSKH = self.k_LBSKH, self.v_LBSKH
        if k_BTKH is not None:
            k_LBSKH = self._put(k_LBSKH, k_BTKH, place)
        if v_LBSKH is not None and v_BTKH is not None:
            v_LBSKH = self._put(v_LBSKH, v_BTKH, place)
        length = q_BTNH.shape[1]
        documents_BS = options.documents(self.positions_BS, self.segment_ids_BS)
        assert documents_BS is not None
        o_BTNH = kernels.attention(
            q_BTNH,
            self._read(k_LBSKH, q_BTNH, place, options),
            self._read(k_LBSKH if v_LBSKH is None else v_LBSKH, q_BTNH, place, options),
            scale=options.scale,
            causal=True,
            positions_q_BT=self._last(self.positions_BS, length),
            positions_k_BS=self.positions_BS,
            segment_ids_q_BT=self._last(documents_BS, length),
            segment_ids_k_BS=documents_BS,
            window=options.window,
            softcap=options.softcap,
            sinks_N=sinks_N,
        )
        return o_BTNH, replace(self, k_LBSKH=k_LBSKH, v_LBSKH=v_LBSKH)

    def _put(self, stack: jax.Array, new: jax.Array, place: Place) -> jax.Array:
        start = (place.layer, 0, self.used - new.shape[1], 0, 0)
        if new.shape[2:] != stack.shape[3:]:  # layers of several shapes: heads side by side
            new = new.reshape(*new.shape[:2], 1, -1)
            new = jnp.pad(new, [(0, 0)] * 3 + [(0, stack.shape[4] - new.shape[3])])
        return jax.lax.dynamic_update_slice(stack, new[None].astype(stack.dtype), start)

    def _read(
        self, stack: jax.Array, q_BTNH: jax.Array, place: Place, options: AttendOptions
    ) -> jax.Array:
        """A layer's keys or values [B, S, K, H], in the dtype of its queries."""
        kept, width = _layer(stack, place).astype(q_BTNH.dtype), q_BTNH.shape[3]
        if kept.shape[3] != width:
            kept = kept[..., : options.kv_heads * width].reshape(*kept.shape[:2], -1, width)
        return kept

    def _last(self, row_BS: jax.Array, length: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(row_BS, self.used - length, length, axis=1)


def _last_document(segment_ids_BS: jax.Array) -> jax.Array:
    """int32 document of each row's last token, 0 for none."""
    slots = jnp.arange(segment_ids_BS.shape[1])
    last_B = jnp.max(jnp.where(segment_ids_BS != 0, slots, 0), axis=1, keepdims=True)
    return jnp.take_along_axis(segment_ids_BS, last_B, axis=1)[:, 0]


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
    kinds = config.layer_kinds()
    shapes = {config.kv_shape(kind) for kind in kinds}
    if len(shapes) > 1:
        heads = (1, max(number * width for number, width in shapes))
    linear = sum(kind.linear for kind in kinds)
    keeping = sum(kind.keys != "shared" for kind in kinds) - linear
    shape = (keeping, batch, length, *heads)
    rule = config.linear
    return Cache(
        k_LBSKH=jnp.zeros(shape, dtype),
        v_LBSKH=jnp.zeros(shape, dtype) if latent is None else None,
        positions_BS=jnp.zeros((batch, length), jnp.int32),
        segment_ids_BS=jnp.zeros((batch, length), jnp.int32),
        used=jnp.zeros((), jnp.int32),
        delta=None if rule is None else no_state(rule, (linear, batch), dtype),
        document_B=None if rule is None else jnp.zeros((batch,), jnp.int32),
    )


def no_state(
    rule: GatedDeltaConfig | Mamba2Config, rows: tuple[int, int], dtype: DTypeLike
) -> DeltaState:
    """Of L layers and B rows that have seen nothing."""
    K, R, H, V = rule.num_key_heads, rule.heads_per_key, rule.key_dim, rule.value_dim
    seen = (*rows, rule.conv_width - 1)
    return DeltaState(
        tuple(jnp.zeros((*seen, heads, width), dtype) for _, heads, width in rule.conv_channels),
        jnp.zeros((*rows, K, R, H, V), jnp.float32),
    )
