"""Examples to train on: images in [-1, 1] of a few sizes, each with its caption.

Shapes: H and W of the example's bucket, C channels.
"""

import hashlib
import io
import itertools
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fornax.config.errors import DataError
from fornax.config.suggest import first_few
from fornax.data.order import permuted
from fornax.diffusion.data.buckets import Size, assign, bucket_sizes, covers, fitted
from fornax.diffusion.data.config import EncodedConfig, ImageData, ImagesConfig, LettersConfig
from fornax.diffusion.data.encoded import EncodedExamples
from fornax.diffusion.data.stores import Store, open_store
from fornax.diffusion.letters import COLOURS, FONTS, LETTERS, Letters

__all__ = ["Captioned", "Examples", "decode_image", "open_examples"]

_HELD_IN_MEMORY = 64 * 2**20
"""Bytes of drawn letters that are kept."""


class Examples(Protocol):
    """A finite set of examples by number."""

    @property
    def sizes(self) -> Sequence[Size]:
        """Heights and widths in use, the buckets."""
        ...

    @property
    def bucket(self) -> NDArray[np.int64]:
        """(N,) which of them each example has."""
        ...

    @property
    def channels(self) -> int:
        """1 or 3."""
        ...

    @property
    def identity(self) -> str:
        """Changes when the examples do."""
        ...

    def get(
        self, index: int, *, mirrored: bool = False, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], str]:
        """(H, W, C) float32 in [-1, 1], or latents, and its caption.

        Args:
          index: of the example.
          mirrored: whether the image is.
          rng: what latents are drawn with; None for their mean.

        Raises:
          DataError: an image that cannot be decoded.
        """
        ...

    def arrays(self, index: int, *, dropped: bool = False) -> dict[str, NDArray[Any]]:
        """What the network is conditioned on beside the caption's words, by the names of
        `Network.condition`; `dropped` is for the empty caption."""
        ...

    def caption(self, index: int) -> str:
        """The caption alone."""
        ...

    def weight(self, index: int) -> float:
        """Of the example's loss."""
        ...

    def content(self, index: int) -> str:
        """Says what is in the image before it is fitted and mirrored."""
        ...

    def frame(self, index: int) -> tuple[int, ...]:
        """Pixels: height and width of the image as it came, top and left of what is cut out of it
        once it is scaled, height and width of that."""
        ...

    def texts(self) -> Iterable[str]:
        """Captions with every word that any has."""
        ...


def open_examples(config: ImageData, split: str) -> Examples:
    """The examples of a split, `train` or `eval`.

    Raises:
      ConfigError: a path without images; evaluation without any held out.
      DataError: broken or small images, missing captions, each with its place.
    """
    if isinstance(config, LettersConfig):
        return _Letters(config, split)
    if isinstance(config, EncodedConfig):
        return EncodedExamples(config, split)
    return _Images(config, open_store(config), split)


class Captioned:
    """Examples that nothing but their caption conditions, and that all count the same."""

    def arrays(self, index: int, *, dropped: bool = False) -> dict[str, NDArray[Any]]:
        """None."""
        del index, dropped
        return {}

    def weight(self, index: int) -> float:
        """1."""
        del index
        return 1.0


class _Letters(Captioned):
    def __init__(self, config: LettersConfig, split: str):
        shift = 0 if split == "train" else config.count
        self._first = shift
        count = config.count if split == "train" else config.holdout
        self._letters = Letters(
            colour=config.colour, size=config.size, count=shift + count, seed=config.seed
        )
        height, width, self.channels = self._letters.shape
        self.sizes = [(height, width)]
        self.bucket = np.zeros(count, np.int64)
        self.identity = f"letters {self._letters.shape} {config.seed} {split} {count}"
        self._kept: dict[int, tuple[NDArray[np.float32], str]] | None = (
            {} if 4 * count * height * width * self.channels <= _HELD_IN_MEMORY else None
        )

    def get(
        self, index: int, *, mirrored: bool = False, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], str]:
        del mirrored, rng  # a mirrored letter is another one, or none
        found = None if self._kept is None else self._kept.get(index)
        if found is None:
            one = self._letters[self._first + index]
            found = one.image, one.prompt
            if self._kept is not None:
                self._kept[index] = found
        return found

    def caption(self, index: int) -> str:
        return self.get(index)[1]

    def content(self, index: int) -> str:
        return hashlib.sha256(self.get(index)[0].tobytes()).hexdigest()

    def frame(self, index: int) -> tuple[int, ...]:
        del index
        height, width = self.sizes[0]
        return (height, width, 0, 0, height, width)

    def texts(self) -> Iterable[str]:
        colours = [""]
        if self.channels == 3:
            pairs = itertools.permutations(COLOURS, 2)
            colours = [f" in {front} on {ground}" for front, ground in pairs]
        for style, letter, colour in itertools.product(FONTS, LETTERS, colours):
            yield f"{style} {letter}{colour}"


