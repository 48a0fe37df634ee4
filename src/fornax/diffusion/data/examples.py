"""Examples to train on: images or videos in [-1, 1] of a few sizes, each with its caption.

Shapes: H and W of the example's bucket, F its frames, C channels.
"""

import hashlib
import io
import itertools
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fornax.config.errors import DataError
from fornax.config.suggest import first_few
from fornax.data.order import permuted
from fornax.diffusion.data.buckets import (
    Size,
    assign,
    bucket_sizes,
    coloured,
    covers,
    fitted,
    upright_size,
)
from fornax.diffusion.data.config import EncodedConfig, ImageData, ImagesConfig, LettersConfig
from fornax.diffusion.data.encoded import EncodedExamples
from fornax.diffusion.data.stores import Store, open_store
from fornax.diffusion.data.videos import decode_video, look_at_video
from fornax.diffusion.letters import COLOURS, FONTS, LETTERS, Letters

__all__ = ["Captioned", "Examples", "decode_image", "open_examples"]

_HELD_IN_MEMORY = 64 * 2**20
"""Bytes of drawn letters that are kept."""


class Examples(Protocol):
    """A finite set of examples by number."""

    @property
    def sizes(self) -> Sequence[Size]:
        """Heights and widths in use, of videos frames before them: the buckets."""
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
        """(H, W, C) float32 in [-1, 1], of videos (F, H, W, C), or latents, and its caption.

        Args:
          index: of the example.
          mirrored: whether the image is.
          rng: what latents are drawn with; None for their mean.

        Raises:
          DataError: an image or a video that cannot be decoded.
        """
        ...

    def arrays(
        self, index: int, *, dropped: bool = False, mirrored: bool = False
    ) -> dict[str, NDArray[Any]]:
        """What the network is conditioned on beside the caption's words, by the names of
        `Network.condition`; `dropped` is for the empty caption, `mirrored` as of `get`."""
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

    def arrays(
        self, index: int, *, dropped: bool = False, mirrored: bool = False
    ) -> dict[str, NDArray[Any]]:
        """None."""
        del index, dropped, mirrored
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
    """Images, or with `data.frames` videos: an example is an image, or a run of frames."""

    def __init__(self, config: ImagesConfig, store: Store, split: str):
        self._config, self._store = config, store
        self.channels = config.channels
        self._what = "videos" if config.frames else "images"
        chosen = _split(len(store.captions), config.holdout, split, self._what)
        captions = _captions(config, store, chosen)
        found = _looked_at(config, store, chosen)
        spatial = bucket_sizes(config.resolution, config.multiple, config.max_aspect)
        where = assign([seen.size for seen in found], spatial)
        small = [
            f"{store.where(i)} ({seen.size[1]} x {seen.size[0]} for a bucket of "
            f"{spatial[b][1]} x {spatial[b][0]})"
            for i, seen, b in zip(chosen, found, where, strict=True)
            if not covers(seen.size, spatial[b])
        ]
        if small and not config.upscale:
            raise DataError(
                f"{len(small)} of {len(chosen)} {self._what} are smaller than their bucket: "
                f"{first_few(small)}; lower data.resolution={config.resolution}, remove them, or "
                "set data.upscale"
            )
        counts = _counts(config, store, chosen, found)
        places = range(len(chosen))
        # Of a video in clips each is an example of its own.
        clips = [(i, clip) for i in places for clip in range(_clips(config, found[i], counts[i]))]
        shapes: list[Size] = [(*counts[i], *spatial[where[i]]) for i in places]
        self.sizes: Sequence[Size] = sorted({shapes[i] for i, _ in clips})
        self.bucket = np.asarray([self.sizes.index(shapes[i]) for i, _ in clips], np.int64)
        self._place = [chosen[i] for i, _ in clips]
        self._start = [clip * sum(counts[i]) for i, clip in clips]
        self._seen = [found[i] for i, _ in clips]
        self._captions = [captions[i] for i, _ in clips]
        code = 0
        for index, (seen, caption) in enumerate(zip(self._seen, self._captions, strict=True)):
            height, width = seen.size
            said = f"{height} {width} {seen.checksum} {caption}{self._of_clip(index)}"
            code = zlib.crc32(said.encode(), code)
        self.identity = f"{code:08x}"

    def _of_clip(self, index: int) -> str:
        """What tells the example from others of its file: nothing for an image."""
        if not self._config.frames:
            return ""
        count = self.sizes[self.bucket[index]][0]
        return f" {self._start[index]} {count} {self._config.rate}"

    def get(
        self, index: int, *, mirrored: bool = False, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], str]:
        del rng  # pixels are as they are
        place, size = self._place[index], self.sizes[self.bucket[index]]
        encoded, where = _read(self._store, place), self._store.where(place)
        if self._config.frames:
            images = decode_video(
                encoded,
                where,
                self.channels,
                rate=self._config.rate,
                start=self._start[index],
                count=size[0],
            )
        else:
            images = [decode_image(encoded, where, self.channels)]
        shape = (len(images), *size[-2:], self.channels)
        pixels = np.stack([np.asarray(fitted(image, size[-2:])) for image in images])
        pixels = pixels.reshape(shape).astype(np.float32) / 127.5 - 1
        pixels = pixels if self._config.frames else pixels[0]
        return (np.flip(pixels, -2) if mirrored else pixels), self._captions[index]

    def caption(self, index: int) -> str:
        return self._captions[index]

    def content(self, index: int) -> str:
        return f"{self._seen[index].digest}{self._of_clip(index)}"

    def frame(self, index: int) -> tuple[int, ...]:
        shape, size = self._seen[index].size, self.sizes[self.bucket[index]][-2:]
        scale = max(to / of for to, of in zip(size, shape, strict=True))
        cut = (round((of * scale - to) / 2) for to, of in zip(size, shape, strict=True))
        return (*shape, *cut, *size)

    def texts(self) -> Iterable[str]:
        return self._captions


