"""What a user may say about the images or videos that a diffusion model is trained on."""

import math
from dataclasses import dataclass
from typing import Literal

from fornax.config.errors import ConfigError
from fornax.diffusion.guidance import check_guidance

__all__ = ["EncodedConfig", "ImageData", "ImagesConfig", "LettersConfig"]


@dataclass(frozen=True, kw_only=True)
class LettersConfig:
    """Letters drawn from fonts that matplotlib ships, "bold serif R": no file is needed."""

    type: Literal["letters"] = "letters"
    colour: bool = False
    """Three channels, with the colours in the caption."""
    size: int = 0
    """Height and width; 0 takes 16 in grey and 32 in colour."""
    count: int = 20_000
    """Different examples."""
    seed: int = 0
    """Another seed draws other sizes and places."""
    holdout: int = 512
    """Further examples of the same letters and styles, for evaluation."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.count < 1 or self.holdout < 1:
            raise ConfigError(f"count={self.count}, holdout={self.holdout}; both must be 1 or more")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must be 0 or more")
        if self.size and self.size < 8:
            raise ConfigError(
                f"size={self.size}; letters are legible from 8 pixels on; 0 takes the usual"
            )


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Images with captions, or with `frames` videos: a folder, Parquet files, or the tar files of
    WebDataset."""

    type: Literal["images"] = "images"
    path: str = ""
    """A folder of images or videos, whose captions are beside them in `.txt` files of the same name
    or in `metadata.jsonl`; a Parquet file or a folder of them; a tar file or a folder of them."""
    image: str = "image"
    """Parquet's column of images or videos: their bytes, or a struct with `bytes`."""
    caption: str = "text"
    """Parquet's column of captions, or their key in `metadata.jsonl` and WebDataset's `.json`."""
    prompt: str | None = None
    """One caption for all images, such as "a photo of sks dog", in place of their own."""
    allow_empty_captions: bool = False
    """Whether an image may have no caption; else it is refused."""
    channels: Literal[1, 3] = 3
    """3 for colour, 1 for grey."""
    resolution: int = 256
    """Images become about resolution x resolution pixels: no bucket has more."""
    multiple: int = 16
    """Heights and widths of buckets are multiples of it: of the patch, times the autoencoder's
    factor."""
    max_aspect: float = 2.0
    """The longest side of a bucket over its shortest; 1 leaves the square alone. Each bucket's
    program is compiled once."""
    frames: tuple[int, ...] = ()
    """Of videos, how many an example may have, such as 17 33: one has the most that its file fills.
    1 takes images too. Empty: images alone."""
    rate: float | None = None
    """Frames that are taken of a second of a video; null takes all that the file has."""
    clips: Literal["first", "all"] = "first"
    """Of a longer video, its first frames, or clip after clip, each an example."""
    upscale: bool = False
    """Whether an image smaller than its bucket is enlarged; else it is refused."""
    flip: bool = False
    """Show every second view of an image mirrored."""
    holdout: float = 0.0
    """Share of the images that is kept for evaluation."""
    verify: bool = True
    """Decode every image or video before the first step, so that a broken one ends no run."""
    threads: int = 4
    """Threads that decode."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.multiple < 1 or self.resolution < self.multiple:
            raise ConfigError(
                f"resolution={self.resolution}, multiple={self.multiple}; use a resolution of at "
                "least one multiple"
            )
        if not (math.isfinite(self.max_aspect) and self.max_aspect >= 1):
            raise ConfigError(f"max_aspect={self.max_aspect:g} must be 1 or more")
        if not 0 <= self.holdout < 1:
            raise ConfigError(f"holdout={self.holdout:g} must be at least 0 and below 1")
        if self.threads < 1:
            raise ConfigError(f"threads={self.threads} must be 1 or more")
        if any(count < 1 for count in self.frames):
            raise ConfigError(f"frames={list(self.frames)} must each be 1 or more")
        if self.rate is not None and not 0 < self.rate <= 240:
            raise ConfigError(f"rate={self.rate:g} must be above 0 and at most 240 a second")
        if not self.frames and (self.rate is not None or self.clips != "first"):
            raise ConfigError(
                f"rate={self.rate} and clips={self.clips!r} are of videos; set frames, such as 17, "
                "or leave them out"
            )


@dataclass(frozen=True, kw_only=True)
class EncodedConfig:
    """Latents and text states that were encoded once, in safetensors files.

    Each file holds arrays of some examples: `latents` [N, *shape], and what the network is
    conditioned on, `text` [N, S, D], `text_mask` [N, S], `pooled` [N, E].
    """

    type: Literal["encoded"] = "encoded"
    path: str = ""
    """A folder of .safetensors files."""
    shape: tuple[int, ...]
    """Of one example's latents, channels last: rows, columns, C; of videos frames first."""
    text_length: int | None = None
    """S, tokens of `text`; null where there is none."""
    text_width: int | None = None
    """D, width of `text`."""
    pooled_width: int | None = None
    """E, width of `pooled`; null where there is none."""
    sizes: bool = False
    """Whether files have `sizes` [N, 6], SDXL's time ids in pixels."""
    guidance: float | None = None
    """The guidance passed to a network distilled with it (Flux-dev); null where it takes none."""
    holdout: int = 0
    """The last this many examples are kept for evaluation."""
    verify: bool = True
    """Read all arrays before the first step, so that one that is not finite ends no run."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if len(self.shape) not in (3, 4) or min(self.shape) < 1:
            raise ConfigError(
                f"data.shape={list(self.shape)}; give rows, columns and channels of latents, of "
                "videos frames before them, each 1 or more"
            )
        if (self.text_length is None) != (self.text_width is None):
            raise ConfigError(
                f"data.text_length={self.text_length}, data.text_width={self.text_width}; give "
                "both or neither"
            )
        for name in ("text_length", "text_width", "pooled_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"data.{name}={value} must be 1 or more")
        if self.holdout < 0:
            raise ConfigError(f"data.holdout={self.holdout} must be 0 or more")
        check_guidance("data.guidance", self.guidance)

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name to shape and dtype, of one example, of all but the latents."""
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        if self.text_length is not None and self.text_width is not None:
            found["text"] = ((self.text_length, self.text_width), "bfloat16")
            found["text_mask"] = ((self.text_length,), "int32")
        if self.pooled_width is not None:
            found["pooled"] = ((self.pooled_width,), "bfloat16")
        if self.sizes:
            found["sizes"] = ((6,), "float32")
        if self.guidance is not None:
            found["guidance"] = ((), "float32")
        return found


ImageData = ImagesConfig | LettersConfig | EncodedConfig
