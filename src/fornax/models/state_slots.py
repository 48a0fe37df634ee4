"""The states of linear layers beside a paged cache: a slot of fixed size for each running sequence.

Legend: T tokens of the step, U sequences of the step, L linear layers, A slots, W width of the
convolutions, K key heads, R value heads of a key head, H key width, V value width, X channels of a
key head.
"""

import functools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from fornax import kernels
from fornax.models.cache import DeltaState, no_state
from fornax.models.config import DecoderConfig

__all__ = ["StateSlots", "copy_states", "describe_states", "init_states"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("stacks", "slots_U", "query_start_U1", "fresh_U"),
    meta_fields=(),
)
@dataclass(frozen=True)
class StateSlots:
    """All slots of all linear layers, with which of them a step's sequences have."""

    stacks: DeltaState
    """Of all layers and slots: inputs [L, A, W - 1, K, X] and memory [L, A, K, R, H, V]."""
    slots_U: jax.Array
    """int32: the slot of each sequence."""
    query_start_U1: jax.Array
    """int32 [U + 1]: first token of each sequence in the step; padding comes after the last."""
    fresh_U: jax.Array
    """bool: whether a sequence begins in this step; it finds nothing, whatever its slot holds."""

    def taps(self, x_TKX: jax.Array, which: int, layer: jax.Array) -> tuple[jax.Array, ...]:
        """What each place of a convolution sees: W arrays [T, K, X], the oldest tokens' first.

        Args:
          x_TKX: the step's channels.
          which: of `DeltaState.inputs`.
          layer: int32.
        """
        stack, T = self.stacks.inputs[which], len(x_TKX)
        token_T = jnp.arange(T, dtype=jnp.int32)
        ends_U = self.query_start_U1[1:]
        row_T = jnp.searchsorted(ends_U, token_T, side="right", method="compare_all")
        row_T = jnp.minimum(row_T, len(ends_U) - 1)
        offset_T, kept = token_T - self.query_start_U1[row_T], stack.shape[2]
        slots_T, fresh_T = self.slots_U[row_T], self.fresh_U[row_T]
        found = []
        for back in range(kept, 0, -1):
            own_TKX = jnp.pad(x_TKX, ((back, 0), (0, 0), (0, 0)))[:T]
            place_T = jnp.minimum(offset_T + kept - back, kept - 1)
            before_TKX = _unless(fresh_T, stack[layer, slots_T, place_T]).astype(x_TKX.dtype)
            found.append(jnp.where((offset_T >= back)[:, None, None], own_TKX, before_TKX))
        return (*found, x_TKX)

    def keep(
        self, inputs: tuple[jax.Array, ...], memory_LAKRHV: jax.Array, layer: jax.Array
    ) -> "StateSlots":
        """The slots after a layer's step.

        Args:
          inputs: the step's channels [T, K, X] of each convolution.
          memory_LAKRHV: with the layer's new states in it.
          layer: int32.
        """
        stacks = zip(inputs, self.stacks.inputs, strict=True)
        kept = tuple(self._last_inputs(x_TKX, stack, layer) for x_TKX, stack in stacks)
        return replace(self, stacks=DeltaState(kept, memory_LAKRHV))

    def _last_inputs(self, x_TKX: jax.Array, stack_LAWKX: jax.Array, layer: jax.Array) -> jax.Array:
        """The stack with the last W - 1 channels of each sequence."""
        slots, kept = stack_LAWKX.shape[1:3]
        starts_U = self.query_start_U1[:-1]
        count_U = self.query_start_U1[1:] - starts_U
        place_UW = count_U[:, None] + jnp.arange(kept)
        before_UWKX = _unless(
            self.fresh_U,
            jnp.take_along_axis(
                stack_LAWKX[layer, self.slots_U],
                jnp.minimum(place_UW, kept - 1)[..., None, None],
                axis=1,
            ),
        )
        own_UW = jnp.clip(starts_U[:, None] + place_UW - kept, 0, len(x_TKX) - 1)
        own_UWKX = x_TKX[own_UW].astype(stack_LAWKX.dtype)
        last_UWKX = jnp.where((place_UW >= kept)[..., None, None], own_UWKX, before_UWKX)
        slots_U = jnp.where(count_U > 0, self.slots_U, slots)
        return stack_LAWKX.at[layer, slots_U].set(last_UWKX, mode="drop")

    def read_and_write(
        self,
        layer: jax.Array,
        q_TKH: jax.Array,
        k_TKH: jax.Array,
        v_TKRV: jax.Array,
        log_decay_TKR: jax.Array,
        beta_TKR: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """The gated delta rule over the step -> o [T, K, R, V], memory [L, A, K, R, H, V]."""
        return kernels.ragged_gated_delta_rule(
            q_TKH,
            k_TKH,
            v_TKRV,
            log_decay_TKR,
            beta_TKR,
            self.stacks.memory_BKRHV,
            layer=layer,
            query_start_U1=self.query_start_U1,
            slots_U=self.slots_U,
            fresh_U=self.fresh_U,
        )


def _unless(none: jax.Array, values: jax.Array) -> jax.Array:
    """Zeros where `none`, along the first axis."""
    return jnp.where(none.reshape(-1, *(1,) * (values.ndim - 1)), 0, values)


def describe_states(
    config: DecoderConfig,
    slots: int,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    axes: tuple[str, ...] = ("tensor",),
) -> DeltaState | None:
    """The shapes of the states of all linear layers; None where there are none.

    Args:
      config: the model's.
      slots: A.
      dtype: of what convolutions keep; the memories are float32.
      mesh: where they will lie; key heads are divided over `axes` where they divide.
      axes: mesh axes for the heads.
    """
    delta = config.gated_delta
    if delta is None:
        return None
    linear = sum(kind.attention == "gated_delta" for kind in config.layer_kinds())
    shapes: DeltaState = jax.eval_shape(lambda: no_state(delta, (linear, slots), dtype))
    if mesh is None:
        return shapes
    parts = math.prod(mesh.shape[axis] for axis in axes)
    divided = axes if delta.num_key_heads % parts == 0 else None

    def put(heads: int, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        where = NamedSharding(mesh, PartitionSpec(*(None,) * heads, divided))
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)

    inputs = jax.tree.map(functools.partial(put, 3), shapes.inputs)
    return DeltaState(inputs, jax.tree.map(functools.partial(put, 2), shapes.memory_BKRHV))


def init_states(
    config: DecoderConfig,
    slots: int,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    axes: tuple[str, ...] = ("tensor",),
) -> DeltaState | None:
    """Slots of zeros, as `describe_states` says."""

    def make(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)

    return jax.tree.map(make, describe_states(config, slots, dtype, mesh, axes))


def copy_states(stacks: DeltaState, pairs: jax.Array) -> DeltaState:
    """Copy slots in every layer, reading all before writing any.

    Args:
      stacks: of all layers and slots.
      pairs: int32 [2, n], sources and targets; a target that is no slot takes nothing.
    """

    def copy(stack: jax.Array) -> jax.Array:
        taken = stack[:, jnp.minimum(pairs[0], stack.shape[1] - 1)]
        return stack.at[:, pairs[1]].set(taken, mode="drop")

    return jax.tree.map(copy, stacks)
