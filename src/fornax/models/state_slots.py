"""The states of linear layers beside a paged cache, in slots of a fixed size.

A running sequence has a slot, or several where tokens are taken back: then each keeps the state
after another of its last tokens. More slots keep states of beginnings. Which slot is for what the
caller decides; a step reads one slot of each of its sequences and writes those that it receives.

Legend: T tokens of the step, U sequences of the step, L linear layers, A slots, J slots that a
sequence writes, W width of the convolutions, K key heads (groups of Mamba-2), R value heads of a
key head, H key width, V value width, X channels of a head.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from fornax import kernels
from fornax.models.cache import DeltaState, no_state
from fornax.models.config import DecoderConfig

__all__ = [
    "StateSlots",
    "copy_states",
    "describe_states",
    "init_states",
    "keeps_states",
    "state_bytes",
]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("stacks", "slots_U", "kept_UJ", "query_start_U1", "fresh_U"),
    meta_fields=(),
)
@dataclass(frozen=True)
class StateSlots:
    """All slots of all linear layers, with which of them a step's sequences have."""

    stacks: DeltaState
    """Of all layers and slots: inputs [L, A, W - 1, K, X] and memory [L, A, K, R, H, V]."""
    slots_U: jax.Array
    """int32: the slot that each sequence continues from."""
    kept_UJ: jax.Array
    """int32: the slots that take states: of a sequence with at most J tokens that after its j-th
    token, of one with more that after its last, in the first. What is not a slot takes nothing."""
    query_start_U1: jax.Array
    """int32 [U + 1]: first token of each sequence in the step; padding comes after the last."""
    fresh_U: jax.Array
    """bool: whether a sequence begins in this step; it finds nothing, whatever its slot holds."""

    def convolve(
        self,
        layer: jax.Array,
        index: int,
        x_TKX: jax.Array,
        kernel_KXW: jax.Array,
        bias_KX: jax.Array | None,
        activation: kernels.Activation,
    ) -> tuple[jax.Array, jax.Array]:
        """One of the layer's convolutions over the step.

        Args:
          layer: int32.
          index: of the convolution.
          x_TKX: the step's channels.
          kernel_KXW: its weights, the oldest token's first.
          bias_KX: or None.
          activation: applied to the sum.

        Returns:
          y [T, K, X], and all slots of that convolution, [L, A, W - 1, K, X], with the last tokens'
          channels in them.
        """
        return kernels.ragged_convolution(
            x_TKX,
            self.stacks.inputs[index],
            kernel_KXW,
            bias_KX,
            activation=activation,
            layer=layer,
            query_start_U1=self.query_start_U1,
            slots_U=self.slots_U,
            kept_UJ=self.kept_UJ,
            fresh_U=self.fresh_U,
        )

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
            kept_UJ=self.kept_UJ,
            fresh_U=self.fresh_U,
        )


def keeps_states(config: DecoderConfig) -> bool:
    """Whether layers of a model keep a state of a fixed size in place of keys and values."""
    return config.linear is not None


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


def state_bytes(config: DecoderConfig, dtype: DTypeLike) -> int:
    """Bytes of one slot, over all layers and devices; 0 where no layer keeps a state."""
    leaves = jax.tree.leaves(describe_states(config, 1, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


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
    """Copy slots in every layer, one pair after the other.

    Args:
      stacks: of all layers and slots.
      pairs: int32 [2, n], sources and targets; those whose target is not a slot come last, and copy
        nothing.
    """

    def copy(turn: jax.Array, stacks: DeltaState) -> DeltaState:
        source, target = pairs[0, turn], pairs[1, turn]

        def put(stack: jax.Array) -> jax.Array:
            state = jax.lax.dynamic_slice_in_dim(stack, source, 1, axis=1)
            # Apart from the write: fused with it, the read would be of a copy of all slots.
            state = jax.lax.optimization_barrier(state)
            return jax.lax.dynamic_update_slice_in_dim(stack, state, target, axis=1)

        return jax.tree.map(put, stacks)

    count = jnp.sum(pairs[1] < stacks.memory_BKRHV.shape[1])
    return jax.lax.fori_loop(0, count, copy, stacks)
