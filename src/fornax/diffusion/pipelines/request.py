"""A request for images, checked, and made into the rows that a sampler runs.

Legend: B images, H height, W width, C channels, X axes of a latent.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from fornax.config import did_you_mean
from fornax.config.errors import ConfigError
from fornax.diffusion.guidance import check_guidance
from fornax.diffusion.models.condition import Condition
from fornax.diffusion.pipelines.pictures import resized, to_array, to_pixels
from fornax.diffusion.pipelines.pipeline import Frames, Job, Pipeline, Size
from fornax.diffusion.pipelines.references import read_reference
from fornax.diffusion.samplers import SAMPLERS, Table
from fornax.diffusion.sampling import noised
from fornax.diffusion.schedules import Schedule

__all__ = ["ImageRequest", "blank_request", "plan", "shown"]

_SEEDS = 2**32
_STEPS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ImageRequest:
    """What to draw. None is the model's own default."""

    prompt: str | None = None
    """None, for no condition."""
    negative: str | None = None
    """What to avoid; None for no condition."""
    count: int = 1
    """Images; the i-th is of key `fold_in(key(seed), i)`, whatever their number."""
    size: Size | None = None
    """Height and width in pixels."""
    frames: int | None = None
    """Of a video."""
    rate: float | None = None
    """Frames of a video per second, which some models receive."""
    steps: int | None = None
    guidance: float | None = None
    """Scale of guidance; 1 for none, which is the least where it is by two evaluations."""
    seed: int = 0
    sampler: str | None = None
    """A name of `SAMPLERS`."""
    image: np.ndarray | None = None
    """float32 [H, W, C] in [-1, 1] to start from; of a video its first frame."""
    references: tuple[np.ndarray, ...] = ()
    """uint8 [H, W, 3] to draw after, each of any size (`References`)."""
    strength: float | None = None
    """In (0, 1]: how much of the schedule an image goes through; 0.8, or 1 with a mask."""
    mask: np.ndarray | None = None
    """float32 [H, W] in [0, 1]: 1 where to draw, 0 where to keep `image`."""
    controls: tuple[np.ndarray, ...] = ()
    """float32 [H, W, 3] in [0, 1] to follow, one for each ControlNet."""
    adapter: str | None = None
    """One of `Pipeline.adapters`; None for the model alone."""
    latents_BX: jax.Array | None = None
    """float32 [count, *X] standard normal noise instead of the seed's."""


def shown(
    pipeline: Pipeline,
    pictures: Sequence[Image.Image],
    size: Size,
    *,
    strength: float | None,
    masked: bool,
    crop: bool = False,
) -> dict[str, Any]:
    """Fields of `ImageRequest` of pictures: `references` to draw after, `image` to start from.

    A model that can draws after them, unless `strength` alone is given. Others, and with a strength
    or a mask these too, start from the first. Where a model does both, as to fill a mask in what it
    edits, it reads that one as it is started from, stretched to the size.

    Args:
      pipeline: the model.
      pictures: as they were given, of any size.
      size: of the request.
      strength: likewise.
      masked: whether it has a mask.
      crop: whether references are cut to the proportions of the size and brought to it, so that
        requests of one size are of one shape.

    Raises:
      ConfigError: several pictures, of which all but one would be left out.
    """
    known, found = pipeline.references, dict[str, Any]()
    after = known is not None and (strength is None or masked or known.needed)
    starts = known is None or strength is not None or masked
    if len(pictures) > 1 and not after:
        raise ConfigError(
            f"{len(pictures)} images are given, and this model starts from one; give one"
            + (", or leave strength out to draw after all of them" if known is not None else "")
        )
    if pictures and starts:
        found["image"] = to_array(pictures[0], size, pipeline.channels)
    if after:
        seen = [resized(pictures[0], size), *pictures[1:]] if pictures and starts else pictures
        found["references"] = tuple(to_pixels(one, size if crop else None) for one in seen)
    return found


