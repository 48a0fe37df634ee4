"""Experts with an adapter each: their products over rows that are sorted by expert.

The rows run through A and B as they run through the base, so no kernel is merged: that would make
a second array of the kernels' size in each pass.

Legend: E experts, K inputs, N outputs, R rank, A rows (R in `SortedRows`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from fornax import kernels
from fornax.adapters.quantize import Blocks, dequantize
from fornax.models.dispatch import SortedRows

__all__ = ["LoRAExperts", "remaking"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LoRAExperts:
    """A `models.dispatch.ExpertWeight`: a matrix for each expert, and an adapter around each."""

    base: jax.Array | tuple[jax.Array, jax.Array]
    """[E, K, N] in the dtype of the products, or its codes and scales, with `blocks`."""
    a_EKR: jax.Array | None
    """None: the adapters are switched off."""
    b_ERN: jax.Array | None
    """Scaled."""
    change_EN: jax.Array | None = None
    """DoRA's factor of each output, less one."""
    blocks: Blocks | None = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, K, N] of the device's part."""
        base, blocks = self.base, self.blocks
        if not isinstance(base, tuple):
            return base.shape
        assert blocks is not None, "codes without their blocks"
        experts, count, outputs = base[1].shape
        return (experts, count * blocks.size, outputs)

    def grouped(self, x_AK: jax.Array, rows: SortedRows) -> jax.Array:
        """The rows' products with base and adapter [A, N], in the dtype of x."""
        y_AN = self._of_base(x_AK, rows.sizes_E)
        if self.a_EKR is None or self.b_ERN is None:
            return y_AN
        with jax.named_scope("adapter"):
            hidden_AR = kernels.grouped_matmul(x_AK, self.a_EKR, rows.sizes_E)
            y_AN = y_AN + kernels.grouped_matmul(hidden_AR, self.b_ERN, rows.sizes_E)
            return y_AN if self.change_EN is None else y_AN + self.change_EN[rows.experts_R] * y_AN

    def _of_base(self, x_AK: jax.Array, sizes_E: jax.Array) -> jax.Array:
        base, blocks = self.base, self.blocks
        if not isinstance(base, tuple):
            return kernels.grouped_matmul(x_AK, base, sizes_E)
        assert blocks is not None, "codes without their blocks"

        def apply(x_AK: jax.Array, codes: jax.Array, scale: jax.Array, sizes_E: jax.Array) -> Any:
            kernel_EKN = dequantize(codes, scale, blocks).astype(x_AK.dtype)
            return kernels.grouped_matmul(x_AK, kernel_EKN, sizes_E)

        return remaking(apply, x_AK, *base, sizes_E)

    def axes(self, inputs: str, outputs: str) -> "LoRAExperts":
        """The same with the logical axes of each array in its place."""
        assert self.blocks is None, "codes are not divided"
        places: dict[str, Any] = {"base": ("expert", inputs, outputs)}
        places["a_EKR"] = None if self.a_EKR is None else ("expert", inputs, None)
        places["b_ERN"] = None if self.b_ERN is None else ("expert", None, outputs)
        places["change_EN"] = None if self.change_EN is None else ("expert", outputs)
        return LoRAExperts(**places)


def remaking(apply: Callable[..., jax.Array], x: jax.Array, *weights: jax.Array) -> jax.Array:
    """`apply(x, *weights)`, linear in x, whose passes make again what they need of the weights.

    The weights have no gradient. A rule of its own, because `jax.checkpoint` would leave what is
    saved to the policy of one around it.
    """

    def forward(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, object]:
        return apply(x, *weights), weights

    def backward(weights: Any, dy: jax.Array) -> tuple[jax.Array | None, ...]:
        _, of_x = jax.vjp(lambda x: apply(x, *weights), jnp.zeros(like.shape, like.dtype))
        return of_x(dy)[0], *(None for _ in weights)

    like = jax.typeof(x)
    product = jax.custom_vjp(apply)
    product.defvjp(forward, backward)
    return product(x, *weights)
