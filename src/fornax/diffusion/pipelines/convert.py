"""Pipelines and trained networks as folders of diffusers, a picture of both compared."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.config.errors import CheckpointError, ConfigError
from fornax.config.files import write_whole
from fornax.diffusion.load import is_diffusion_run, is_pipeline, load_run
from fornax.diffusion.pipelines.load import load_pipeline
from fornax.diffusion.pipelines.pipeline import Pipeline
from fornax.diffusion.pipelines.request import ImageRequest, blank_request, plan
from fornax.diffusion.pipelines.saving import check_target, save_pipeline, with_denoiser
from fornax.mesh import parse_dtype

__all__ = ["PictureParity", "convert_pipeline"]

_PROMPTS = ("a red fox in the snow", "0")
"""What is drawn: a text, and a class for models that take no text."""
_STEPS, _SIDE = 4, 256


@dataclass(frozen=True, kw_only=True)
class PictureParity:
    """What a conversion changed, measured on one picture: the content of `parity.json`."""

    source: str
    destination: str
    pipeline: str
    """Class of diffusers."""
    parameters: int
    """Of the networks that were written."""
    dtype: str | None
    """That was asked for; None for the source's."""
    prompt: str
    size: tuple[int, int]
    """Height and width in pixels."""
    steps: int
    seed: int
    max_abs_difference: float
    """Largest difference of any latent after the last step, computed in float32 from both sets of
    weights."""
    max_abs_latent: float
    """Largest latent, to judge the difference by."""
    max_pixel_difference: int
    """Largest difference of any decoded pixel, of 255."""


def convert_pipeline(
    source: str | Path,
    destination: str | Path,
    *,
    pipeline: str | Path | None = None,
    dtype: str | None = None,
    step: int | None = None,
    overwrite: bool = False,
) -> PictureParity:
    """Write a pipeline again, or a run's network into the place of a pipeline's own.

    What was written is loaded back and draws a picture beside the source; `parity.json` in the
    destination keeps the result.

    Args:
      source: a folder of diffusers, or a run of `fornax diffusion train`.
      destination: the folder to make.
      pipeline: of a run, the folder of diffusers whose network it was trained as, of which all
        else is taken.
      dtype: of the written networks; None for the source's.
      step: which checkpoint of a run; None takes the latest.
      overwrite: replace a destination that exists.

    Raises:
      ConfigError: a source of another kind, an option that does not apply to it, or a network that
        is none of the pipeline's.
      CheckpointError: weights that are missing or damaged, or a destination that exists.
    """
    source, destination = Path(source).expanduser(), Path(destination).expanduser()
    check_target(destination, source if pipeline is None else Path(pipeline), overwrite)
    loaded = _loaded(source, pipeline, step)
    assert loaded.parts is not None, "it was loaded from a folder of diffusers"
    expected, pixels, request = _drawn(loaded)
    chosen = None if dtype is None else parse_dtype(dtype)
    save_pipeline(loaded, destination, dtype=chosen, overwrite=overwrite)
    modules = {**loaded.parts.modules}
    count = sum(x.size for module in modules.values() for x in jax.tree.leaves(nnx.state(module)))
    name = str(loaded.parts.index["_class_name"])
    del loaded, modules
    found, again, _ = _drawn(load_pipeline(destination, compute_dtype=jnp.float32))
    assert request.prompt is not None, "a prompt is drawn"
    assert request.size is not None, "at a size"
    parity = PictureParity(
        source=str(source),
        destination=str(destination),
        pipeline=name,
        parameters=count,
        dtype=dtype,
        prompt=request.prompt,
        size=request.size,
        steps=_STEPS,
        seed=request.seed,
        max_abs_difference=float(np.abs(found - expected).max()),
        max_abs_latent=float(np.abs(expected).max()),
        max_pixel_difference=int(np.abs(again.astype(int) - pixels.astype(int)).max()),
    )
    try:
        text = json.dumps(dataclasses.asdict(parity), indent=2) + "\n"
        write_whole(destination / "parity.json", text)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {destination / 'parity.json'}: {error.strerror or error}; make room or "
            "make it writable"
        ) from error
    return parity


def _loaded(source: Path, pipeline: str | Path | None, step: int | None) -> Pipeline:
    """The pipeline to write, its products in float32."""
    is_run = is_diffusion_run(source)
    for name, value in (("pipeline", pipeline), ("step", step)):
        if value is not None and not is_run:
            raise ConfigError(
                f"{name}={value} is for a run of fornax diffusion train, and {source} is none; "
                "leave it out"
            )
    if pipeline is None:
        loaded = load_pipeline(source, compute_dtype=jnp.float32)
        if loaded.parts is None or step is not None:
            raise ConfigError(
                f"{source} is a run, which holds only a network; name the folder of diffusers "
                "whose network it was trained as with --pipeline DIR (a network of another shape "
                "has no class there: sample, serve and export take the run as it is)"
            )
        return loaded
    if not is_pipeline(pipeline):
        raise ConfigError(f"--pipeline {pipeline} has no model_index.json; name such a folder")
    run = load_run(source, step=step, compute_dtype=jnp.float32)
    return with_denoiser(load_pipeline(pipeline, compute_dtype=jnp.float32), run.denoiser)


def _drawn(pipeline: Pipeline) -> tuple[np.ndarray, np.ndarray, ImageRequest]:
    """Latents and uint8 pixels of one picture, and what was asked for."""
    side = max(1, _SIDE // pipeline.multiple) * pipeline.multiple
    size = pipeline.size if pipeline.sizes else min(pipeline.size, (side, side))
    frames = None if pipeline.frames is None else 1 + pipeline.frames.cut
    fields = {"prompt": _PROMPTS[0], "steps": _STEPS, "frames": frames}
    request = blank_request(pipeline, size, **fields)
    if pipeline.references is not None:
        grey = np.full((*size, 3), 128, np.uint8)
        request = dataclasses.replace(request, references=(grey,))
    try:
        job = plan(pipeline, request)
    except ConfigError:  # a model of classes
        request = dataclasses.replace(request, prompt=_PROMPTS[1])
        job = plan(pipeline, request)
    latents = pipeline.run(job)
    return np.asarray(latents), pipeline.images(latents), request
