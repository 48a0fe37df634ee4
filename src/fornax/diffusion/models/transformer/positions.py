"""Where tokens stand: tables of sines and cosines that are added, and rotary embeddings.

All but fractional ones depend on sizes only, so they are made in NumPy, in float64, when a program
is traced. Legend: B batch, T tokens, D width, A axes, r pairs of a head.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import ConfigError
from fornax.diffusion.models.transformer.config import (
    FractionalRopeConfig,
    RopeConfig,
    SinCosConfig,
)

__all__ = ["Rotation", "fractional_rotations", "rotations", "sin_cos_table"]

Rotation = tuple[np.ndarray, np.ndarray]
"""Cosines and sines, float32 [T, r]."""


@functools.lru_cache(maxsize=64)
def sin_cos_table(grid: tuple[int, int], width: int, config: SinCosConfig) -> np.ndarray:
    """What is added to the patches of a grid.

    The first half of the width is of columns and the second of rows; of each half, sines come
    before cosines.

    Args:
      grid: rows and columns of patches.
      width: D, a multiple of 4.
      config: how they count.

    Returns:
      float32 [T, D], rows of the grid one after another.
    """
    rows, columns = (
        np.arange(n, dtype=np.float32) / np.float32(n / config.base) / np.float32(config.scale)
        for n in grid
    )
    frequencies = 10_000.0 ** -(np.arange(width // 4) / (width / 4))

    def table(positions: np.ndarray) -> np.ndarray:
        angles = np.outer(positions.ravel(), frequencies)
        return np.concatenate([np.sin(angles), np.cos(angles)], 1)

    row, column = np.meshgrid(rows, columns, indexing="ij")
    return np.concatenate([table(column), table(row)], 1).astype(np.float32)


@functools.lru_cache(maxsize=64)
def rotations(
    grid: tuple[int, ...],
    text_slots: int,
    slots: int,
    config: RopeConfig,
    references: tuple[tuple[int, ...], ...] = (),
) -> tuple[Rotation, Rotation]:
    """The rotary embeddings of text and sample.

    Args:
      grid: the sample's patches along each axis.
      text_slots: tokens of text with what fills it up, which is counted like the others.
      slots: tokens of the sample with what fills it up; that is at zero.
      config: how they count.
      references: grids of images that the sample is drawn after, whose tokens are behind its own.

    Returns:
      Those of text, and of the sample with the references.

    Raises:
      ConfigError: a grid of other axes than the config's, or positions beyond its limits.
    """
    if len(grid) != len(config.sample_axes):
        raise ConfigError(
            f"positions.sample_axes={config.sample_axes} are of a grid of "
            f"{len(config.sample_axes)} axes, and the sample's is {grid}"
        )
    text = np.zeros((text_slots, len(config.axes)))
    match config.text:
        case "all":
            longest = (
                max(sides) for sides in zip(*(g[-2:] for g in (grid, *references)), strict=True)
            )
            sides = [n // 2 if config.centred else n for n in longest]
            text[:] = (max(sides) + np.arange(text_slots))[:, None]
        case "axis":
            text[:, config.text_axis] = config.text_start + np.arange(text_slots)
        case "sample_axes":
            text[:, list(config.sample_axes)] = np.arange(text_slots)[:, None]
        case "zero":
            pass
    sample = np.zeros((slots, len(config.axes)))
    start = 0
    for index, each in enumerate((grid, *references)):
        meshed = np.meshgrid(*_counts(each, config), indexing="ij")
        own = slice(start, start + meshed[0].size)
        for axis, positions in zip(config.sample_axes, meshed, strict=True):
            sample[own, axis] = positions.ravel()
        if index:
            sample[own, config.reference_axis] = index * config.reference_step
        start = own.stop
    if config.sample_after_text:
        sample[:start, config.text_axis] = config.text_start + text_slots
    for axis, limit in enumerate(config.limits or ()):
        last = max(positions[:, axis].max(initial=0) for positions in (text, sample))
        if last >= limit:
            raise ConfigError(
                f"a sample of {grid} patches with {text_slots} tokens of text has position "
                f"{int(last)} on axis {axis}, and there are {limit}; use a smaller sample or text"
            )
    return _rotation(text, config), _rotation(sample, config)


def _counts(grid: tuple[int, ...], config: RopeConfig) -> list[np.ndarray]:
    """Positions of patches along each axis of a grid."""
    counts = [np.arange(n) for n in grid]
    if config.centred:
        counts[-2:] = [count - (len(count) - len(count) // 2) for count in counts[-2:]]
    return counts


def _rotation(positions_TA: np.ndarray, config: RopeConfig) -> Rotation:
    angles = np.concatenate(
        [
            np.outer(positions_TA[:, axis], config.theta ** -(np.arange(0, size, 2) / size))
            for axis, size in enumerate(config.axes)
        ],
        1,
    )
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def fractional_rotations(
    grid: tuple[int, ...],
    patch: tuple[int, ...],
    sizes_BA: jax.Array,
    width: int,
    config: FractionalRopeConfig,
) -> tuple[jax.Array, jax.Array]:
    """The rotary embedding of a sample whose places are given distances apart.

    Args:
      grid: the sample's patches along each axis.
      patch: places of a patch along each.
      sizes_BA: float32, from one place to the next along each axis.
      width: D, of all heads.
      config: how they count.

    Returns:
      Cosines and sines, float32 [B, T, D / 2].
    """
    count = width // (2 * len(grid))
    rates = np.float32(config.theta) ** np.linspace(0, 1, count, dtype=np.float32) * np.pi / 2
    indices_TA = jnp.asarray(np.stack([axis.ravel() for axis in np.indices(grid)], 1), jnp.float32)
    places, spans = (jnp.asarray(each, jnp.float32) for each in (patch, config.spans))
    # In float32 in this order, since the highest frequencies are 10^4 turns of what is rounded.
    positions_BTA = indices_TA * sizes_BA.astype(jnp.float32)[:, None] * places / spans
    angles_BTrA = (2 * positions_BTA - 1)[:, :, None] * jnp.asarray(rates, jnp.float32)[:, None]
    angles_BTr = angles_BTrA.reshape(*angles_BTrA.shape[:2], -1)
    angles_BTr = jnp.pad(angles_BTr, ((0, 0), (0, 0), (width // 2 - angles_BTr.shape[-1], 0)))
    return jnp.cos(angles_BTr), jnp.sin(angles_BTr)
