"""Examples as the denoiser of a folder takes them, encoded once by the folder's own encoders."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from fornax.config.errors import ConfigError, DataError
from fornax.diffusion.config import DiffusionTuneConfig
from fornax.diffusion.data import Cache, CachedExamples, EncodedConfig, Examples, Latents
from fornax.diffusion.drawing import to_pixels
from fornax.diffusion.models.autoencoders import Tiling, latent_moments
from fornax.diffusion.models.transformer import TransformerConfig
from fornax.diffusion.network import NAMES
from fornax.diffusion.pipelines import Pipeline
from fornax.diffusion.pipelines.one_frame import of_images
from fornax.diffusion.run import tuning_images
from fornax.diffusion.setup import check_read
from fornax.diffusion.task import check_sizes
from fornax.diffusion.tuning.base import Base
from fornax.mesh import hosts

__all__ = ["encoded_examples"]

_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")


def encoded_examples(
    config: DiffusionTuneConfig, base: Base, splits: Sequence[str], out: Path
) -> dict[str, Examples]:
    """The examples of splits, encoded.

    Raises:
      DataError: they do not fit the model, or cannot be encoded.
      ConfigError: sizes that it does not draw.
    """
    found = {split: tuning_images(config, split) for split in splits}
    if isinstance(config.data, EncodedConfig):
        _check_encoded(config.data, base, found["train"])
        return found
    latents = _latents(config, base)
    cache = Cache(Path(config.encode.cache or out / "encoded").expanduser())
    encode, read = _encode_with(config, base), _read_with(base.pipeline)
    for split, images in found.items():
        if images.channels != base.pipeline.channels:
            raise DataError(
                f"the model draws images of {base.pipeline.channels} channels, and these have "
                f"{images.channels}; set data.channels to {base.pipeline.channels}"
            )
        flip = split == "train" and getattr(config.data, "flip", False)
        one = CachedExamples(images, cache, latents, flip=flip)
        hosts.decide(lambda one=one: list(one.fill(encode, read)))
        found[split] = one
    return found


def _latents(config: DiffusionTuneConfig, base: Base) -> Latents:
    """What images and captions become."""
    pipeline, parts, dtype = base.pipeline, base.parts, str(config.encode.dtype)
    tile = "" if config.encode.tile is None else f" {config.encode.tile}"
    guidance = 1.0 if config.encode.guidance is None else config.encode.guidance
    fixed = {"guidance": np.asarray(guidance, np.float32)}
    encoders = parts.fingerprint(*_ENCODERS, *_TOKENIZERS)
    seen = ""
    if pipeline.begins:
        seen = f" first {parts.fingerprint('image_encoder', 'image_processor')}"
    return Latents(
        size=base.latent_size,
        channels=pipeline.latent_shape(pipeline.size)[-1],
        images_key=f"{parts.fingerprint('vae')} {dtype}{tile}{seen}",
        begins=pipeline.begins,
        sees=pipeline.sees,
        texts_key=f"{encoders} {parts.index['_class_name']} {dtype}",
        fixed=fixed if pipeline.guidance == "embedded" else {},
        sizes=_sizes(config, base),
        draw=config.encode.latents == "sample",
    )


def _sizes(
    config: DiffusionTuneConfig, base: Base
) -> Callable[[tuple[int, ...]], Sequence[float]] | None:
    """What the denoiser receives of an image's own size and cut, or of a video's rate.

    Raises:
      ConfigError: a denoiser that receives the rate, of data that has none.
    """
    if "sizes_BN" not in base.network.takes:
        return None
    frames = base.pipeline.frames
    if frames is not None and frames.sizes is not None:
        rate = getattr(config.data, "rate", None)
        if rate is None:
            raise ConfigError(
                f"{base.parts.folder} receives the frames per second of a video; set data.rate, "
                f"such as {frames.rate:g}"
            )
        told = frames.sizes(rate)
        return lambda frame: told
    if isinstance(base.network.denoiser.config, TransformerConfig):
        # PixArt's: the image's own size, and the aspect of what was cut out (Chen et al. 2023).
        return lambda frame: (*frame[:2], frame[4] / frame[5])
    return lambda frame: frame


def _encode_with(
    config: DiffusionTuneConfig, base: Base
) -> Callable[[NDArray[np.float32]], dict[str, NDArray[Any]]]:
    """An image or video to the moments of its latents, as the denoiser is given them, and to what
    that is given of the first frame."""
    vae, frames = base.parts.module("vae"), base.pipeline.frames
    graph, state = nnx.split(vae if frames is not None else of_images(vae))
    tiling = None if config.encode.tile is None else Tiling(size=config.encode.tile)

    @jax.jit
    def run(state: Any, x_X: jax.Array) -> dict[str, jax.Array]:
        mean_BX, deviation_BX = latent_moments(nnx.merge(graph, state), x_X[None], tiling)
        found = {"mean": mean_BX[0]}
        return found if deviation_BX is None else {**found, "deviation": deviation_BX[0]}

    def mean(video_BFHWC: jax.Array) -> jax.Array:
        return run(state, video_BFHWC[0])["mean"][None]

    def encode(x_X: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        found = run(state, jnp.asarray(x_X))
        if frames is not None and frames.begin is not None:
            told, _ = frames.begin(mean, jnp.asarray(x_X[:1]), len(x_X))
            found |= {name: told[field][0] for name, field in NAMES.items() if field in told}
        return jax.tree.map(np.asarray, found)

    return encode


def _read_with(
    pipeline: Pipeline,
) -> Callable[[str | None, NDArray[np.float32] | None], dict[str, NDArray[Any]]]:
    """A caption to its states, none to those that guidance compares with; sizes and guidance are of
    the example. Where prompts are read beside images, that is the example's first frame."""
    empty = pipeline.encode_negative or pipeline.encode

    def read(caption: str | None, frame_HWC: NDArray[np.float32] | None) -> dict[str, NDArray[Any]]:
        encode = empty if caption is None else pipeline.encode
        pictures = () if frame_HWC is None else ((to_pixels(frame_HWC),),)
        condition = encode([caption], pipeline.size, 1.0, *pictures)
        given = {name: getattr(condition, field) for name, field in NAMES.items()}
        return {
            name: np.asarray(array[0])
            for name, array in given.items()
            if array is not None and name not in ("sizes", "guidance")
        }

    return read


