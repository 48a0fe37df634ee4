"""Layers that the networks of diffusion models are made of: products, convolutions, norms, MLPs and
the embedding of the time. Channels come last.

Legend: B batch, C channels in, N channels out, D width, F hidden width.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.config.errors import ConfigError
from fornax.kernels import checkpoint_name
from fornax.mesh import constrain, dividing
from fornax.models.projection import Projection, draw
from fornax.models.scope import scoped

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Activation",
    "Conv",
    "Dense",
    "Embedding",
    "GatedMLP",
    "GroupNorm",
    "LayerNorm",
    "Make",
    "RMSNorm",
    "activation",
    "constrain_tokens",
    "timestep_embedding",
]

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_sigmoid", "relu"]
"""`gelu_sigmoid` is x sigmoid(1.702 x) (Hendrycks and Gimpel 2016)."""

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    **kernels.ACTIVATIONS,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_sigmoid": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
}


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation of a name.

    Raises:
      ConfigError: for another name.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"activation {name!r} is not known; use one of {', '.join(get_args(Activation))}"
        )
    return ACTIVATIONS[name]


class Make(TypedDict):
    """What every layer with parameters takes: `Dense(64, 64, **make)`."""

    rngs: nnx.Rngs
    dtype: DTypeLike
    """Of the parameters."""
    compute_dtype: DTypeLike
    """Of the products."""


class Dense(Projection):
    """A linear layer of the last axis, or groups of last axes, with the weights' logical axes.

    Attributes:
      kernel: [*inputs, *outputs].
      bias: [*outputs], or None.
    """

    def __init__(
        self,
        inputs: int | dict[str, int],
        outputs: int | dict[str, int],
        *,
        bias: bool = True,
        std: float | None = None,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parameters.

        Args:
          inputs: size by logical axis; a bare size is of `embed`.
          outputs: size by logical axis; a bare size is of `mlp`.
          bias: whether a bias is added.
          std: of the initial kernel, 0 for zeros; None for sqrt(2 / (in + out)) (Glorot and
            Bengio 2010).
          rngs: source of randomness.
          dtype: of the parameters.
          compute_dtype: of the product.
        """
        inputs = {"embed": inputs} if isinstance(inputs, int) else inputs
        outputs = {"mlp": outputs} if isinstance(outputs, int) else outputs
        if std is None:
            std = math.sqrt(2 / (math.prod(inputs.values()) + math.prod(outputs.values())))
        super().__init__(
            inputs,
            outputs,
            bias=bias,
            std=std,
            rngs=rngs,
            dtype=dtype,
            compute_dtype=compute_dtype,
        )


