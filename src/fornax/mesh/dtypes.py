"""Which dtype parameters are kept in and which one products are computed in."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from fornax.config.errors import ConfigError

__all__ = ["DtypePolicy", "parse_dtype"]

_DTYPES = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "float64": jnp.float64,
}


def parse_dtype(name: str) -> np.dtype:
    """The dtype called `name` (float32, bfloat16, float16, float64).

    Raises:
      ConfigError: for any other name.
    """
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is not known; use one of {', '.join(_DTYPES)}")
    return np.dtype(_DTYPES[name])


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """Mixed precision: parameters in one dtype, products in another; updates in float32."""

    params: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which parameters are kept. Gradients are added up, and the optimizer works and keeps
    its state, in float32; its result is rounded stochastically to bfloat16 parameters."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and of the operands of matrix products; norms, softmax and the loss
    stay in float32."""

    @property
    def param_dtype(self) -> np.dtype:
        """`params` as a numpy dtype."""
        return parse_dtype(self.params)

    @property
    def compute_dtype(self) -> np.dtype:
        """`compute` as a numpy dtype."""
        return parse_dtype(self.compute)
