"""Images or videos as latents and captions as states of text encoders, computed once and kept on
disk.

A file is named by the hash of what it was computed from: the image's file, its size, whether it is
mirrored, of a video which frames, and the weights of the encoder. So a cache serves any number of
runs, and is never stale.

Shapes: X of latents: H, W and channels C, of videos F before them.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from fornax.checkpoint.safetensors_file import DTYPES, open_file
from fornax.config.errors import DataError
from fornax.config.files import write_whole
from fornax.diffusion.data.buckets import Size
from fornax.diffusion.data.examples import Examples

__all__ = ["Cache", "CachedExamples", "Latents"]

Arrays = dict[str, NDArray[Any]]


class Cache:
    """Arrays by the hash of what they were computed from, a safetensors file each."""

    def __init__(self, folder: Path):
        """Use a folder, which is made when something is written."""
        self.folder = folder

    def key(self, *parts: str) -> str:
        """What names the arrays that were computed from these."""
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def has(self, key: str) -> bool:
        """Whether there are arrays."""
        return self._at(key).is_file()

    def read(self, key: str) -> Arrays:
        """Arrays, mapped from the file.

        Raises:
          DataError: they are not there.
          CheckpointError: a damaged file.
        """
        if not self.has(key):
            raise DataError(
                f"{self._at(key)} is gone since the run began; start it again, which encodes what "
                "is missing, on a folder that all hosts see"
            )
        return {name: tensor.view() for name, tensor in open_file(self._at(key), DTYPES).items()}

    def write(self, key: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep arrays.

        Raises:
          DataError: the file cannot be written.
        """
        file = self._at(key)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, save({k: np.array(v, order="C") for k, v in arrays.items()}))
        except OSError as error:
            raise DataError(
                f"cannot write {file}: {error.strerror or error}; name another folder with "
                "encode.cache"
            ) from error

    def _at(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Latents:
    """What a denoiser of latents is given.

    Attributes:
      size: of an example in pixels, that of its latents. Raises ConfigError where there is none.
      channels: of latents.
      images_key: changes when the autoencoder does, or an encoder of first frames.
      texts_key: changes when the text encoders do.
      begins: whether the network receives something of an example's first frame.
      sees: whether captions are read beside the example's first frame.
      fixed: what conditions every example alike, by the names of `Network.condition`.
      sizes: the numbers that the denoiser receives of `Examples.frame`; None where it receives
        none.
      draw: whether latents are drawn of their distribution, where they are one; else they are its
        mean.
    """

    size: Callable[[Size], Size]
    channels: int
    images_key: str
    texts_key: str
    begins: bool
    sees: bool
    fixed: Mapping[str, NDArray[Any]]
    sizes: Callable[[tuple[int, ...]], Sequence[float]] | None
    draw: bool


class CachedExamples:
    """Examples of a split as a denoiser of latents takes them; `fill` comes first."""

    def __init__(self, images: Examples, cache: Cache, latents: Latents, *, flip: bool):
        """Look up nothing yet.

        Args:
          images: with their captions.
          cache: of what was computed.
          latents: what they become.
          flip: whether mirrored images are asked for.
        """
        self._images, self._cache, self._latents = images, cache, latents
        self._views = (False, True) if flip else (False,)
        self.channels, self.bucket = latents.channels, images.bucket
        self.sizes: Sequence[Size] = [latents.size(size) for size in images.sizes]
        self.identity = f"{images.identity} {latents.images_key[:16]} {latents.texts_key[:16]}"
        count = len(images.bucket)
        self._keys = [
            [self._image_key(i, mirrored) for mirrored in self._views] for i in range(count)
        ]
        self._texts: dict[tuple[Any, ...], tuple[str, int, bool]] = {}
        for index, mirrored, dropped in product(range(count), self._views, (True, False)):
            caption, *beside = said = self._said(index, mirrored, dropped=dropped)
            if said not in self._texts:
                key = cache.key("text", repr(caption), latents.texts_key, *beside)
                self._texts[said] = key, index, mirrored

    def _said(self, index: int, mirrored: bool, *, dropped: bool) -> tuple[Any, ...]:
        """A caption, or None, and the view beside which it is read, if it is."""
        caption = None if dropped else self.caption(index)
        return (caption, self._keys[index][mirrored]) if self._latents.sees else (caption,)

    def _image_key(self, index: int, mirrored: bool) -> str:
        images = self._images
        view = f"{images.sizes[images.bucket[index]]} {mirrored}"
        return self._cache.key("image", images.content(index), view, self._latents.images_key)

    def fill(
        self,
        encode: Callable[[NDArray[np.float32]], Arrays],
        read: Callable[[str | None, NDArray[np.float32] | None], Arrays],
    ) -> tuple[int, int]:
        """Compute what is missing.

        Args:
          encode: an image, float32 [H, W, 3] in [-1, 1], or a video [F, H, W, 3], to `mean` of its
            latents, `deviation` where they are a distribution, and what the network receives of
            its first frame, by the names of `Network.condition`.
          read: a caption, or none, to its states by those names; it also gets the example's first
            frame [H, W, 3] where captions are read beside it.

        Returns:
          How many views of images, and how many captions, were encoded.

        Raises:
          DataError: latents or states that are not finite, or a folder that cannot be written.
        """
        cache, images, texts = self._cache, 0, 0
        for index, keys in enumerate(self._keys):
            for key, mirrored in zip(keys, self._views, strict=True):
                if not cache.has(key):
                    pixels, caption = self._images.get(index, mirrored=mirrored)
                    what = f"the latents of example {index} ({caption!r:.60})"
                    cache.write(key, _finite(encode(pixels), what))
                    images += 1
        for (caption, *_), (key, index, mirrored) in self._texts.items():
            if not cache.has(key):
                frame = self.first_frame(index, mirrored=mirrored) if self._latents.sees else None
                what = f"the states of the caption {caption!r:.60}"
                cache.write(key, _finite(read(caption, frame), what))
                texts += 1
        return images, texts

    def get(
        self, index: int, *, mirrored: bool = False, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], str]:
        """(*X) float32 latents, and the caption."""
        found = self._cache.read(self._keys[index][mirrored])
        latents = np.asarray(found["mean"], np.float32)
        if self._latents.draw and rng is not None and "deviation" in found:
            noise = rng.standard_normal(latents.shape, np.float32)
            latents = latents + np.asarray(found["deviation"], np.float32) * noise
        return latents.astype(np.float32), self.caption(index)

    def first_frame(self, index: int, *, mirrored: bool = False) -> NDArray[np.float32]:
        """Of a video, [H, W, 3] in [-1, 1].

        Raises:
          DataError: a video that cannot be decoded.
        """
        return self._images.get(index, mirrored=mirrored)[0][0]

    def arrays(self, index: int, *, dropped: bool = False, mirrored: bool = False) -> Arrays:
        """The caption's states, what the network receives of the first frame, what is fixed, and
        the image's sizes."""
        text, *_ = self._texts[self._said(index, mirrored, dropped=dropped)]
        found = {**self._cache.read(text), **self._latents.fixed}
        if self._latents.begins:
            image = self._cache.read(self._keys[index][mirrored])
            found |= {n: array for n, array in image.items() if n not in ("mean", "deviation")}
        if self._latents.sizes is not None:
            found["sizes"] = np.asarray(self._latents.sizes(self._images.frame(index)), np.float32)
        return found

    def caption(self, index: int) -> str:
        """The caption."""
        return self._images.caption(index)

    def weight(self, index: int) -> float:
        """Of the example's loss."""
        return self._images.weight(index)

    def content(self, index: int) -> str:
        """Of the image."""
        return self._images.content(index)

    def frame(self, index: int) -> tuple[int, ...]:
        """Of the image."""
        return self._images.frame(index)

    def texts(self) -> Iterable[str]:
        """All captions."""
        return self._images.texts()


def _finite(arrays: Arrays, what: str) -> Arrays:
    for array in arrays.values():
        if not np.isfinite(np.asarray(array, np.float32)).all():
            raise DataError(
                f"{what} have values that are not finite: the encoder's weights are damaged, or "
                "overflow in their dtype; check its files, or set encode.dtype to float32"
            )
    return arrays