def plan(pipeline: Pipeline, request: ImageRequest) -> Job:
    """The rows of a request.

    Raises:
      ConfigError: a value out of its range, or something that the model cannot do.
    """
    size = request.size or pipeline.size
    pipeline.check_size(size)
    _check(pipeline, request, size)
    scale = pipeline.scale if request.guidance is None else request.guidance
    shape = pipeline.latent_shape(size)
    told: dict[str, Any] = {}
    first_BX = None
    if pipeline.frames is not None:
        count = request.frames or pipeline.frames.count
        shape = (pipeline.frames.latent(count), *shape)
        told, first_BX = _told(pipeline.frames, request, count)
    if request.references:
        assert pipeline.to_latents is not None, "models with references have an autoencoder"
        assert pipeline.references is not None, "refused above"
        told["references"] = tuple(
            pipeline.to_latents(
                jnp.asarray(read_reference(picture, pipeline.references, pipeline.multiple))[None]
            ).astype(jnp.float32)
            for picture in request.references
        )
    schedule = pipeline.schedule(request.steps or pipeline.steps, shape)
    strength = request.strength or (0.8 if request.mask is None else 1.0)
    asks, cache, whole = None, pipeline.cache, schedule
    starts = request.image is not None and pipeline.frames is None
    if starts:
        schedule = schedule.from_strength(strength)
    table = _table(pipeline, request.sampler, schedule)
    if cache is not None:
        of_whole = _table(pipeline, request.sampler, whole).evaluations
        asks = cache.asks(table.evaluations, of_whole)
    base = jax.random.key(request.seed)
    keys = jax.vmap(lambda i: jax.random.fold_in(base, i))(jnp.arange(request.count))
    noise_BX = request.latents_BX
    if noise_BX is None:
        noise_BX = jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(keys)
    data_BX, keep = None, None
    if first_BX is not None and pipeline.frames is not None:
        lean = pipeline.frames.lean
        noise_BX = (1 - lean) * noise_BX + lean * first_BX
    if "first_BX" in told:
        held_BX = jnp.zeros_like(noise_BX).at[:, :1].set(first_BX)
        keep = (held_BX, jnp.ones_like(noise_BX[..., :1]).at[:, 0].set(0.0), noise_BX)
    if starts:
        assert request.image is not None, "it was tested"
        assert pipeline.to_latents is not None, "refused above"
        latent = pipeline.to_latents(jnp.asarray(request.image)[None]).astype(jnp.float32)
        data_BX = jnp.broadcast_to(latent, noise_BX.shape)
        if request.mask is not None and not pipeline.fills:
            keep = (data_BX, _latent_mask(request.mask, noise_BX.shape), noise_BX)

    pictures = (_seen(request),) if pipeline.sees else ()

    def rows(prompt: str | None, encode: Callable[..., Condition]) -> Condition:
        row = encode([prompt], size, scale, *pictures)
        row = dataclasses.replace(row, image_BX=_beside(pipeline, request, shape, row.image_BX))
        row = dataclasses.replace(row, **told)  # pyrefly: ignore[bad-argument-type]
        if pipeline.adapters:
            numbers = {name: number for number, name in enumerate(pipeline.adapters, start=1)}
            number = 0 if request.adapter is None else numbers[request.adapter]
            row = dataclasses.replace(row, adapter_B=jnp.full((1,), number, jnp.int32))
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, request.count, 0), row)

    negative = pipeline.encode_negative or pipeline.encode
    guides = pipeline.guidance == "free" and scale != 1
    return Job(
        # Within a mask nothing of the picture is a start, where all of the schedule is run.
        start_BX=noised(
            schedule, noise_BX, None if request.mask is not None and strength == 1 else data_BX
        ),
        condition=rows(request.prompt, pipeline.encode),
        empty=rows(request.negative, negative) if guides else None,
        scale=jnp.full((request.count,), scale, jnp.float32),
        keys=keys,
        table=table,
        keep=keep,
        asks=asks,
    )


def blank_request(pipeline: Pipeline, size: Size, **fields: Any) -> ImageRequest:
    """A request with all images that the model cannot do without, but those that it edits: grey.

    Args:
      pipeline: the model.
      size: of the images.
      **fields: others of the request's.
    """
    grey = np.zeros((*size, 3), np.float32)
    return ImageRequest(
        size=size,
        image=grey if pipeline.begins or pipeline.fills else None,
        mask=np.ones(size, np.float32) if pipeline.fills else None,
        controls=(grey,) * pipeline.follows,
        **fields,
    )