class Embedding(nnx.Module):
    """A table of learned rows.

    Attributes:
      table: [rows, D].
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        std: float = 0.02,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Draw the rows of a normal of deviation `std`."""
        drawn = draw(rngs.params(), (rows, width), dtype, std)
        self.table = nnx.Param(drawn, axes=(None, "norm"))
        self.compute_dtype = compute_dtype

    @scoped
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Look up int32 ids [...] -> [..., D] in the compute dtype."""
        return kernels.take_rows(self.table[...], ids, dtype=self.compute_dtype)


class Conv(nnx.Module):
    """A convolution of an image [B, H, W, C] or a video [B, E, H, W, C], as cross-correlation.

    Attributes:
      kernel: [*window, C, N].
      bias: [N], or None.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        window: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[tuple[int, int]] | None = None,
        groups: int = 1,
        bias: bool = True,
        std: float | None = None,
        axes: tuple[str | None, str | None] = ("embed", "mlp"),
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parameters.

        Args:
          inputs: C.
          outputs: N.
          window: of each axis; a bare size is of both axes of an image.
          stride: for all axes or each.
          padding: zeros before and after each axis; a number is of both sides of all; None keeps
            the size, for odd windows with stride 1.
          groups: of channels and outputs that convolve on their own; C for a depthwise one. The
            kernel is then [*window, C / groups, N].
          bias: whether a bias is added.
          std: of the initial kernel, 0 for zeros; None for 1 / sqrt(inputs of an output).
          axes: logical axes of C and N; None where a size such as 3 cannot be divided.
          rngs: source of randomness.
          dtype: of the parameters.
          compute_dtype: of the product.
        """
        window = (window, window) if isinstance(window, int) else tuple(window)
        if isinstance(padding, int):
            padding = ((padding, padding),) * len(window)
        self.stride = stride if isinstance(stride, int) else tuple(stride)
        self.padding = padding
        self.groups, self.compute_dtype = groups, compute_dtype
        inputs //= groups
        fan_in = math.prod(window) * inputs
        std = fan_in**-0.5 if std is None else std
        matrix = draw(rngs.params(), (fan_in, outputs), dtype, std)
        none = (None,) * len(window)
        self.kernel = nnx.Param(matrix.reshape(*window, inputs, outputs), axes=(*none, *axes))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype), axes=axes[1:]) if bias else None

    @scoped
    def __call__(self, x_BC: jax.Array) -> jax.Array:
        """Apply -> y [B, ..., N] in the compute dtype."""
        dtype = self.compute_dtype
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        if self.groups > 1:
            return self._grouped(x_BC.astype(dtype), kernel.astype(dtype), bias)
        return kernels.convolution(
            x_BC.astype(dtype), kernel, bias, stride=self.stride, padding=self.padding
        )

    def _grouped(self, x_BC: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        """As `kernels.convolution`, which has no groups, rounds in XLA."""
        axes = x_BC.ndim - 2
        letters = "DHW"[-axes:]
        same = tuple(((w - 1) // 2, w // 2) for w in kernel.shape[:axes])
        y_BN = jax.lax.conv_general_dilated(
            x_BC,
            kernel,
            (self.stride,) * axes if isinstance(self.stride, int) else self.stride,
            same if self.padding is None else self.padding,
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
            feature_group_count=self.groups,
        )
        return y_BN if bias is None else y_BN + bias.astype(y_BN.dtype)


class GroupNorm(nnx.Module):
    """Normalise each image over its places and groups of channels, in float32 (Wu and He 2018).

    Attributes:
      scale: [C].
      bias: [C].
    """

    def __init__(self, channels: int, *, groups: int, eps: float, dtype: DTypeLike):
        """Make a scale of ones and a bias of zeros."""
        self.groups, self.eps = groups, eps
        self.scale = nnx.Param(jnp.ones((channels,), dtype), axes=("norm",))
        self.bias = nnx.Param(jnp.zeros((channels,), dtype), axes=("norm",))

    @scoped
    def __call__(self, x_BC: jax.Array, *, activation: Literal["silu"] | None = None) -> jax.Array:
        """Normalise x [B, ..., C], then apply the activation; the dtype is that of x."""
        return kernels.group_norm(
            x_BC,
            self.scale[...],
            self.bias[...],
            groups=self.groups,
            eps=self.eps,
            activation=activation,
        )


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * scale + bias, in float32 (Ba et al. 2016).

    Attributes:
      scale: [D], or None.
      bias: [D], or None.
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float,
        scale: bool = True,
        bias: bool = True,
        dtype: DTypeLike = jnp.float32,
    ):
        """Make a scale of ones and a bias of zeros, where there are any."""
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((width,), dtype), axes=("norm",)) if scale else None
        self.bias = nnx.Param(jnp.zeros((width,), dtype), axes=("norm",)) if bias else None

    @scoped
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis of `x`; the result has the dtype of `x`."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, -1, keepdims=True)
        y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        if self.scale is not None:
            y = y * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale + bias, in float32 (Zhang and Sennrich 2019).

    Attributes:
      scale: [D], or None.
      bias: [D], or None.
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float,
        scale: bool = True,
        bias: bool = False,
        dtype: DTypeLike = jnp.float32,
    ):
        """Make a scale of ones and a bias of zeros, where there are any."""
        self.eps, self.width = eps, width
        self.scale = nnx.Param(jnp.ones((width,), dtype), axes=("norm",)) if scale else None
        self.bias = nnx.Param(jnp.zeros((width,), dtype), axes=("norm",)) if bias else None

    @scoped
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis of `x`; the result has the dtype of `x`."""
        ones = jnp.ones((self.width,), jnp.float32)
        scale = ones if self.scale is None else self.scale[...]
        y = kernels.rms_norm(x, scale, eps=self.eps)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class MLP(nnx.Module):
    """down(activation(up(x))): a plain MLP, of time embeddings and projections of texts too."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        *,
        activation: Activation,
        bias: bool = True,
        down_bias: bool | None = None,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make both projections; `down_bias` None is `bias`."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.up = Dense(inputs, hidden, bias=bias, **make)
        down_bias = bias if down_bias is None else down_bias
        self.down = Dense({"mlp": hidden}, {"embed": outputs}, bias=down_bias, **make)
        self.activation = _named(activation)

    @scoped
    def __call__(self, x_D: jax.Array) -> jax.Array:
        """Apply to the last axis of x [..., D] -> y [..., outputs]."""
        up_F = checkpoint_name(self.up(x_D), "mlp_up")
        h_F = _activated(self.activation, up_F)
        return checkpoint_name(self.down(_hidden(h_F)), "mlp_down")


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020): GEGLU with `gelu`, SwiGLU with `silu`."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        *,
        activation: Activation,
        bias: bool = True,
        down_bias: bool | None = None,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the three projections; `down_bias` None is `bias`."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.gate = Dense(inputs, hidden, bias=bias, **make)
        self.up = Dense(inputs, hidden, bias=bias, **make)
        down_bias = bias if down_bias is None else down_bias
        self.down = Dense({"mlp": hidden}, {"embed": outputs}, bias=down_bias, **make)
        self.activation = _named(activation)

    @scoped
    def __call__(self, x_D: jax.Array) -> jax.Array:
        """Apply to the last axis of x [..., D] -> y [..., outputs]."""
        gate_F = checkpoint_name(self.gate(x_D), "mlp_gate")
        up_F = checkpoint_name(self.up(x_D), "mlp_up")
        if self.activation in kernels.ACTIVATIONS:
            h_F = kernels.gated_linear_unit(gate_F, up_F, activation=self.activation)  # pyrefly: ignore[bad-argument-type]
        else:
            h_F = _activated(self.activation, gate_F, up_F)
        return checkpoint_name(self.down(_hidden(h_F)), "mlp_down")


def _activated(name: str, x_F: jax.Array, factor_F: jax.Array | None = None) -> jax.Array:
    """The activation of x, times a factor, in float32 and rounded once."""
    wide = jnp.promote_types(x_F.dtype, jnp.float32)
    y_F = ACTIVATIONS[name](x_F.astype(wide))
    return (y_F if factor_F is None else y_F * factor_F.astype(wide)).astype(x_F.dtype)


def _named(name: str) -> str:
    activation(name)
    return name


def _hidden(h_F: jax.Array) -> jax.Array:
    """`h_F` with its layout on the mesh: of tokens [B, T, F], or of one vector for each row."""
    if h_F.ndim == 3:
        return constrain_tokens(h_F, "activation_mlp")
    return constrain(h_F, ("batch", "activation_mlp")) if h_F.ndim == 2 else h_F


def constrain_tokens(x_BTD: jax.Array, *last: str | None) -> jax.Array:
    """Tokens [B, T, ...] with their layout on the mesh fixed by logical axes, those after T given.

    A length that the mesh's axes do not divide, such as a text's, is not divided.
    """
    length = "length" if dividing("length", x_BTD.shape[1]) else None
    return constrain(x_BTD, ("batch", length, *last))


def timestep_embedding(
    time_B: jax.Array,
    width: int,
    *,
    cosines_first: bool = True,
    frequency_shift: float = 0.0,
    scale: float = 1.0,
    max_period: float = 10_000.0,
) -> jax.Array:
    """Sines and cosines of the time at geometric frequencies (Ho et al. 2020).

    Of half the width n, frequency i is scale * max_period^(-i / (n - frequency_shift)).

    Args:
      time_B: times, converted to float32, which tells 999 from 1000 (bfloat16 does not).
      width: of the embedding; an odd one ends in a zero.
      cosines_first: whether cosines come before sines.
      frequency_shift: 1 makes the last frequency 1 / max_period.
      scale: factor on the time.
      max_period: of the slowest.

    Returns:
      float32 [B, width].

    Raises:
      ConfigError: a width too small for its shift.
    """
    half = width // 2
    if half <= frequency_shift:
        raise ConfigError(
            f"a time embedding of width {width} has {half} frequencies, and frequency_shift="
            f"{frequency_shift} needs more; use a width of at least 4"
        )
    rate = -math.log(max_period) / (half - frequency_shift)
    # In NumPy, rounded once: XLA makes other last digits in other programs, and at time 1000 they
    # are a ten-thousandth of an angle.
    frequencies = np.exp(rate * np.arange(half)).astype(np.float32)
    angles = scale * (time_B.astype(jnp.float32)[:, None] * frequencies)
    parts = [jnp.sin(angles), jnp.cos(angles)]
    if cosines_first:
        parts.reverse()
    if width % 2:
        parts.append(jnp.zeros((time_B.shape[0], 1), jnp.float32))
    return jnp.concatenate(parts, axis=-1)
