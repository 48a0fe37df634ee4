"""A value for each token: a linear head that a decoder carries beside its own output.

Legend: R rows, T tokens of a row, D model width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.models import Decoder

__all__ = ["ValueHead", "ValueParam", "attach_value_head", "without_value_head"]

_NAME = "value_head"


class ValueParam(nnx.Param):
    """A parameter of a value head."""


class ValueHead(nnx.Module):
    """v = x w + b; zero at the start, so that the first advantages are the rewards."""

    def __init__(self, width: int):
        """Make the parameters for hidden states of `width` numbers."""
        self.kernel = ValueParam(jnp.zeros((width,), jnp.float32), axes=("embed",))
        self.bias = ValueParam(jnp.zeros((), jnp.float32), axes=())

    def __call__(self, x_RTD: jax.Array) -> jax.Array:
        """float32 values [R, T] of hidden states."""
        return x_RTD.astype(jnp.float32) @ self.kernel[...] + self.bias[...]


def attach_value_head(model: Any) -> Any:
    """Put a fresh head on a decoder, in place; nothing else about it changes."""
    assert isinstance(model, Decoder)
    setattr(model, _NAME, ValueHead(model.config.hidden_size))
    return model


def without_value_head(model: Any) -> Any:
    """The decoder without a value head; itself where it has none."""
    if not hasattr(model, _NAME):
        return model
    graphdef, state = nnx.split(model)
    plain = nnx.merge(graphdef, state)
    delattr(plain, _NAME)
    return plain