def _seen(request: ImageRequest) -> tuple[np.ndarray, ...]:
    """The images beside which a prompt is read, uint8 [H, W, 3]."""
    if request.image is None or request.references:
        return request.references
    return (np.round((request.image + 1) * 127.5).astype(np.uint8),)


def _told(
    frames: Frames, request: ImageRequest, count: int
) -> tuple[dict[str, Any], jax.Array | None]:
    """Fields of a video's condition that do not follow from the prompt, [1, ...], and the latents
    of its first frame where that is given."""
    told: dict[str, Any] = {}
    first_BX = None
    if frames.sizes is not None:
        told["sizes_BN"] = jnp.float32([frames.sizes(request.rate or frames.rate)])
    if frames.begin is not None:
        assert request.image is not None, "refused before"
        assert frames.encode is not None, "videos that begin with an image have an encoder"
        more, first_BX = frames.begin(frames.encode, jnp.asarray(request.image)[None], count)
        told |= more
    return told, first_BX


def _beside(
    pipeline: Pipeline, request: ImageRequest, shape: tuple[int, ...], own: jax.Array | None
) -> jax.Array | None:
    """What the denoiser receives beside the noisy latents, [1, ...]."""
    if pipeline.follows:
        return jnp.concatenate([jnp.asarray(one)[None] for one in request.controls], -1)
    if not pipeline.fills:
        return own
    assert request.image is not None, "refused before"
    assert request.mask is not None, "refused before"
    assert pipeline.to_latents is not None, "models that fill have an autoencoder"
    kept = request.image * (request.mask < 0.5)[:, :, None]
    latent = pipeline.to_latents(jnp.asarray(kept)[None]).astype(jnp.float32)
    return jnp.concatenate([_latent_mask(request.mask, (1, *shape)), latent], -1)


def _table(pipeline: Pipeline, sampler: str | None, schedule: Schedule) -> Table:
    if sampler is None:
        table = pipeline.sampler(schedule)
    elif sampler in SAMPLERS:
        table = SAMPLERS[sampler](schedule)
    else:
        raise ConfigError(f"sampler {sampler!r} is not known; {did_you_mean(sampler, SAMPLERS)}")
    if pipeline.prediction == "noise" and (table.points[:-1, 1] == 0).any():
        raise ConfigError(
            "this model predicts noise, and its schedule starts where there is nothing else (zero "
            "terminal SNR); its scheduler_config.json must not rescale betas to that"
        )
    return table


def _check(pipeline: Pipeline, request: ImageRequest, size: Size) -> None:
    steps, guidance = request.steps, request.guidance
    if steps is not None and not 1 <= steps <= _STEPS:
        raise ConfigError(f"steps={steps} must be from 1 to {_STEPS}")
    check_guidance("guidance", guidance)
    if guidance is not None and guidance < 1 and pipeline.guidance == "free":
        raise ConfigError(
            f"guidance={guidance:g} would leave out the prompt, in whole or in part: 1 means no "
            "guidance here, as 0 does in diffusers; give 1 or more"
        )
    if guidance not in (None, 1) and pipeline.guidance == "none":
        raise ConfigError(
            f"guidance={guidance:g}: this model takes none, since it has no captions or was "
            "distilled without; leave it out"
        )
    if request.negative is not None and pipeline.guidance != "free":
        raise ConfigError(
            "a negative prompt works through guidance by two evaluations, which this model does "
            "not use; leave it out"
        )
    if request.negative is not None and (pipeline.scale if guidance is None else guidance) == 1:
        raise ConfigError(
            "a negative prompt has no effect where guidance is 1; set guidance above 1, or leave "
            "the negative prompt out"
        )
    if not 0 <= request.seed < _SEEDS:
        raise ConfigError(f"seed={request.seed} must be from 0 to {_SEEDS - 1}")
    if request.adapter is not None and request.adapter not in pipeline.adapters:
        raise ConfigError(
            f"adapter {request.adapter!r} is not loaded; use one of "
            f"{', '.join(pipeline.adapters) or 'none'}"
        )
    if request.count < 1:
        raise ConfigError(f"count={request.count} must be at least 1")
    for name in ("frames", "rate") if pipeline.frames is None else ():
        if getattr(request, name) is not None:
            raise ConfigError(f"{name} is of videos, and this model draws images; leave it out")
    if request.frames is not None and request.frames < 1:
        raise ConfigError(f"frames={request.frames} must be at least 1")
    if request.rate is not None and not 0 < request.rate <= 240:
        raise ConfigError(f"rate={request.rate:g} frames per second must be above 0, at most 240")
    _check_image(pipeline, request, size)


