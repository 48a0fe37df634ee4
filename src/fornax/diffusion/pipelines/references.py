"""At which sizes models read the images that they draw after, by family.

Sizes are height and width in pixels.
"""

import math

import numpy as np
from PIL import Image

from fornax.config.errors import ConfigError
from fornax.diffusion.pipelines.pictures import to_array
from fornax.diffusion.pipelines.pipeline import References, Size

__all__ = ["AREA", "bounded", "of_area", "picture_of", "preferred", "read_reference"]

AREA = 1024 * 1024
"""Pixels of most models' images."""
_LEAST_SIDE, _LONGEST = 64, 8
"""Pixels of a side, and sides to each other, of FLUX.2's images."""

_PREFERRED = (
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
)
"""Short and long sides that FLUX.1 Kontext was trained on, beside the square
(github.com/black-forest-labs/flux)."""


def bounded(size: Size) -> Size:
    """FLUX.2's: its own, but not above 1024 x 1024 pixels.

    Raises:
      ConfigError: a side below 64, or eight times shorter than the other.
    """
    height, width = size
    if min(size) < _LEAST_SIDE or max(size) > _LONGEST * min(size):
        raise ConfigError(
            f"an image to draw after is {width}x{height}; its sides must have {_LEAST_SIDE} pixels "
            f"or more, and none be above {_LONGEST} times the other"
        )
    if height * width <= AREA:
        return size
    scale = math.sqrt(AREA / (height * width))
    return int(height * scale), int(width * scale)


def preferred(size: Size) -> Size:
    """FLUX.1 Kontext's: of those that it was trained on, the nearest by width over height."""
    ratio = size[1] / size[0]
    known = [*_PREFERRED, (1024, 1024), *((long, short) for short, long in _PREFERRED)]
    return min(known, key=lambda s: (abs(ratio - s[1] / s[0]), s[1]))


def of_area(size: Size, area: int = AREA) -> Size:
    """Qwen-Image-Edit's: an area at the picture's proportions, in multiples of 32."""
    ratio = size[1] / size[0]
    width = math.sqrt(area * ratio)
    return round(width / ratio / 32) * 32, round(width / 32) * 32


def picture_of(picture_HWC: np.ndarray, area: int) -> np.ndarray:
    """A picture at the size of `of_area`, uint8 [H, W, 3]."""
    height, width = of_area(picture_HWC.shape[:2], area)
    picture = Image.fromarray(picture_HWC)
    return np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS))


def read_reference(picture_HWC: np.ndarray, references: References, multiple: int) -> np.ndarray:
    """A picture as a model reads it -> float32 [H, W, 3] in [-1, 1].

    Args:
      picture_HWC: uint8, of any size.
      references: of the model.
      multiple: of sizes; what is left over is cut away around the middle.

    Raises:
      ConfigError: a picture that the model cannot read.
    """
    height, width = references.size(picture_HWC.shape[:2])
    array = to_array(Image.fromarray(picture_HWC), (height, width), 3)
    rows, columns = height // multiple * multiple, width // multiple * multiple
    top, left = (height - rows) // 2, (width - columns) // 2
    return array[top : top + rows, left : left + columns]
