"""Linear layers between groups of axes, and the table of embeddings."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.models.config import DecoderConfig
from fornax.models.scope import scoped

__all__ = ["Embed", "Projection", "draw", "project", "residual_std"]


def draw(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, std: float) -> jax.Array:
    """Initial weights: a normal of deviation `std`, cut at three of them."""
    return (std * jax.random.truncated_normal(key, -3.0, 3.0, shape)).astype(dtype)


class Projection(nnx.Module):
    """A linear layer between groups of axes: x[..., *inputs] -> y[..., *outputs].

    Attributes:
      kernel: [*inputs, *outputs].
      bias: [*outputs], or None.
    """

    def __init__(
        self,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        bias: bool,
        std: float,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parameters.

        Args:
          inputs: logical axis to size of the axes summed over.
          outputs: logical axis to size of the axes produced.
          bias: whether a bias is added.
          std: standard deviation of the initial kernel.
          rngs: source of randomness.
          dtype: parameter dtype.
          compute_dtype: dtype of the product.
        """
        shape = (*inputs.values(), *outputs.values())
        axes = (*inputs, *outputs)
        self.num_inputs = len(inputs)
        self.compute_dtype = compute_dtype
        # Drawn as a matrix: the same values, and twice as fast to compile as three axes or four.
        matrix = (math.prod(inputs.values()), math.prod(outputs.values()))
        drawn = draw(rngs.params(), matrix, dtype, std)
        self.kernel = nnx.Param(drawn.reshape(shape), axes=axes)
        zeros = jnp.zeros(tuple(outputs.values()), dtype)
        self.bias = nnx.Param(zeros, axes=tuple(outputs)) if bias else None

    @scoped
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply to the last axes of `x`; the result is in the compute dtype."""
        kernel = self.kernel.get_value()
        if isinstance(kernel, jax.Array):  # otherwise a weight that knows its own product
            kernel = kernel.astype(self.compute_dtype)
        y = kernels.linear(x.astype(self.compute_dtype), kernel, inputs=self.num_inputs)
        return self.add_bias(y)

    def add_bias(self, y: jax.Array) -> jax.Array:
        """Return y [..., *outputs] with the bias, if there is one.

        The sum is rounded as one in the compute dtype is. It is made in float32 for the bias's
        gradient, which then sums over rows in float32, as products do over theirs.
        """
        if self.bias is None:
            return y
        bias = self.bias[...].astype(self.compute_dtype)
        wide = jnp.promote_types(self.compute_dtype, jnp.float32)
        return (y.astype(wide) + bias.astype(wide)).astype(self.compute_dtype)


def project(x: jax.Array, *modules: Projection) -> list[jax.Array]:
    """Apply projections that sum over the same axes of `x`; packed ones share a call.

    Whatever else is in a projection's place is called as it is.
    """
    weights = [m.kernel.get_value() for m in modules if type(m) is Projection]
    packed = [weight for weight in weights if isinstance(weight, kernels.PackedWeight)]
    if len(packed) < len(modules):
        return [module(x) for module in modules]
    first = modules[0]
    found = kernels.linears(x.astype(first.compute_dtype), packed, inputs=first.num_inputs)
    return [module.add_bias(y) for module, y in zip(modules, found, strict=True)]


class Embed(nnx.Module):
    """The table of token embeddings.

    Attributes:
      embedding: [V, D].
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the table."""
        shape = (config.vocab_size, config.hidden_size)
        table = draw(rngs.params(), shape, dtype, config.initializer_range)
        self.embedding = nnx.Param(table, axes=("vocab", "embed"))
        self.scale = config.embedding_scale
        self.compute_dtype = compute_dtype

    @scoped
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Look up tokens -> x [B, T, D] in the compute dtype."""
        x_BTD = kernels.take_rows(self.embedding[...], tokens_BT, dtype=self.compute_dtype)
        if self.scale != 1.0:
            x_BTD = x_BTD * jnp.asarray(self.scale, self.compute_dtype)
        return x_BTD


def residual_std(config: DecoderConfig) -> float:
    """Initial deviation of projections into the residual stream (GPT-2, section 2.3)."""
    shrink = math.sqrt(2 * config.num_layers) if config.scale_residual_init else 1.0
    return config.initializer_range / shrink