def _check_image(pipeline: Pipeline, request: ImageRequest, size: Size) -> None:
    if pipeline.fills and (request.image is None or request.mask is None):
        raise ConfigError(
            "this model fills a part of a picture; give an image, and a mask of what to draw"
        )
    if pipeline.begins and request.image is None:
        raise ConfigError("this model draws videos that begin with an image; give one (--image)")
    if len(request.controls) != pipeline.follows:
        follows = f"follows {pipeline.follows} images; give one for each ControlNet, in their order"
        if pipeline.follows < 2:
            follows = "follows one image; give one"
        if not pipeline.follows:
            follows = (
                "has no ControlNet to follow an image; add one (--controlnet), or leave it out"
            )
        raise ConfigError(
            f"{len(request.controls)} images to follow (--control): this model {follows}"
        )
    _check_references(pipeline, request)
    for control in request.controls:
        if control.shape != (*size, 3):
            raise ConfigError(
                f"an image to follow is {'x'.join(map(str, control.shape))} (rows, columns, "
                f"channels); it must be {size[0]}x{size[1]}x3"
            )
    if request.image is None:
        for name in ("mask", "strength"):
            if getattr(request, name) is not None:
                raise ConfigError(f"{name} is of an image to start from; give an image too")
        return
    if pipeline.frames is not None and not pipeline.begins:
        raise ConfigError("this model draws videos from text only; leave the image out")
    for name in ("mask", "strength") if pipeline.frames is not None else ():
        if getattr(request, name) is not None:
            raise ConfigError(f"{name} is of images, and this model draws videos; leave it out")
    if pipeline.to_latents is None and pipeline.frames is None:
        raise ConfigError(
            "this model cannot start from an image: its files have no encoder of images; leave "
            "the image out"
        )
    if request.image.shape[:2] != size:
        height, width = request.image.shape[:2]
        raise ConfigError(f"the image is {width}x{height}; it must be {size[1]}x{size[0]}")
    if request.mask is not None and request.mask.shape != size:
        height, width = request.mask.shape[:2]
        raise ConfigError(f"the mask is {width}x{height}; it must be {size[1]}x{size[0]}")
    if request.strength is not None and not 0 < request.strength <= 1:
        raise ConfigError(f"strength={request.strength:g} must be above 0 and at most 1")


def _check_references(pipeline: Pipeline, request: ImageRequest) -> None:
    count, known = len(request.references), pipeline.references
    if known is None:
        if count:
            raise ConfigError("this model draws after no images; leave the references out")
        return
    if known.needed and not count:
        raise ConfigError("this model draws after an image; give one (--image)")
    if known.most is not None and count > known.most:
        raise ConfigError(
            f"{count} images to draw after are given, and this model takes {known.most} at most; "
            f"give {known.most}"
        )


def _latent_mask(mask_HW: np.ndarray, shape: tuple[int, ...]) -> jax.Array:
    """The mask at the latents' places, [B, h, w, 1]: of each, the pixel at its corner."""
    height, width = shape[-3:-1]
    down, across = mask_HW.shape[0] // height, mask_HW.shape[1] // width
    small_HW = jnp.asarray(mask_HW[::down, ::across] >= 0.5, jnp.float32)
    return jnp.broadcast_to(small_HW[None, :, :, None], (shape[0], height, width, 1))
