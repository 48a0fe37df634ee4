"""Language models that read a prompt with images among its words, as text encoders.

Legend: S tokens, N states of images, A axes of positions, D width, H height, W width.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from fornax.config.errors import ConfigError
from fornax.diffusion.models.files import load_part, read_folder_config
from fornax.diffusion.models.text import LLAVA_VISION, QWEN_VISION, fitted, llava_name, qwen_name
from fornax.diffusion.pipelines.parts import Parts, compiled
from fornax.diffusion.pipelines.pipeline import Size
from fornax.models import Decoder

__all__ = ["Pictures", "Read", "clip_pixels", "llava", "qwen_vl"]

Pictures = Sequence[np.ndarray]
"""uint8 [H, W, 3] each."""

_MEAN, _DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of colours, as CLIP's images are normalised where a file does not say."""


class Read(NamedTuple):
    """A text as a language model read it."""

    tokens_S: np.ndarray
    mask_S: np.ndarray
    """int32, 0 for padding, which is behind."""
    states_SD: jax.Array
    image: int
    """The token in whose places images' states stand."""


def qwen_vl(parts: Parts) -> Callable[[str, Pictures, int], Read]:
    """Qwen2.5-VL (Bai et al. 2025): states after the final norm, of any number of images.

    `read(text, pictures, length)` puts the states of the i-th picture into the place of the text's
    i-th `<|image_pad|>`, and fills up to `length` tokens beside them; it raises ConfigError for a
    text of more. Positions are of three axes, along which an image's states count by frame, row
    and column.
    """
    folder, words = parts.at("text_encoder"), parts.tokenizer("tokenizer")
    tower = load_part(QWEN_VISION, folder, "vision_config", qwen_name, **parts.dtypes)
    config, settings = tower.config, parts.settings("processor")
    values = read_folder_config(folder)
    mark, pad = "<|image_pad|>", int(values.get("image_token_id", 151_655))
    sections = _sections(values)
    see = compiled(tower, lambda tower, x_BHWC: tower(x_BHWC)[0])

    def call(decoder: Decoder, tokens_BS: Any, mask_BS: Any, seen_ND: Any, places_ABS: Any) -> Any:
        return _hidden(
            decoder, tokens_BS, mask_BS, seen_ND, pad, -1, positions=places_ABS, sections=sections
        )

    run = compiled(parts.decoder("text_encoder"), call)

    def read(text: str, pictures: Pictures, length: int) -> Read:
        seen, grids = [], []
        for picture_HWC in pictures:
            size = fitted(picture_HWC.shape[:2], config.multiple, *_areas(settings))
            image = Image.fromarray(picture_HWC)
            pixels = np.asarray(_resized(image, size, Image.Resampling.BICUBIC))
            seen.append(see(_normalised(pixels, settings)[None]))
            grids.append((size[0] // config.multiple, size[1] // config.multiple))
        pieces = text.split(mark)
        counts = [math.prod(grid) for grid in grids]
        text = pieces[0] + "".join(
            mark * count + piece for count, piece in zip(counts, pieces[1:], strict=True)
        )
        tokens_BS, mask_BS = words.encode([text])
        more = length + sum(counts) - tokens_BS.shape[1]
        if more < 0:
            raise ConfigError(
                f"a prompt has {length - more} tokens, with those around it, and this model reads "
                f"{length} beside its images; shorten it"
            )
        tokens_S, mask_S = (np.pad(row[0], (0, more)) for row in (tokens_BS, mask_BS))
        places_AS = _places(tokens_S, pad, grids)
        states_BSD = run(tokens_S[None], mask_S[None], jnp.concatenate(seen), places_AS[:, None])
        return Read(tokens_S, mask_S, states_BSD[0], pad)

    return read


def _sections(values: Any) -> tuple[int, ...]:
    """Pairs of a head that turn together, as config.json has them under one of several keys."""
    text = values.get("text_config") or values
    for key in ("rope_parameters", "rope_scaling"):
        found = (text.get(key) or {}).get("mrope_section")
        if found:
            return tuple(found)
    return 16, 24, 24


def _areas(settings: dict[str, Any]) -> tuple[int, int]:
    """The least and the most pixels of an image."""
    size = settings.get("size") or {}
    return (
        settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56,
        settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280,
    )


def _places(tokens_S: np.ndarray, pad: int, grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """int32 positions [3, S]: words count on all axes; after an image from its longer side on."""
    places_AS, at, start = np.zeros((3, len(tokens_S)), np.int32), 0, 0
    for rows, columns in grids:
        first = at + int(np.argmax(tokens_S[at:] == pad))
        places_AS[:, at:first] = start + np.arange(first - at)
        start += first - at
        at = first + rows * columns
        row, column = np.indices((rows, columns)).reshape(2, -1)
        places_AS[:, first:at] = start + np.stack([0 * row, row, column])
        start += max(rows, columns)
    places_AS[:, at:] = start + np.arange(len(tokens_S) - at)
    return places_AS


def llava(parts: Parts) -> Callable[[str, np.ndarray, int], Read]:
    """LLaVA (Liu et al. 2023): states two layers before the last of its layers, of one image.

    `read(text, picture, length)` puts the picture's states into the place of the text's `<image>`,
    before which and after which there are `length` tokens, as many as are not cut off.
    """
    folder, words = parts.at("text_encoder"), parts.tokenizer("tokenizer")
    tower = load_part(LLAVA_VISION, folder, None, llava_name, **parts.dtypes)
    settings, side = parts.settings("image_processor"), tower.config.vision.image_size
    values = read_folder_config(folder)
    pad = int(values.get("image_token_id", values.get("image_token_index", 32_000)))
    see = compiled(tower, lambda tower, x_BHWC: tower(x_BHWC)[0])
    run = compiled(
        parts.decoder("text_encoder"),
        lambda decoder, tokens_BS, mask_BS, seen_ND: _hidden(
            decoder, tokens_BS, mask_BS, seen_ND, pad, -3
        ),
    )

    def read(text: str, picture_HWC: np.ndarray, length: int) -> Read:
        seen_ND = see(clip_pixels(picture_HWC, side, settings)[None])
        tokens_BS, mask_BS = words.encode([text], length)
        at = int(np.argmax(tokens_BS[0] == pad))
        found = [
            np.concatenate([row[:at], np.full(len(seen_ND), fill, np.int32), row[at + 1 :]])
            for row, fill in ((tokens_BS[0], pad), (mask_BS[0], 1))
        ]
        tokens_S, mask_S = found
        return Read(tokens_S, mask_S, run(tokens_S[None], mask_S[None], seen_ND)[0], pad)

    return read


def _hidden(
    decoder: Decoder,
    tokens_BS: jax.Array,
    mask_BS: jax.Array,
    seen_ND: jax.Array,
    pad: int,
    layer: int,
    *,
    positions: jax.Array | None = None,
    sections: Sequence[int] = (),
) -> jax.Array:
    """States [1, S, D] after a layer, of tokens among which the images' states stand."""
    x_BSD = decoder.embed(tokens_BS)
    stands_BS = tokens_BS == pad
    index_BS = jnp.maximum(jnp.cumsum(stands_BS, axis=1) - 1, 0)
    x_BSD = jnp.where(stands_BS[..., None], seen_ND.astype(x_BSD.dtype)[index_BS], x_BSD)
    return decoder.hidden_states(
        tokens_BS,
        mask_BS,
        layers=(layer,),
        embeddings_BTD=x_BSD,
        positions_ABT=positions,
        sections=sections,
    )[:, :, 0]


def clip_pixels(picture_HWC: np.ndarray, side: int, settings: dict[str, Any]) -> np.ndarray:
    """A picture as CLIP takes it, float32 [side, side, 3]: the shorter side becomes its size, the
    middle is cut out, and each colour is normalised as the files say."""
    height, width = picture_HWC.shape[:2]
    shorter = min(height, width)
    size = int(height * side / shorter), int(width * side / shorter)
    picture = _resized(Image.fromarray(picture_HWC), size, Image.Resampling.BICUBIC)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    picture = picture.crop((left, top, left + side, top + side))
    return _normalised(np.asarray(picture), settings)


def _resized(picture: Image.Image, size: Size, how: Image.Resampling) -> Image.Image:
    return picture.resize((size[1], size[0]), how) if picture.size != size[::-1] else picture


def _normalised(pixels_HWC: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
    mean = np.asarray(settings.get("image_mean") or _MEAN, np.float32)
    deviation = np.asarray(settings.get("image_std") or _DEVIATION, np.float32)
    return (np.asarray(pixels_HWC, np.float32) / 255 - mean) / deviation