class _Seen(NamedTuple):
    """What was found in a file."""

    size: Size
    """Height and width."""
    frames: int
    """Of a video, at the rate that is asked for."""
    checksum: int
    digest: str
    """Tells the file from all others."""


def _counts(
    config: ImagesConfig, store: Store, chosen: Sequence[int], found: Sequence[_Seen]
) -> list[Size]:
    """The frames of each file's bucket, the most that it fills; () for images."""
    if not config.frames:
        return [()] * len(found)
    short = [
        f"{store.where(i)} ({seen.frames})"
        for i, seen in zip(chosen, found, strict=True)
        if seen.frames < min(config.frames)
    ]
    if short:
        rate = "" if config.rate is None else f" at data.rate={config.rate:g}"
        raise DataError(
            f"{len(short)} of {len(chosen)} videos have fewer frames{rate} than the least of "
            f"data.frames={list(config.frames)}: {first_few(short)}; add a smaller number, or "
            "remove them"
        )
    return [(max(n for n in config.frames if n <= seen.frames),) for seen in found]


def _clips(config: ImagesConfig, seen: _Seen, count: Size) -> int:
    """How many examples a file is."""
    return seen.frames // count[0] if count and config.clips == "all" else 1


def _split(count: int, holdout: float, split: str, what: str) -> list[int]:
    """Numbers of a split, the same whatever else the config says."""
    held = round(count * holdout)
    if split != "train" and not held:
        raise DataError(
            f"data.holdout={holdout:g} of {count} {what} leaves none for evaluation; raise it, or "
            "leave eval.every out"
        )
    if split == "train" and held == count:
        raise DataError(
            f"data.holdout={holdout:g} of {count} {what} leaves none to train on; lower it"
        )
    places = permuted(np.arange(count), count, 0) if held else np.arange(count)
    return sorted((places[held:] if split == "train" else places[:held]).tolist())


def _captions(config: ImagesConfig, store: Store, chosen: Sequence[int]) -> list[str]:
    empty = [store.where(i) for i in chosen if not store.captions[i]]
    if empty and not config.allow_empty_captions:
        raise DataError(
            f"{len(empty)} of {len(chosen)} files have no caption: {first_few(empty)}; write one "
            "into a .txt file of the same name, give all of them one with data.prompt, or set "
            "data.allow_empty_captions"
        )
    return [store.captions[i] or "" for i in chosen]


def _looked_at(config: ImagesConfig, store: Store, chosen: Sequence[int]) -> list[_Seen]:
    """What is in each file."""

    def look(index: int) -> _Seen | str:
        where, whole = store.where(index), config.verify
        try:
            encoded = _read(store, index)
            if config.frames:
                size, frames = look_at_video(encoded, where, rate=config.rate, whole=whole)
            else:
                image = decode_image(encoded, where, config.channels, whole=whole)
                size, frames = upright_size(image), 1
            digest = hashlib.sha256(encoded).hexdigest()
            return _Seen(size, frames, zlib.crc32(encoded), digest)
        except DataError as error:
            return str(error)

    with ThreadPoolExecutor(config.threads) as pool:
        found = list(pool.map(look, chosen))
    broken = [each for each in found if isinstance(each, str)]
    if broken:
        what = "videos" if config.frames else "images"
        raise DataError(
            f"{len(broken)} of {len(chosen)} {what} cannot be decoded: {first_few(broken)}; remove "
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
        return coloured(ImageOps.exif_transpose(image), channels)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "BytesIO" in said:
            said = "it is not an image that Pillow knows" if encoded else "it has no bytes"
        raise DataError(f"{where}: {said}") from error