def _check_encoded(data: EncodedConfig, base: Base, found: Examples) -> None:
    """Refuse latents and states of other encoders than the folder's.

    Raises:
      DataError: they do not fit the denoiser.
      ConfigError: it reads others beside them, or not all.
    """
    check_read(data, base.network.denoiser.config)
    _, _, channels = base.pipeline.latent_shape(base.pipeline.size)
    if found.channels != channels:
        raise DataError(
            f"data.path={data.path}: latents have {found.channels} channels, and the "
            f"autoencoder of {base.parts.folder} gives {channels}; encode the images with that"
        )
    check_sizes(found.sizes, base.network.denoiser.config)
    want = _read_with(base.pipeline)(None, None)
    for name in want:
        given = data.arrays.get(name)
        if given is None or given[0][-1:] != want[name].shape[-1:]:
            raise DataError(
                f"data.path={data.path}: {name} has shape {given and given[0]}, and the "
                f"text encoders of {base.parts.folder} give {want[name].shape}; encode the "
                "captions with these"
            )
    images = isinstance(base.network.denoiser.config, TransformerConfig)
    keys = {"sizes": None if images else "sizes to true", "guidance": "guidance, such as 1"}
    for name, field in NAMES.items():
        if field in base.network.takes and name not in (*data.arrays, "text_mask"):
            key = keys.get(name)
            raise ConfigError(
                f"{base.parts.folder} receives {name} beside what data.path={data.path} has; "
                + (f"set data.{key}" if key else "take images or videos, which this run encodes")
            )
