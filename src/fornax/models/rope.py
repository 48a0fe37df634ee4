"""Rotary position embeddings and every scaling of their frequencies.

Legend: B batch, T tokens, N heads, H head width, R rotated width (R <= H).
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig
from fornax.models.rope_config import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)

__all__ = [
    "Rotation",
    "attention_factor",
    "inverse_frequencies",
    "rotations",
    "sectioned_rotations",
]


class Rotation(NamedTuple):
    """By which angles tokens rotate."""

    cos_BTr: jax.Array
    """float32 [B, T, R / 2]."""
    sin_BTr: jax.Array
    interleaved: bool = False
    """See `RopeConfig`."""


def rotations(
    config: DecoderConfig, positions_BT: jax.Array, longest: int | None = None
) -> Mapping[str, Rotation]:
    """Cosines and sines for each rotary embedding of the model, by `LayerKind.rope`.

    Computed once a forward pass, outside the layers.

    Args:
      config: the model's.
      positions_BT: int32 positions.
      longest: length that the two scalings which look at the longest position go by; None takes
        the batch's own.
    """
    used = {kind.rope for kind in config.kinds_with_modules()}
    ropes = {"global": config.rope, "local": config.local_rope or config.rope}
    found: dict[str, Rotation] = {}
    for name, rope in ropes.items():
        if name in used:
            width = config.rotated_width(rope, wide=name == "global")
            found[name] = _rotation(rope, config, width, positions_BT, longest)
    return found


def sectioned_rotations(
    config: DecoderConfig, positions_ABT: jax.Array, sections: Sequence[int]
) -> Mapping[str, Rotation]:
    """As `rotations`, where positions are of A axes and each section of a head's pairs has one.

    Args:
      config: the model's.
      positions_ABT: int32 positions on each axis.
      sections: pairs of each section; the i-th turns by axis i modulo A (M-RoPE, Wang et al. 2024).

    Raises:
      ConfigError: sections that are not all pairs of a head.
    """
    by_axis = [rotations(config, positions_BT) for positions_BT in positions_ABT]
    ends = np.cumsum(sections)[:-1]

    def joined(parts: list[jax.Array]) -> jax.Array:
        if sum(sections) != parts[0].shape[-1]:
            raise ConfigError(
                f"mrope_section={list(sections)} sums to {sum(sections)}, and a head has "
                f"{parts[0].shape[-1]} pairs; it must be all of them"
            )
        split = [jnp.split(part, ends, axis=-1) for part in parts]
        return jnp.concatenate([split[i % len(parts)][i] for i in range(len(sections))], -1)

    return {
        name: Rotation(
            joined([axis[name].cos_BTr for axis in by_axis]),
            joined([axis[name].sin_BTr for axis in by_axis]),
            one.interleaved,
        )
        for name, one in by_axis[0].items()
    }


def _rotation(
    rope: RopeConfig,
    config: DecoderConfig,
    width: int,
    positions_BT: jax.Array,
    longest: int | None,
) -> Rotation:
    limit = config.max_position_embeddings
    longest_seen = jnp.max(positions_BT) + 1 if longest is None else jnp.int32(longest)
    inverse = inverse_frequencies(rope, width, limit, longest_seen)
    angles = positions_BT[..., None].astype(jnp.float32) * inverse
    factor = attention_factor(rope, limit)
    return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor, rope.interleaved)


def inverse_frequencies(
    rope: RopeConfig, width: int, max_positions: int, longest: jax.Array
) -> jax.Array | np.ndarray:
    """Radians per position of each rotated pair of dimensions.

    Args:
      rope: base and scaling.
      width: R, rotated dimensions of a head.
      max_positions: the model's `max_position_embeddings`.
      longest: int32 scalar, the batch's longest position + 1; two scalings depend on it, so a row's
        result there depends on the other rows, as in the models that were trained this way.

    Returns:
      float32 [R / 2].
    """
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    base = np.float32(1.0) / np.float32(rope.theta) ** exponents
    if rope.turning != 1:
        base[int(rope.turning * width // 2) :] = 0
    match rope.scaling:
        case None:
            return base
        case LinearScaling(factor=factor):
            return base / np.float32(factor)
        case DynamicNTKScaling(factor=factor):
            return _dynamic(rope.theta, factor, width, max_positions, longest, exponents)
        case YarnScaling() as yarn:
            return _yarn(base, rope.theta, width, yarn)
        case LongRopeScaling() as scaling:
            short = base / np.asarray(scaling.short_factor, np.float32)
            long = base / np.asarray(scaling.long_factor, np.float32)
            return jnp.where(longest > scaling.original_max_position_embeddings, long, short)
        case Llama3Scaling() as scaling:
            return _llama3(base, scaling)


def _dynamic(
    theta: float,
    factor: float,
    width: int,
    max_positions: int,
    longest: jax.Array,
    exponents: np.ndarray,
) -> jax.Array:
    length = jnp.maximum(longest, max_positions).astype(jnp.float32)
    growth = factor * length / max_positions - (factor - 1)
    return 1.0 / (theta * growth ** (width / (width - 2))) ** exponents


def _yarn(base: np.ndarray, theta: float, width: int, yarn: YarnScaling) -> np.ndarray:
    def dimension(turns: float) -> float:
        """The dimension that turns `turns` times over the original context."""
        context = yarn.original_max_position_embeddings
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    divided = base / np.float32(yarn.factor)
    return (divided * ramp + base * (1 - ramp)).astype(np.float32)


def _llama3(base: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / base
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = np.clip((original / wavelength - scaling.low_freq_factor) / span, 0, 1)
    return ((1 - smooth) * base / scaling.factor + smooth * base).astype(np.float32)


def attention_factor(rope: RopeConfig, max_positions: int) -> float:
    """Factor on cosines and sines (YaRN eq. 22; LongRoPE section 3); 1 for other scalings."""
    match rope.scaling:
        case YarnScaling() as yarn:
            if yarn.attention_factor is not None:
                return yarn.attention_factor
            if yarn.mscale and yarn.mscale_all_dim:
                return yarn.temperature(yarn.mscale) / yarn.temperature(yarn.mscale_all_dim)
            return yarn.temperature(1.0)
        case LongRopeScaling() as scaling:
            if scaling.attention_factor is not None:
                return scaling.attention_factor
            original = scaling.original_max_position_embeddings
            factor = max_positions / original if scaling.factor is None else scaling.factor
            return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        case _:
            return 1.0
