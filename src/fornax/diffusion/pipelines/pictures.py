"""Pictures of files as arrays, and back.

Legend: H height, W width, C channels.
"""

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fornax.config.errors import DataError
from fornax.diffusion.pipelines.pipeline import Size

__all__ = [
    "FORMATS",
    "encode_picture",
    "open_picture",
    "read_mask",
    "resized",
    "to_array",
    "to_pixels",
]

FORMATS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP"}
_MOST_PIXELS = 64 << 20
_MODES = ("1", "L", "LA", "RGB", "RGBA")
"""Pillow's, that are used as they are."""


def open_picture(source: Path | bytes, what: str) -> Image.Image:
    """A picture, read whole and upright: turned as its head says (EXIF), as in training.

    Grey values of 16 bits, as depth maps have, become 8, palettes and other spaces RGB.

    Args:
      source: a file, or its bytes.
      what: names it in messages.

    Raises:
      DataError: no such file, no picture, a truncated one, one too large or of floats.
    """
    try:
        file = io.BytesIO(source if isinstance(source, bytes) else source.read_bytes())
        picture = Image.open(file)
        if picture.width * picture.height > _MOST_PIXELS:
            raise DataError(
                f"{what} has {picture.width}x{picture.height} pixels; use one of at most "
                f"{_MOST_PIXELS:,}"
            )
        picture.load()
        ImageOps.exif_transpose(picture, in_place=True)
        if picture.mode == "F":
            raise DataError(
                f"{what} has floating-point values, whose black and white are not known; save it "
                "with 8 or 16 bits"
            )
        if picture.mode not in (*_MODES, "I", "I;16", "I;16L", "I;16B"):
            picture = picture.convert("RGBA" if picture.has_transparency_data else "RGB")
    except UnidentifiedImageError:
        raise DataError(f"{what} is not a picture; use a PNG, JPEG or WebP file") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{what} cannot be read ({reason}); use a whole PNG, JPEG or WebP file"
        ) from None
    if picture.mode.startswith("I"):  # Pillow's own conversion ends at 255
        picture = Image.fromarray((np.clip(np.asarray(picture), 0, 65535) >> 8).astype(np.uint8))
    return picture


def resized(picture: Image.Image, size: Size, channels: int = 3) -> Image.Image:
    """A picture stretched to a size, in colour or grey; transparency is dropped."""
    picture = picture.convert("RGB" if channels == 3 else "L")
    if picture.size == size[::-1]:
        return picture
    return picture.resize(size[::-1], Image.Resampling.LANCZOS)


def to_array(picture: Image.Image, size: Size, channels: int) -> np.ndarray:
    """A picture at a size -> float32 [H, W, C] in [-1, 1]; transparency is dropped."""
    array = np.asarray(resized(picture, size, channels), np.float32) / 127.5 - 1
    return array.reshape(*size, channels)


def to_pixels(picture: Image.Image, size: Size | None = None) -> np.ndarray:
    """A picture -> uint8 [H, W, 3], cut around its middle to the proportions of a size and brought
    to it; None for its own. Transparency is dropped."""
    picture = picture.convert("RGB")
    if size is not None and picture.size != size[::-1]:
        picture = ImageOps.fit(picture, size[::-1], Image.Resampling.LANCZOS)
    return np.asarray(picture)


def read_mask(picture: Image.Image, size: Size) -> np.ndarray:
    """A mask at a size -> float32 [H, W]: 1 where it is white, 0 where it is black."""
    height, width = size
    picture = picture.convert("L").resize((width, height), Image.Resampling.NEAREST)
    return (np.asarray(picture) >= 128).astype(np.float32)


def encode_picture(pixels_HWC: np.ndarray, form: str, quality: int = 100) -> bytes:
    """uint8 [H, W, C] as a file of a form of `FORMATS`; `quality`, 0 to 100, is not PNG's."""
    if pixels_HWC.shape[-1] == 1:
        pixels_HWC = pixels_HWC[..., 0]
    file = io.BytesIO()
    options = {} if form == "png" else {"quality": quality}
    Image.fromarray(pixels_HWC).save(file, FORMATS[form], **options)
    return file.getvalue()
