"""The matrices of all layers in one array, of which a grouped product reads one layer in place.

Legend: L layers, E groups, K inputs, N outputs.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["GroupedWeight"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GroupedWeight:
    """A stack of matrices for `kernels.grouped_matmul` that only reads them. It has no gradient.

    A pytree: in a scan over layers keep the stack outside the loop and take `weight.at(layer)`
    inside. A slice of the array would be copied for a kernel, with all groups that have no rows.
    """

    values_LEKN: jax.Array
    layer: jax.Array | None = None
    """int32: which layer of the stack this is; None for the stack itself."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array this stands for."""
        return self.values_LEKN.shape if self.layer is None else self.values_LEKN.shape[1:]

    @property
    def ndim(self) -> int:
        """Number of axes of the array this stands for."""
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the array this stands for."""
        return self.values_LEKN.dtype

    def at(self, layer: jax.Array | int) -> "GroupedWeight":
        """Return one layer of the stack, without copying it."""
        return replace(self, layer=jnp.asarray(layer, jnp.int32))

    def array(self) -> jax.Array:
        """Return the matrices [E, K, N] of the layer that this is."""
        assert self.layer is not None, "a stack; take a layer with at()"
        return lax.dynamic_index_in_dim(self.values_LEKN, self.layer, keepdims=False)
