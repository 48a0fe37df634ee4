"""Aspect buckets: the few sizes that images are brought to, each with one compiled program.

Buckets by area under a bound, as in SDXL (Podell et al. 2023, section 2.3).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Size", "assign", "bucket_sizes", "coloured", "covers", "fitted", "upright_size"]

Size = tuple[int, ...]
"""(height, width) in pixels; of the examples of videos (frames, height, width)."""


def bucket_sizes(resolution: int, multiple: int, max_aspect: float) -> list[Size]:
    """The sizes in multiples, none of more pixels than the square and none longer than allowed.

    For each height the widest width within both bounds; a size and its transpose are both there.

    Args:
      resolution: side of the square that bounds the area, in pixels; rounded down to a multiple.
      multiple: of heights and widths.
      max_aspect: the longer side over the shorter, at most.
    """
    side = resolution // multiple
    found: set[Size] = {(side, side)}
    for short in range(1, side + 1):
        long = side * side // short
        if long > short and long <= max_aspect * short:
            found |= {(short, long), (long, short)}
    return sorted((h * multiple, w * multiple) for h, w in found)


def assign(sizes: Sequence[Size], buckets: Sequence[Size]) -> np.ndarray:
    """int64 bucket of each image: the nearest in the logarithm of the aspect."""
    of = np.log([w / h for h, w in sizes])
    to = np.log([w / h for h, w in buckets])
    return np.abs(of[:, None] - to[None]).argmin(1)


def fitted(image: "Image", size: Size) -> "Image":
    """The image scaled to cover a size, and its middle cut out."""
    from PIL import Image, ImageOps

    height, width = size
    if image.size == (width, height):
        return image
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)


def covers(image: Size, bucket: Size) -> bool:
    """Whether the image has the pixels of the bucket along both sides."""
    return image[0] >= bucket[0] and image[1] >= bucket[1]


def coloured(image: "Image", channels: int) -> "Image":
    """The image in grey (1 channel) or colour (3), on white where it is transparent."""
    from PIL import Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if channels == 1 else "RGB")


def upright_size(image: "Image") -> Size:
    """Height and width once the image is turned as its head says (EXIF)."""
    turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    return (image.width, image.height) if turned else (image.height, image.width)
