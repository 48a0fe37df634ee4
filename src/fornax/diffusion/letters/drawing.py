"""Draws one letter: coverage of each pixel by ink, from the fonts that matplotlib ships.

Shapes: H is the image's height and width.
"""

import functools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["COLOURS", "FONTS", "LETTERS", "SAMPLES", "ink", "outline", "pixels", "samples"]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FONTS = {
    "sans": "DejaVuSans.ttf",
    "bold sans": "DejaVuSans-Bold.ttf",
    "italic sans": "DejaVuSans-Oblique.ttf",
    "bold italic sans": "DejaVuSans-BoldOblique.ttf",
    "serif": "DejaVuSerif.ttf",
    "bold serif": "DejaVuSerif-Bold.ttf",
    "italic serif": "DejaVuSerif-Italic.ttf",
    "bold italic serif": "DejaVuSerif-BoldItalic.ttf",
}
"""Styles, as prompts name them, and the file of each."""
COLOURS = {
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "red": (230, 30, 30),
    "green": (20, 150, 60),
    "blue": (40, 70, 230),
    "yellow": (250, 220, 40),
    "purple": (140, 40, 170),
    "orange": (250, 140, 20),
}
"""Colours, as prompts name them, in sRGB."""
FINE = 128
"""Height and width of the field that a letter is drawn in once."""
SAMPLES = 4
"""Points of a pixel, along each axis, whose mean is its coverage."""
POINTS = 104
"""The font's size in that field: DejaVu's capitals are 0.73 of it high."""


@functools.cache
def outline(letter: str, style: str) -> NDArray[np.float32]:
    """(FINE, FINE) coverage in [0, 1], its bounding box in the middle."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / FONTS[style]
    font = ImageFont.truetype(str(path), POINTS)
    left, top, right, bottom = font.getbbox(letter)
    field = Image.new("L", (FINE, FINE))
    corner = ((FINE - left - right) / 2, (FINE - top - bottom) / 2)
    ImageDraw.Draw(field).text(corner, letter, fill=255, font=font)
    return (np.asarray(field) / 255).astype(np.float32)


def ink(
    letter: str, style: str, size: int, scale: float, shift: tuple[float, float]
) -> NDArray[np.float32]:
    """(H, H) coverage of each pixel in [0, 1].

    Args:
      letter: one of `LETTERS`.
      style: one of `FONTS`.
      size: H.
      scale: 1 for a letter whose field is the image.
      shift: to the right and down, as shares of the image.
    """
    return pixels(samples(letter, style, size, scale, shift))


def samples(
    letter: str,
    style: str,
    size: int,
    scale: float,
    shift: tuple[float, float] = (0.0, 0.0),
    *,
    margin: int = 0,
) -> NDArray[np.float32]:
    """Coverage at `SAMPLES` x `SAMPLES` points of each pixel, each interpolated in the fine field.

    Args:
      letter, style, size, scale, shift: as for `ink`.
      margin: further points on each side of the image.

    Returns:
      (S, S) in [0, 1], S = `SAMPLES` H + 2 `margin`.
    """
    from PIL import Image

    fine = SAMPLES * size
    ratio = FINE / fine / scale
    offset = FINE / 2 - ratio * (fine / 2 + margin)
    right, down = (offset - ratio * fine * share for share in shift)
    field = Image.fromarray(outline(letter, style)).transform(
        (fine + 2 * margin, fine + 2 * margin),
        Image.Transform.AFFINE,
        (ratio, 0, right, 0, ratio, down),
        Image.Resampling.BILINEAR,
    )
    return np.asarray(field, np.float32)


def pixels(points: NDArray[np.float32]) -> NDArray[np.float32]:
    """(..., H, H) means of the points of each pixel, of (..., SAMPLES H, SAMPLES H)."""
    *rest, size, _ = points.shape
    blocks = (size // SAMPLES, SAMPLES)
    return points.reshape(*rest, *blocks, *blocks).mean((-3, -1))
