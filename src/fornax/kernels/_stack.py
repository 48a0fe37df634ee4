"""The arrays of all layers in one, of which a kernel reads one layer in place."""

from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["LayerStack"]


@dataclass(frozen=True, kw_only=True)
class LayerStack:
    """A stack that is only read; it has no gradient.

    Its kinds are pytrees: in a scan over layers keep the stack outside the loop and take
    `stack.at(layer)` inside. A slice of the array would be copied for a kernel.
    """

    values: jax.Array
    """[L, ...]."""
    layer: jax.Array | None = None
    """int32: which layer of the stack this is; None for the stack itself."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array this stands for."""
        return self.values.shape if self.layer is None else self.values.shape[1:]

    @property
    def ndim(self) -> int:
        """Number of axes of the array this stands for."""
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the array this stands for."""
        return self.values.dtype

    def at(self, layer: jax.Array | int) -> Self:
        """Return one layer of the stack, without copying it."""
        return replace(self, layer=jnp.asarray(layer, jnp.int32))

    def array(self) -> jax.Array:
        """Return the array of the layer that this is."""
        assert self.layer is not None, "a stack; take a layer with at()"
        return lax.dynamic_index_in_dim(self.values, self.layer, keepdims=False)
