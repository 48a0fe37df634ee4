"""The states of linear layers beside a paged cache: a slot of fixed size for each running sequence.

Legend: T tokens of the step, U sequences of the step, L linear layers, A slots, W width of the
convolutions, K key heads (groups of Mamba-2), R value heads of a key head, H key width, V value
width, X channels of a head.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

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

    def before(self, layer: jax.Array) -> tuple[jax.Array, ...]:
        """What the convolutions of a layer saw last, [U, W - 1, K, X] each; 0 where a sequence
        begins. To be read once: a second read beside `keep` would be of a copy of all slots."""

        def read(stack_LAWKX: jax.Array) -> jax.Array:
            shape = (len(self.slots_U), *stack_LAWKX.shape[2:])
            # A condition keeps the read in one place.
            kept_UWKX = jax.lax.cond(
                jnp.all(self.fresh_U),
                lambda: jnp.zeros(shape, stack_LAWKX.dtype),
                lambda: stack_LAWKX[layer, self.slots_U],
            )
            return jnp.where(self.fresh_U[:, None, None, None], 0, kept_UWKX)

        return tuple(read(stack_LAWKX) for stack_LAWKX in self.stacks.inputs)

    def taps(self, x_TKX: jax.Array, before_UWKX: jax.Array) -> tuple[jax.Array, ...]:
        """What each place of a convolution sees: W arrays [T, K, X], the oldest tokens' first.

        Args:
          x_TKX: the step's channels.
          before_UWKX: of `before`.
        """
        T = len(x_TKX)
        token_T = jnp.arange(T, dtype=jnp.int32)
        ends_U = self.query_start_U1[1:]
        row_T = jnp.searchsorted(ends_U, token_T, side="right", method="compare_all")
        row_T = jnp.minimum(row_T, len(ends_U) - 1)
        offset_T, kept = token_T - self.query_start_U1[row_T], before_UWKX.shape[1]
        found = []
        for back in range(kept, 0, -1):
            own_TKX = jnp.pad(x_TKX, ((back, 0), (0, 0), (0, 0)))[:T]
            place_T = jnp.minimum(offset_T + kept - back, kept - 1)
            before_TKX = before_UWKX[row_T, place_T].astype(x_TKX.dtype)
            found.append(jnp.where((offset_T >= back)[:, None, None], own_TKX, before_TKX))
        return (*found, x_TKX)

    def keep(
        self,
        layer: jax.Array,
        inputs: tuple[jax.Array, ...],
        before: tuple[jax.Array, ...],
        memory_LAKRHV: jax.Array,
    ) -> "StateSlots":
        """The slots after a layer's step.

        Args:
          layer: int32.
          inputs: the step's channels [T, K, X] of each convolution.
          before: of `before`.
          memory_LAKRHV: with the layer's new states in it.
        """
        starts_U = self.query_start_U1[:-1]
        count_U = self.query_start_U1[1:] - starts_U
        slots_U = jnp.where(count_U > 0, self.slots_U, memory_LAKRHV.shape[1])
        kept: list[jax.Array] = []
        for x_TKX, before_UWKX, stack_LAWKX in zip(inputs, before, self.stacks.inputs, strict=True):
            size = before_UWKX.shape[1]
            place_UW = count_U[:, None] + jnp.arange(size)
            there_UW11 = jnp.minimum(place_UW, size - 1)[..., None, None]
            own_UW = jnp.clip(starts_U[:, None] + place_UW - size, 0, len(x_TKX) - 1)
            last_UWKX = jnp.where(
                (place_UW >= size)[..., None, None],
                x_TKX[own_UW].astype(stack_LAWKX.dtype),
                jnp.take_along_axis(before_UWKX, there_UW11, axis=1),
            )
            kept.append(stack_LAWKX.at[layer, slots_U].set(last_UWKX, mode="drop"))
        return replace(self, stacks=DeltaState(tuple(kept), memory_LAKRHV))

    def read_and_write(
        self,
        layer: jax.Array,
        q_TKH: jax.Array,
        k_TKH: jax.Array,
        v_TKRV: jax.Array,
        log_decay_TKR: jax.Array,
        beta_TKR: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """The layer's rule over the step -> o [T, K, R, V], memory [L, A, K, R, H, V]."""
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
      mesh: where they will lie; heads are divided over `axes` where they divide.
      axes: mesh axes for the heads.
    """
    rule = config.linear
    if rule is None:
        return None
    linear = sum(kind.linear for kind in config.layer_kinds())
    shapes: DeltaState = jax.eval_shape(lambda: no_state(rule, (linear, slots), dtype))
    if mesh is None:
        return shapes
    parts = math.prod(mesh.shape[axis] for axis in axes)

    def put(shape: Any, *heads: int) -> Any:
        """Divided along the first of these dimensions that divides."""
        dim = next((dim for dim in heads if shape.shape[dim] % parts == 0), None)
        spec = PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, axes)
        where = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)

    inputs = tuple(
        put(shape, *((3,) if axis == "heads" else ()))
        for shape, (axis, *_) in zip(shapes.inputs, rule.conv_channels, strict=True)
    )
    return DeltaState(inputs, put(shapes.memory_BKRHV, 2, 3))


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
