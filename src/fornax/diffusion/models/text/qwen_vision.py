"""The image encoder of Qwen2.5-VL (Bai et al. 2025), whose states stand among a prompt's tokens.

Legend: B images of one size, H height, W width, T patches, N heads, D width, E width of the
language model.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.config.errors import ConfigError
from fornax.diffusion.models.parts import MLP, Dense, GatedMLP, Make, RMSNorm
from fornax.models import stack_layers
from fornax.models.scope import scoped

__all__ = ["QwenVisionConfig", "QwenVisionEncoder", "fitted"]

_EPS = 1e-6
"""Of the norms."""
_THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class QwenVisionConfig:
    """What the encoder is; the defaults are those of Qwen2.5-VL 7B."""

    hidden_size: int = 1_280
    """D."""
    intermediate_size: int = 3_420
    """Hidden width of the MLPs."""
    num_layers: int = 32
    num_heads: int = 16
    """N."""
    frames: int = 2
    """Frames of a patch; an image is repeated for each."""
    patch_size: int = 14
    """Pixels of a patch's side."""
    merge: int = 2
    """Patches along the side of the square that becomes one state."""
    window_size: int = 112
    """Pixels along the side of the windows within which layers attend."""
    full_layers: tuple[int, ...] = (7, 15, 23, 31)
    """Those which attend over the whole image."""
    outputs: int = 3_584
    """E."""

    def __post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_heads):
            raise ConfigError(
                f"hidden_size={self.hidden_size} does not divide into num_heads={self.num_heads} "
                "of a width in fours, whose parts turn by rows and columns; use another"
            )

    @property
    def multiple(self) -> int:
        """Pixels of the side of what becomes one state."""
        return self.patch_size * self.merge


class _Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: QwenVisionConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        width = config.hidden_size
        heads = {"heads": config.num_heads, "head_dim": width // config.num_heads}
        self.attention_norm = RMSNorm(width, eps=_EPS, dtype=dtype)
        self.q, self.k, self.v = (Dense(width, heads, **make) for _ in range(3))
        self.out = Dense(heads, {"embed": width}, **make)
        self.mlp_norm = RMSNorm(width, eps=_EPS, dtype=dtype)
        self.mlp = GatedMLP(width, config.intermediate_size, width, activation="silu", **make)

    @scoped
    def __call__(
        self, x_BTD: jax.Array, rope: tuple[jax.Array, jax.Array], groups_BT: jax.Array
    ) -> jax.Array:
        y_BTD = self.attention_norm(x_BTD)
        q_BTNH, k_BTNH = (
            kernels.rotary_embedding(part(y_BTD), *rope, interleaved=False)
            for part in (self.q, self.k)
        )
        o_BTNH = kernels.attention(
            q_BTNH,
            k_BTNH,
            self.v(y_BTD),
            scale=q_BTNH.shape[-1] ** -0.5,
            causal=False,
            segment_ids_q_BT=groups_BT,
            segment_ids_k_BS=groups_BT,
        )
        x_BTD = x_BTD + self.out(o_BTNH)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class QwenVisionEncoder(nnx.Module):
    """Patches, layers of which most attend within windows, and squares of patches as one state.

    Attributes:
      patch: the patches' projection.
      layers: all layers, their parameters with a leading "layers" axis.
      merge_norm: before squares of patches are joined.
      merger: of each square to a state.
    """

    def __init__(
        self,
        config: QwenVisionConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike | None = None,
    ):
        """Make all parameters.

        Args:
          config: what the encoder is.
          rngs: source of randomness.
          dtype: of the parameters.
          compute_dtype: of activations and products; None for that of the parameters.
        """
        compute = dtype if compute_dtype is None else compute_dtype
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute)
        self.config, width = config, config.hidden_size
        places = {"conv": 3 * config.frames * config.patch_size**2}
        self.patch = Dense(places, {"embed": width}, bias=False, **make)
        layer = functools.partial(_Layer, config, dtype=dtype, compute_dtype=compute)
        self.layers = stack_layers(lambda own: layer(rngs=own), config.num_layers, rngs)
        joined = width * config.merge**2
        self.merge_norm = RMSNorm(width, eps=_EPS, dtype=dtype)
        self.merger = MLP(joined, joined, config.outputs, activation="gelu", **make)

    @scoped
    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """The states of images, normalised, [B, rows columns, E], a row after another.

        Raises:
          ConfigError: an image with a side that `QwenVisionConfig.multiple` does not divide.
        """
        config = self.config
        if any(side % config.multiple for side in images_BHWC.shape[1:3]):
            raise ConfigError(
                f"images of shape {images_BHWC.shape} do not divide into squares of "
                f"{config.multiple} pixels; resize them"
            )
        x_BTD = self.patch(_patches(images_BHWC, config))
        places_T2 = _places(images_BHWC.shape[1:3], config)
        windows_T = jnp.asarray(_windows(places_T2, config))
        cos, sin = (
            jnp.broadcast_to(jnp.asarray(part), (x_BTD.shape[0], *part.shape))
            for part in _rotation(places_T2, config)
        )
        graphdef, stacked = nnx.split(self.layers)
        whole_L = jnp.asarray(np.isin(np.arange(config.num_layers), config.full_layers))

        def body(x_BTD: jax.Array, layer: tuple[nnx.State, jax.Array]) -> tuple[jax.Array, None]:
            state, whole = layer
            groups_BT = jnp.broadcast_to(jnp.where(whole, 1, windows_T), x_BTD.shape[:2])
            return nnx.merge(graphdef, state)(x_BTD, (cos, sin), groups_BT), None

        with jax.named_scope("layers"):
            x_BTD, _ = jax.lax.scan(body, x_BTD, (stacked, whole_L))
        x_BTD = self.merge_norm(x_BTD)
        return self.merger(x_BTD.reshape(x_BTD.shape[0], -1, config.merge**2 * x_BTD.shape[-1]))


