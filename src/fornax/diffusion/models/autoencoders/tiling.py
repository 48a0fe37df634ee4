"""Encoding and decoding large images in tiles that overlap, so that memory does not grow with them.

Legend: B batch, H height, W width, C channels.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.models.remat import Remat

__all__ = ["Tiling", "blended", "decode", "tiled"]


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How an image is cut.

    A tile sees nothing of its neighbours: convolutions pad, norms and attention act within it. What
    tiles compute differs where they overlap, and is blended linearly there.
    """

    size: int = 512
    """Pixels of a tile's side; images no larger are not cut."""
    overlap: float = 0.25
    """Share of a tile's side that its neighbour has too."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.size < 1 or not 0 <= self.overlap < 1:
            raise ConfigError(
                f"tiles of size={self.size} with overlap={self.overlap} do not cover an image; use "
                "a size of at least 1 and an overlap of at least 0 and less than 1"
            )


def tiled(
    run: Callable[[jax.Array], jax.Array], x_BHWC: jax.Array, tiling: Tiling, *, side: int, out: int
) -> jax.Array:
    """Run a function of images over tiles and blend what it returns.

    As diffusers cuts and blends: rows first, each tile's upper edge with the tile above, then its
    left edge with the tile on the left. Tiles at the right and lower edge may be smaller, so `run`
    sees up to four shapes.

    Args:
      run: of a tile [B, h, w, C] -> [B, h out / side, w out / side, N].
      x_BHWC: the whole.
      tiling: how it is cut.
      side: of a tile in the input's places.
      out: of a tile in the result's places.

    Raises:
      ConfigError: tiles that do not begin at the same places on both sides.
    """
    step, blend = int(side * (1 - tiling.overlap)), int(out * tiling.overlap)
    least, most = sorted((side, out))
    if least < 1 or step < 1 or most % least or step * out != (out - blend) * side:
        least = max(1, least)
        whole = (n for n in range(least, 64 * least) if (n * tiling.overlap).is_integer())
        size = next((n * (most // least) for n in whole), None)
        raise ConfigError(
            f"a tile of size={tiling.size} with overlap={tiling.overlap} is {side} places on one "
            f"side of the autoencoder and {out} on the other, and the next one begins {step} and "
            f"{out - blend} behind it, which are not the same pixels; "
            + (f"use a size of {size}" if size else "use another overlap, such as 0.25")
        )
    height, width = x_BHWC.shape[1:3]
    above: list[jax.Array] = []
    rows = []
    for top in range(0, height, step):
        row: list[jax.Array] = []
        for left in range(0, width, step):
            tile = run(x_BHWC[:, top : top + side, left : left + side])
            if above:
                tile = blended(above[len(row)], tile, blend, axis=1)
            if row:
                tile = blended(row[-1], tile, blend, axis=2)
            row.append(tile)
        kept = [tile[:, : out - blend, : out - blend] for tile in row]
        rows.append(jnp.concatenate(kept, axis=2))
        above = row
    return jnp.concatenate(rows, axis=1)


def blended(before: jax.Array, tile: jax.Array, extent: int, axis: int) -> jax.Array:
    """`tile` with its first places passing over from the last of the tile before it."""
    extent = min(before.shape[axis], tile.shape[axis], extent)
    if extent == 0:
        return tile
    shape = [1] * tile.ndim
    shape[axis] = extent
    weights = (jnp.arange(extent, dtype=jnp.float32) / extent).reshape(shape).astype(tile.dtype)
    last = jax.lax.slice_in_dim(before, before.shape[axis] - extent, before.shape[axis], axis=axis)
    first = jax.lax.slice_in_dim(tile, 0, extent, axis=axis)
    rest = jax.lax.slice_in_dim(tile, extent, tile.shape[axis], axis=axis)
    return jnp.concatenate([last * (1 - weights) + first * weights, rest], axis=axis)


def decode(
    autoencoder: Any, z_BHWC: jax.Array, tiling: Tiling | None, remat: str | Remat
) -> jax.Array:
    """Images of latents by an autoencoder's `decoded`, in tiles where they are larger than one.

    Args:
      autoencoder: with `config.latent_channels`, `config.factor` and `decoded(z_BHWC, remat)`.
      z_BHWC: [B, H, W, latent_channels].
      tiling: how images larger than a tile are cut; None for no cut.
      remat: what the backward pass computes again of each block; tiles keep everything.

    Raises:
      ConfigError: z of another number of channels.
    """
    config = autoencoder.config
    if z_BHWC.ndim != 4 or z_BHWC.shape[-1] != config.latent_channels:
        raise ConfigError(
            f"latents of shape {z_BHWC.shape} do not fit an autoencoder of "
            f"[B, H, W, {config.latent_channels}]; decode those of its own encoder, or of "
            "a denoiser trained with it"
        )
    side = 0 if tiling is None else tiling.size // config.factor
    if tiling is None or max(z_BHWC.shape[1:3]) <= side:
        return autoencoder.decoded(z_BHWC, remat)
    run = functools.partial(_decoded_tile, *nnx.split(autoencoder))
    return tiled(run, z_BHWC, tiling, side=side, out=tiling.size)


@functools.partial(jax.jit, static_argnums=0)
def _decoded_tile(graphdef: Any, state: nnx.State, tile_BHWC: jax.Array) -> jax.Array:
    """One compiled program for each of the few shapes of tiles."""
    return nnx.merge(graphdef, state).decoded(tile_BHWC)
