"""A run directory of `fornax diffusion train` as a pipeline."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.typing import DTypeLike

from fornax.config.errors import ConfigError
from fornax.diffusion.load import load_run
from fornax.diffusion.models import Condition
from fornax.diffusion.pipelines.pipeline import Frames, Pipeline, Size
from fornax.diffusion.samplers import SAMPLERS
from fornax.diffusion.task import rate_of

__all__ = ["trained_pipeline"]


def trained_pipeline(
    folder: str | Path, dtype: DTypeLike | None = None, compute_dtype: DTypeLike | None = None
) -> Pipeline:
    """The latest checkpoint of a run, with its averaged parameters; see `load_pipeline`.

    Raises:
      ConfigError: a run of another kind, or of latents.
      CheckpointError: no checkpoint, or a damaged one.
    """
    computed = dtype if compute_dtype is None else compute_dtype
    run = load_run(folder, dtype=dtype, compute_dtype=computed)
    *count, height, width, channels = run.shape
    if channels not in (1, 3):
        raise ConfigError(
            f"{folder} was trained on examples of {channels} channels, which are latents and no "
            "images, and the run does not say of which autoencoder; fornax convert --pipeline DIR "
            "puts its network into the folder of diffusers that it was trained as"
        )

    has_text = run.facts.prompts is not None

    def encode(prompts: Sequence[str | None], size: Size, guidance: float) -> Condition:
        return run.encode([prompt or "" for prompt in prompts])

    def same(x_BX: jax.Array) -> jax.Array:
        return x_BX

    base = Pipeline(
        name=str(folder),
        denoiser=run.denoiser,
        prediction=run.objective.prediction,
        schedule=lambda steps, shape: run.schedule(steps),
        sampler=SAMPLERS[run.sample.sampler],
        encode=encode,
        latent_shape=lambda size: (*size, channels),
        decode=same,
        to_latents=same,
        guidance="free" if has_text else "none",
        size=(height, width),
        sizes=tuple(dict.fromkeys((shape[-3], shape[-2]) for shape in run.shapes)),
        frames=Frames(count=count[0], factor=1, rate=rate_of(run.config)) if count else None,
        multiple=1,
        channels=channels,
        steps=run.sample.steps,
        scale=run.sample.guidance if has_text else 1.0,
        rescale=run.sample.rescale,
    )
    if run.objective.path == "edm":
        base = dataclasses.replace(base, sigma_data=run.objective.sigma_data)
    return base
