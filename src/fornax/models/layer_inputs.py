"""Inputs of each layer beside the residual stream, and the number that scales its output.

Legend: B batch, T tokens, D model width, L layers, P width of a layer's input, U table rows.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.models.config import DecoderConfig
from fornax.models.norm import RMSNorm
from fornax.models.projection import Projection, draw, residual_std
from fornax.models.scope import scoped

__all__ = ["LayerInput", "LayerInputs", "LayerScale"]


class LayerInputs(nnx.Module):
    """The inputs of all layers: (table(tokens) sqrt(P) + norm(projection(x) / sqrt(D))) / sqrt(2).

    Per-layer embeddings, as transformers' `Gemma4TextModel.project_per_layer_inputs` has them.

    Attributes:
      embedding: [U, L P], the rows of all layers side by side.
      projection: from the first layer's input.
      norm: over P, the same for all layers.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the table, the projection and the norm.

        Raises:
          ValueError: when the config has no such inputs.
        """
        inputs = config.layer_inputs
        if inputs is None:
            raise ValueError("the config has no layer_inputs")
        width = config.num_layers * inputs.width
        table = draw(rngs.params(), (inputs.vocab_size, width), dtype, config.initializer_range)
        self.embedding = nnx.Param(table, axes=("vocab", "layer_input"))
        self.projection = Projection(
            {"embed": config.hidden_size},
            {"layer_input": width},
            bias=False,
            std=config.initializer_range,
            rngs=rngs,
            dtype=dtype,
            compute_dtype=compute_dtype,
        )
        self.norm = RMSNorm((inputs.width,), config, dtype=dtype)
        self.layers = config.num_layers
        self.compute_dtype = compute_dtype

    @scoped
    def __call__(self, tokens_BT: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Inputs [L, B, T, P] of tokens whose embeddings are x, in the compute dtype."""
        split = (*tokens_BT.shape, self.layers, -1)
        own_BTLP = kernels.take_rows(self.embedding[...], tokens_BT, dtype=self.compute_dtype)
        own_BTLP = own_BTLP.reshape(split)
        own_BTLP = own_BTLP * jnp.asarray(math.sqrt(own_BTLP.shape[-1]), self.compute_dtype)
        seen_BTLP = self.projection(x_BTD).reshape(split)
        seen_BTLP = self.norm(seen_BTLP * jnp.asarray(x_BTD.shape[-1] ** -0.5, self.compute_dtype))
        both_BTLP = (own_BTLP + seen_BTLP) * jnp.asarray(2**-0.5, self.compute_dtype)
        return jnp.moveaxis(both_BTLP, 2, 0)


class LayerInput(nnx.Module):
    """What a layer makes of its input: norm(projection(activation(gate(x)) * input))."""

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the projections and the norm.

        Raises:
          ValueError: when the config has no such inputs.
        """
        inputs = config.layer_inputs
        if inputs is None:
            raise ValueError("the config has no layer_inputs")
        make = functools.partial(
            Projection, bias=False, rngs=rngs, dtype=dtype, compute_dtype=compute_dtype
        )
        embed, own = {"embed": config.hidden_size}, {"layer_input": inputs.width}
        self.gate = make(embed, own, std=config.initializer_range)
        self.projection = make(own, embed, std=residual_std(config))
        self.norm = RMSNorm((config.hidden_size,), config, dtype=dtype)
        self.activation = config.activation

    @scoped
    def __call__(self, x_BTD: jax.Array, input_BTP: jax.Array) -> jax.Array:
        """What is added to the residual stream [B, T, D]."""
        gate_BTP = self.gate(x_BTD)
        gated_BTP = kernels.gated_linear_unit(gate_BTP, input_BTP, activation=self.activation)
        return self.norm(self.projection(gated_BTP))


class LayerScale(nnx.Module):
    """A layer's output times a learned number."""

    def __init__(self, *, dtype: DTypeLike):
        """Make the number, 1."""
        self.scale = nnx.Param(jnp.ones((1,), dtype), axes=("norm",))

    @scoped
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Scale x [B, T, D]."""
        return x_BTD * self.scale[...].astype(x_BTD.dtype)
