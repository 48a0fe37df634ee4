"""Draws images with a network in training or after it: the same sampler, guidance and noise.

Shapes: B prompts, X the shape of an example; conditions are pytrees with rows of B.
"""

import io
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fornax.config.files import write_whole
from fornax.diffusion.guidance import guided
from fornax.diffusion.models import Condition
from fornax.diffusion.network import apply
from fornax.diffusion.objectives import Objective
from fornax.diffusion.samplers import SAMPLERS
from fornax.diffusion.sampling import noised, sample

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image

__all__ = ["draw", "grid", "start_noise", "to_pixels", "write_grid"]


def start_noise(seed: int, count: int, shape: tuple[int, ...]) -> jax.Array:
    """(B, *X) float32 standard normal: row b of a seed is the same for any B."""
    key = jax.random.key(seed)
    rows = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(count))
    return jax.vmap(lambda row: jax.random.normal(row, shape, jnp.float32))(rows)


def draw(
    denoiser: Any,
    objective: Objective,
    condition: Condition,
    empty: Condition | None,
    noise_BX: jax.Array,
    *,
    sampler: str,
    steps: int,
    guidance: float | jax.Array,
    rescale: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Sample (B, *X) float32 examples; traces under `jax.jit`.

    Args:
      denoiser: the network, see `fornax.diffusion.models`.
      objective: that it was trained with.
      condition: what to draw, B rows.
      empty: what guidance compares with; None for no guidance.
      noise_BX: the start, from `start_noise`.
      sampler: one of `SAMPLERS`.
      steps: of the sampler.
      guidance: scale, () or (B,).
      rescale: see `guided`.
      key: of fresh noise, for samplers that add some.
    """

    def network(x_BX: jax.Array, point: Any, condition: Condition) -> jax.Array:
        return apply(denoiser, objective, x_BX, point, condition)

    schedule = objective.schedule(steps)
    run = (
        (lambda x, point: network(x, point, condition))
        if empty is None
        else guided(network, condition, empty, guidance, rescale=rescale)
    )
    return sample(
        run,
        noised(schedule, noise_BX),
        SAMPLERS[sampler](schedule),
        key,
        prediction=objective.prediction,
        sigma_data=objective.sigma_data,
    )


def to_pixels(x_BX: Any) -> NDArray[np.uint8]:
    """(B, *X) uint8 of images or videos in [-1, 1]."""
    x_BX = np.nan_to_num(np.asarray(x_BX, np.float32))
    return np.clip(np.round((x_BX + 1) * 127.5), 0, 255).astype(np.uint8)


def grid(pixels_BHWC: NDArray[np.uint8], *, columns: int | None = None, gap: int = 2) -> "Image":
    """Images side by side on a grey ground; small ones are enlarged by a whole factor."""
    from PIL import Image

    count, height, width, channels = pixels_BHWC.shape
    columns = columns or math.ceil(math.sqrt(count))
    factor = max(1, 64 // max(height, width))
    rows = math.ceil(count / columns)
    high, wide = height * factor + gap, width * factor + gap
    field = Image.new(
        "L" if channels == 1 else "RGB",
        (columns * wide + gap, rows * high + gap),
        96 if channels == 1 else (96, 96, 96),
    )
    for place, pixels in enumerate(pixels_BHWC):
        one = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
        one = one.resize((width * factor, height * factor), Image.Resampling.NEAREST)
        field.paste(one, (gap + place % columns * wide, gap + place // columns * high))
    return field


def write_grid(path: "Path", pixels_BX: NDArray[np.uint8], rate: float) -> None:
    """Write `grid` as PNG, in one replacement. OSError where it cannot be.

    Of videos (B, F, H, W, C) it is animated, with `rate` frames per second.
    """
    buffer = io.BytesIO()
    if pixels_BX.ndim == 4:
        grid(pixels_BX).save(buffer, "PNG")
    else:
        first, *rest = (grid(pixels_BHWC) for pixels_BHWC in np.moveaxis(pixels_BX, 1, 0))
        options = {"duration": 1000 / rate, "loop": 0}
        first.save(buffer, "PNG", save_all=True, append_images=rest, **options)
    write_whole(path, buffer.getvalue())
