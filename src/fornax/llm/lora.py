"""A weight with low-rank adapters around it, several in one batch.

y = base(x) + B_s A_s x alpha / rank for the adapter s of each token (Hu et al. 2021). The adapters'
matrices lie side by side: one product with all of them, what is not a token's own struck out, and
one product back. Loading an adapter writes into its slot and changes no shape.

Experts' stacks have an axis of experts E after that of layers: each has its own matrices.

Legend: L layers, K inputs (flattened), N outputs (flattened), P slots times rank, T tokens, R rows
sorted by expert.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fornax import kernels
from fornax.models.dispatch import SortedRows

__all__ = ["LoRAStack", "LoRAWeight", "attach", "bind", "write_slot"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoRAStack:
    """The adapters' matrices of one projection in all layers."""

    down_LKP: jax.Array
    """A of each slot, transposed."""
    up_LPN: jax.Array
    """B of each slot, transposed and scaled."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LoRAWeight:
    """A weight for `kernels.linear` with adapters, or an expert's; `bind` tells it each token's."""

    base: jax.Array | kernels.PackedWeight | kernels.GroupedWeight
    """The stack of layers, or one layer of it: an array, or a weight that knows its product."""
    stack: LoRAStack
    adapters_T: jax.Array | None
    """int32: slot of each token's adapter, -1 for none; None: no token has one."""
    layer: jax.Array | None
    """int32; None for the stack of all layers."""
    rank: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array this stands for."""
        return self.base.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the array this stands for."""
        return self.base.dtype

    def at(self, layer: jax.Array | int) -> "LoRAWeight":
        """One layer of the stack."""
        layer = jnp.asarray(layer, jnp.int32)
        if isinstance(self.base, jax.Array):
            base = lax.dynamic_index_in_dim(self.base, layer, keepdims=False)
        else:
            base = self.base.at(layer)
        return replace(self, base=base, layer=layer)

    def linear(self, x: jax.Array, inputs: int) -> jax.Array:
        """Sum over the last `inputs` axes of x [..., *in], whose others number T together."""
        base = self.base
        assert not isinstance(base, kernels.GroupedWeight), "those of experts are not linear layers"
        if isinstance(base, jax.Array):
            base = base.astype(x.dtype)
        y = kernels.linear(x, base, inputs=inputs)
        if self.adapters_T is None:
            return y
        adapters_T = self.adapters_T
        # Steps in which nobody uses an adapter pay for this test only.
        return lax.cond(
            jnp.any(adapters_T >= 0), lambda: y + self._delta(x, y.shape, adapters_T), lambda: y
        )

    def grouped(self, x_RK: jax.Array, rows: SortedRows) -> jax.Array:
        """The product of rows sorted by expert, as `models.dispatch.ExpertWeight` says."""
        sizes_E, adapters_T = rows.sizes_E, self.adapters_T
        base = self.base
        if isinstance(base, jax.Array):
            base = base.astype(x_RK.dtype)
        y_RN = kernels.grouped_matmul(x_RK, base, sizes_E)
        if adapters_T is None:
            return y_RN

        tokens_R = rows.tokens_R
        assert tokens_R is not None, "the engine divides no experts over devices"

        def delta() -> jax.Array:
            down_EKP, up_EPN = self._matrices(x_RK.dtype)
            hidden_RP = kernels.grouped_matmul(x_RK, down_EKP, sizes_E)
            hidden_RP = self._own(hidden_RP, adapters_T[tokens_R])
            return y_RN + kernels.grouped_matmul(hidden_RP, up_EPN, sizes_E)

        return lax.cond(jnp.any(adapters_T >= 0), delta, lambda: y_RN)

    def axes(self, inputs: str, outputs: str) -> "LoRAWeight":
        """The same with the logical axes of each of an expert's arrays in its place."""
        down, up = (None, "expert", inputs, None), (None, "expert", None, outputs)
        places: dict[str, Any] = {
            "base": ("expert", inputs, outputs),
            "stack": LoRAStack(down, up),  # pyrefly: ignore[bad-argument-type]
            "adapters_T": None if self.adapters_T is None else (None,),
            "layer": None if self.layer is None else (),
        }
        return replace(self, **places)

    def _delta(self, x: jax.Array, shape: tuple[int, ...], adapters_T: jax.Array) -> jax.Array:
        down_KP, up_PN = self._matrices(x.dtype)
        x_TK = x.reshape(len(adapters_T), down_KP.shape[0])
        return (self._own(x_TK @ down_KP, adapters_T) @ up_PN).reshape(shape)

    def _matrices(self, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """The layer's."""
        layer = jnp.int32(0) if self.layer is None else self.layer
        stacks = (self.stack.down_LKP, self.stack.up_LPN)
        down, up = (lax.dynamic_index_in_dim(stack, layer, keepdims=False) for stack in stacks)
        return down.astype(dtype), up.astype(dtype)

    def _own(self, hidden: jax.Array, adapters: jax.Array) -> jax.Array:
        """Hidden rows [., P] with zeros where they are not of the row's adapter."""
        slot_P = jnp.arange(hidden.shape[1], dtype=jnp.int32) // self.rank
        return jnp.where(adapters[:, None] == slot_P, hidden, 0)


@jax.jit
def write_slot(
    stack: LoRAStack, slot: jax.Array, down_LKR: jax.Array, up_LRN: jax.Array
) -> LoRAStack:
    """The stack with one slot replaced; matrices of a smaller rank are filled up with zeros."""
    start, dtype = slot * down_LKR.shape[-1], stack.down_LKP.dtype
    put = lax.dynamic_update_slice_in_dim
    down = put(stack.down_LKP, down_LKR.astype(dtype), start, axis=-1)
    return LoRAStack(down, put(stack.up_LPN, up_LRN.astype(dtype), start, axis=-2))


def attach(state: nnx.State, stacks: dict[str, LoRAStack], rank: int) -> nnx.State:
    """The state with adapters around the weights that have a stack.

    Args:
        state: a model's parameters.
        stacks: by path, such as layers/attention/q/kernel.
    """
    found = []
    for path, variable in nnx.to_flat_state(state):
        stack = stacks.get("/".join(map(str, path)))
        if stack is not None:
            base = variable.get_value()
            weight = LoRAWeight(base=base, stack=stack, adapters_T=None, layer=None, rank=rank)
            variable = variable.replace(weight)
        found.append((path, variable))
    return nnx.from_flat_state(found)


def bind(state: nnx.State, adapters_T: jax.Array) -> nnx.State:
    """The state whose weights know each token's adapter.

    Args:
        state: from `attach`.
        adapters_T: int32 slot of each token's adapter, -1 for none.
    """
    found = []
    for path, variable in nnx.to_flat_state(state):
        weight = variable.get_value()
        if isinstance(weight, LoRAWeight):
            variable = variable.replace(replace(weight, adapters_T=adapters_T))
        found.append((path, variable))
    return nnx.from_flat_state(found)
