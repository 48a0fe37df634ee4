"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.models.config import DecoderConfig
from fornax.models.scope import scoped

__all__ = ["RMSNorm"]


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32 (Zhang and Sennrich 2019).

    Attributes:
      scale: the weight, of the normalised axes' shape.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        config: DecoderConfig,
        *,
        dtype: DTypeLike,
        eps: float | None = None,
        unit_offset: bool | None = None,
        divisor: float = 1.0,
    ):
        """Make the scale: ones, or zeros where the norm multiplies by (1 + scale).

        Args:
          shape: of the normalised axes.
          config: the model's.
          dtype: of the scale.
          eps: None for the model's `norm_eps`.
          unit_offset: whether it multiplies by (1 + scale); None for the model's
            `norm_unit_offset`.
          divisor: what the result is divided by.
        """
        self.divisor = divisor
        self.unit_offset = config.norm_unit_offset if unit_offset is None else unit_offset
        initial = jnp.zeros if self.unit_offset else jnp.ones
        self.eps = config.norm_eps if eps is None else eps
        self.scale = nnx.Param(initial(shape, dtype), axes=("norm",) * len(shape))

    @scoped
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axes of `x`; the result has the dtype of `x`."""
        return kernels.rms_norm(
            x, self.scale.get_value(), eps=self.eps, offset=self._offset, divisor=self.divisor
        )

    @scoped
    def of_sum(self, x: jax.Array, branch: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return x + branch, and its norm."""
        scale, offset = self.scale.get_value(), self._offset
        return kernels.add_rms_norm(
            x, branch, scale, eps=self.eps, offset=offset, divisor=self.divisor
        )

    @property
    def _offset(self) -> float:
        return 1.0 if self.unit_offset else 0.0
