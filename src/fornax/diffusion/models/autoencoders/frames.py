"""Videos in chunks of frames: what causal layers remember of the frames before, convolutions, and
places as channels.

Legend: B batch, F frames, H height, W width, C channels in, N channels out.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.diffusion.models.autoencoders.tiling import Tiling, tiled
from fornax.diffusion.models.parts import Conv
from fornax.mesh import constrain
from fornax.models.scope import scoped

__all__ = [
    "CausalConv",
    "Past",
    "from_patches",
    "in_chunks",
    "mean_of_places",
    "on_video",
    "per_frame",
    "repeated_places",
    "tiled_video",
    "to_patches",
]


class Past:
    """The last frames that each causal layer saw, in the order in which the layers run.

    A pass over a chunk asks for them layer by layer, and leaves those of the next in `kept`.
    """

    def __init__(self, frames: tuple[jax.Array, ...] | None):
        """Take what the pass before kept; None for the first chunk of a video."""
        self._frames = frames
        self.kept: list[jax.Array] = []

    @property
    def first(self) -> bool:
        """Whether the chunk begins the video."""
        return self._frames is None

    def extend(self, x_BFHWC: jax.Array, count: int) -> jax.Array:
        """x with the `count` frames before it, zeros at the start of a video."""
        if self._frames is not None:
            before = self._frames[len(self.kept)]
        else:
            before = jnp.zeros_like(x_BFHWC, shape=(x_BFHWC.shape[0], count, *x_BFHWC.shape[2:]))
        wide = jnp.concatenate([before, x_BFHWC], axis=1)
        self.kept.append(wide[:, wide.shape[1] - count :])
        return wide


def in_chunks(
    run: Callable[[jax.Array, Past], jax.Array],
    x_BFHWC: jax.Array,
    *,
    first: int,
    chunk: int | None,
) -> jax.Array:
    """Run a causal function over chunks of frames, in the memory of one.

    Args:
      run: of a chunk and the past -> y [B, f, ...], as causal over all chunks as over the whole.
      x_BFHWC: the whole.
      first: frames of the first chunk.
      chunk: of the others but the last, which may be shorter; None runs the whole at once.

    Returns:
      The results, one after another along their axis of frames.
    """

    def step(
        past: tuple[jax.Array, ...] | None, x_BFHWC: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        memory = Past(past)
        y_BFHWC = run(x_BFHWC, memory)
        return tuple(memory.kept), y_BFHWC

    if chunk is None:
        return step(None, x_BFHWC)[1]
    past, y_BFHWC = step(None, x_BFHWC[:, :first])
    found, rest_BFHWC = [y_BFHWC], x_BFHWC[:, first:]
    count = rest_BFHWC.shape[1] // chunk
    if count:
        B, _, *place = x_BFHWC.shape
        chunks = rest_BFHWC[:, : count * chunk].reshape(B, count, chunk, *place)
        past, y_NBFHWC = jax.lax.scan(step, past, jnp.moveaxis(chunks, 1, 0))
        y_BNFHWC = jnp.moveaxis(y_NBFHWC, 0, 1)
        found.append(y_BNFHWC.reshape(B, -1, *y_BNFHWC.shape[3:]))
    if rest_BFHWC.shape[1] > count * chunk:
        found.append(step(past, rest_BFHWC[:, count * chunk :])[1])
    return jnp.concatenate(found, axis=1)


class CausalConv(nnx.Module):
    """A convolution of a video that sees a frame and those before it.

    Attributes:
      conv: over frames, height and width; of odd windows the size is kept.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        window: int | Sequence[int],
        *,
        axes: tuple[str | None, str | None] = ("embed", "mlp"),
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parameters; a bare window is of all three axes."""
        window = (window,) * 3 if isinstance(window, int) else tuple(window)
        space = tuple(((w - 1) // 2, w // 2) for w in window[1:])
        self.conv = Conv(
            inputs,
            outputs,
            window,
            padding=((0, 0), *space),
            axes=axes,
            rngs=rngs,
            dtype=dtype,
            compute_dtype=compute_dtype,
        )
        self.frames = window[0] - 1

    @scoped
    def __call__(self, x_BFHWC: jax.Array, past: Past) -> jax.Array:
        """Apply -> y [B, F, H, W, N], with zeros before the video."""
        if self.frames:
            x_BFHWC = past.extend(x_BFHWC, self.frames)
        return on_video(self.conv(x_BFHWC))


def on_video(x_BFHWC: jax.Array) -> jax.Array:
    """`x_BFHWC` laid out on the enclosing mesh: its batch divided, channels whole."""
    return constrain(x_BFHWC, ("batch", None, None, None, None))


def per_frame(run: Callable[[jax.Array], jax.Array], x_BFHWC: jax.Array) -> jax.Array:
    """Apply a function of images to each frame."""
    B, F, *image = x_BFHWC.shape
    y = run(x_BFHWC.reshape(B * F, *image))
    return y.reshape(B, F, *y.shape[1:])


def tiled_video(
    run: Callable[[jax.Array], jax.Array],
    x_BFHWC: jax.Array,
    tiling: Tiling | None,
    *,
    shrinks: int = 1,
    grows: int = 1,
) -> jax.Array:
    """Run a function of videos over tiles of all their frames, and blend what it returns.

    Args:
      run: of a tile [B, F, h, w, C].
      x_BFHWC: the whole.
      tiling: how it is cut; None for no cut.
      shrinks: how many places of a side become one of the result.
      grows: how many one becomes.

    Raises:
      ConfigError: tiles too small for their overlap.
    """
    if tiling is None or max(x_BFHWC.shape[2:4]) * grows <= tiling.size:
        return run(x_BFHWC)
    side = tiling.size // grows

    def of_tile(tile_BHWFC: jax.Array) -> jax.Array:
        return jnp.moveaxis(run(jnp.moveaxis(tile_BHWFC, 3, 1)), 1, 3)

    x_BHWFC = jnp.moveaxis(x_BFHWC, 1, 3)
    y_BHWFN = tiled(of_tile, x_BHWFC, tiling, side=side, out=side * grows // shrinks)
    return jnp.moveaxis(y_BHWFN, 3, 1)


def mean_of_places(x_BFHWC: jax.Array, outputs: int, frames: int, side: int) -> jax.Array:
    """Blocks of frames and places as channels, and groups of those averaged to `outputs`."""
    missing = -x_BFHWC.shape[1] % frames
    x_BFHWC = jnp.pad(x_BFHWC, ((0, 0), (missing, 0), (0, 0), (0, 0), (0, 0)))
    B, F, H, W, C = x_BFHWC.shape
    x = x_BFHWC.reshape(B, F // frames, frames, H // side, side, W // side, side, C)
    x = x.transpose(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(*x.shape[:4], outputs, -1).mean(-1)


def repeated_places(
    x_BFHWC: jax.Array, outputs: int, frames: int, side: int, first: bool
) -> jax.Array:
    """Channels repeated and laid out as blocks of frames and places; the first frame is one."""
    B, F, H, W, C = x_BFHWC.shape
    x = jnp.repeat(x_BFHWC, outputs * frames * side**2 // C, axis=-1)
    x = x.reshape(B, F, H, W, outputs, frames, side, side).transpose(0, 1, 5, 2, 6, 3, 7, 4)
    x = x.reshape(B, F * frames, H * side, W * side, outputs)
    return x[:, frames - 1 :] if first else x


def to_patches(x_BFHWC: jax.Array, side: int) -> jax.Array:
    """Patches as places, of each channel their columns."""
    B, F, H, W, C = x_BFHWC.shape
    x = x_BFHWC.reshape(B, F, H // side, side, W // side, side, C).transpose(0, 1, 2, 4, 6, 5, 3)
    return x.reshape(*x.shape[:4], C * side**2)


def from_patches(x_BFHWC: jax.Array, side: int) -> jax.Array:
    """The inverse of `to_patches`."""
    B, F, H, W, C = x_BFHWC.shape
    x = x_BFHWC.reshape(B, F, H, W, C // side**2, side, side).transpose(0, 1, 2, 6, 3, 5, 4)
    return x.reshape(B, F, H * side, W * side, -1)