def _split(size: Sequence[int], config: QwenVisionConfig) -> tuple[int, int, int, int]:
    """Rows and columns of squares, each with its patches, as lengths of four axes."""
    rows, columns = (side // config.multiple for side in size)
    return rows, config.merge, columns, config.merge


def _patches(images_BHWC: jax.Array, config: QwenVisionConfig) -> jax.Array:
    """Places of each patch, frames first and channels last [B, T, ...], square after square."""
    B, H, W, C = images_BHWC.shape
    rows, m, columns, _ = _split((H, W), config)
    p = config.patch_size
    x = images_BHWC.reshape(B, rows, m, p, columns, m, p, C)
    x = x.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(B, -1, 1, p * p * C)
    return jnp.tile(x, (1, 1, config.frames, 1)).reshape(B, x.shape[1], -1)


def _places(size: Sequence[int], config: QwenVisionConfig) -> np.ndarray:
    """Row and column of each patch [T, 2], square after square."""
    rows, m, columns, _ = _split(size, config)
    found = np.indices((rows * m, columns * m))
    found = found.reshape(2, rows, m, columns, m).transpose(1, 3, 2, 4, 0)
    return found.reshape(-1, 2)


def _windows(places_T2: np.ndarray, config: QwenVisionConfig) -> np.ndarray:
    """int32 number of the window of each patch, from 1."""
    side = config.window_size // config.multiple * config.merge
    row, column = (places_T2 // side).T
    return (1 + row * (column.max() + 1) + column).astype(np.int32)


def _rotation(places_T2: np.ndarray, config: QwenVisionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines float32 [T, r]: half the pairs turn by rows, half by columns."""
    count = config.hidden_size // config.num_heads // 4
    rates = _THETA ** -(np.arange(count) / count)
    angles = np.concatenate([np.outer(axis, rates) for axis in places_T2.T], 1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def fitted(size: tuple[int, int], multiple: int, least: int, most: int) -> tuple[int, int]:
    """The size at which an image is read: in multiples, between two areas, of its proportions.

    Args:
      size: height and width in pixels.
      multiple: of both sides.
      least: pixels.
      most: pixels.

    Raises:
      ConfigError: a side 200 times the other.
    """
    if max(size) > 200 * min(size):
        raise ConfigError(
            f"an image of {size[1]}x{size[0]} pixels has a side above 200 times the other; cut it"
        )
    height, width = (round(side / multiple) * multiple for side in size)
    area = math.prod(size)
    if height * width > most:
        scale, to = math.sqrt(most / area), math.floor
    elif height * width < least:
        scale, to = math.sqrt(least / area), math.ceil
    else:
        return height, width
    height, width = (max(1, to(side * scale / multiple)) * multiple for side in size)
    return height, width