class _Images(Captioned):
    def __init__(self, config: ImagesConfig, store: Store, split: str):
        self._config, self._store = config, store
        self.channels = config.channels
        chosen = _split(len(store.captions), config.holdout, split)
        self._index = chosen
        self._captions = _captions(config, store, chosen)
        found = _looked_at(config, store, chosen)
        everywhere = bucket_sizes(config.resolution, config.multiple, config.max_aspect)
        self._shapes = [size for size, *_ in found]
        self._content = [digest for *_, digest in found]
        where = assign(self._shapes, everywhere)
        small = [
            f"{store.where(i)} ({w} x {h} for a bucket of {everywhere[b][1]} x {everywhere[b][0]})"
            for i, ((h, w), *_), b in zip(chosen, found, where, strict=True)
            if not covers((h, w), everywhere[b])
        ]
        if small and not config.upscale:
            raise DataError(
                f"{len(small)} of {len(chosen)} images are smaller than their bucket: "
                f"{first_few(small)}; lower data.resolution={config.resolution}, remove them, or "
                "set data.upscale"
            )
        used = sorted(set(where.tolist()))
        self.sizes = [everywhere[b] for b in used]
        self.bucket = np.searchsorted(used, where)
        code = 0
        for ((height, width), content, _), caption in zip(found, self._captions, strict=True):
            code = zlib.crc32(f"{height} {width} {content} {caption}".encode(), code)
        self.identity = f"{code:08x}"

    def get(
        self, index: int, *, mirrored: bool = False, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], str]:
        del rng  # pixels are as they are
        place = self._index[index]
        image = fitted(
            decode_image(_read(self._store, place), self._store.where(place), self.channels),
            self.sizes[self.bucket[index]],
        )
        pixels = np.asarray(image, np.float32) / 127.5 - 1
        pixels = pixels[..., None] if self.channels == 1 else pixels
        return (pixels[:, ::-1] if mirrored else pixels), self._captions[index]

    def caption(self, index: int) -> str:
        return self._captions[index]

    def content(self, index: int) -> str:
        return self._content[index]

    def frame(self, index: int) -> tuple[int, ...]:
        shape, size = self._shapes[index], self.sizes[self.bucket[index]]
        scale = max(to / of for to, of in zip(size, shape, strict=True))
        cut = (round((of * scale - to) / 2) for to, of in zip(size, shape, strict=True))
        return (*shape, *cut, *size)

    def texts(self) -> Iterable[str]:
        return self._captions


def _split(count: int, holdout: float, split: str) -> list[int]:
    """Numbers of a split, the same whatever else the config says."""
    held = round(count * holdout)
    if split != "train" and not held:
        raise DataError(
            f"data.holdout={holdout:g} of {count} images leaves none for evaluation; raise it, or "
            "leave eval.every out"
        )
    places = permuted(np.arange(count), count, 0) if held else np.arange(count)
    return sorted((places[held:] if split == "train" else places[:held]).tolist())


def _captions(config: ImagesConfig, store: Store, chosen: Sequence[int]) -> list[str]:
    empty = [store.where(i) for i in chosen if not store.captions[i]]
    if empty and not config.allow_empty_captions:
        raise DataError(
            f"{len(empty)} of {len(chosen)} images have no caption: {first_few(empty)}; write one "
            "into a .txt file of the same name, give all of them one with data.prompt, or set "
            "data.allow_empty_captions"
        )
    return [store.captions[i] or "" for i in chosen]


def _looked_at(
    config: ImagesConfig, store: Store, chosen: Sequence[int]
) -> list[tuple[Size, int, str]]:
    """(height, width) of each image, a checksum of its file, and what tells it from all others."""

    def look(index: int) -> tuple[Size, int, str] | str:
        try:
            encoded = _read(store, index)
            image = decode_image(encoded, store.where(index), config.channels, whole=config.verify)
            return _upright(image), zlib.crc32(encoded), hashlib.sha256(encoded).hexdigest()
        except DataError as error:
            return str(error)

    with ThreadPoolExecutor(config.threads) as pool:
        found = list(pool.map(look, chosen))
    broken = [each for each in found if isinstance(each, str)]
    if broken:
        raise DataError(
            f"{len(broken)} of {len(chosen)} images cannot be decoded: {first_few(broken)}; remove "
            "or replace them"
        )
    return [each for each in found if not isinstance(each, str)]


def _read(store: Store, index: int) -> bytes:
    try:
        return store.read(index)
    except OSError as error:
        raise DataError(
            f"{store.where(index)} cannot be read: {error.strerror or error}"
        ) from error


def _upright(image: "object") -> Size:
    width, height = image.size  # pyrefly: ignore[missing-attribute]
    turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)  # pyrefly: ignore[missing-attribute]
    return (width, height) if turned else (height, width)


def decode_image(encoded: bytes, where: str, channels: int, *, whole: bool = True):
    """Decode a file to a `PIL.Image`, upright, in grey or colour; what is transparent is white.

    Args:
      encoded: the file.
      where: its place, for messages.
      channels: 1 or 3.
      whole: whether the pixels are decoded; else only the head is read, and the image is as it is
        stored.

    Raises:
      DataError: bytes that are not an image, or an image that ends too soon.
    """
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(encoded))
        if not whole:
            return image
        image = ImageOps.exif_transpose(image)
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("L" if channels == 1 else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        said = said if "BytesIO" not in said else "it is not an image that Pillow knows"
        raise DataError(f"{where}: {said}") from error
