"""Grids of what a tuned model draws, by step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.diffusion.config import DiffusionTuneConfig
from fornax.diffusion.data import CachedExamples, Examples
from fornax.diffusion.drawing import write_grid
from fornax.diffusion.network import Network
from fornax.diffusion.pipelines import ImageRequest, join, plan
from fornax.diffusion.task import rate_of, spread, spread_captions
from fornax.diffusion.tuning.base import Base, layout_of
from fornax.mesh import hosts, tree_shardings
from fornax.train import Samples

__all__ = ["grids_of"]


def grids_of(
    config: DiffusionTuneConfig, base: Base, examples: Examples, folder: Path
) -> Samples[Network] | None:
    """Grids of what the model draws, by step; None where none are asked for."""
    said, pipeline = config.sample, base.pipeline
    if said.every is None:
        return None
    usual = int(np.bincount(examples.bucket).argmax())
    *count, height, width = examples.sizes[usual]
    prompts, images = list(said.prompts), [None]
    frames = pipeline.frames
    if pipeline.begins and isinstance(examples, CachedExamples):
        found = spread(np.flatnonzero(examples.bucket == usual), said.count)
        prompts = prompts or [examples.caption(index) for index in found]
        images = [examples.first_frame(index) for index in found]
    prompts = prompts or spread_captions(examples, said.count)
    rate = rate_of(config) if frames is None else getattr(config.data, "rate", None) or frames.rate
    jobs = [
        plan(
            pipeline,
            ImageRequest(
                prompt=prompts[i % len(prompts)],
                image=images[i % len(images)],
                size=(height * base.factor, width * base.factor),
                frames=None if frames is None else 1 + (count[0] - 1) * frames.factor,
                rate=None if frames is None else rate,
                steps=said.steps,
                guidance=None if pipeline.guidance == "none" else said.guidance,
                sampler=said.sampler,
                seed=(said.seed + i) % 2**32,
            ),
        )
        for i in range(said.count)
    ]
    job = join(jobs)
    if frames is not None:
        frames = replace(frames, encode=None, begin=None)
    pipeline = replace(
        pipeline, rescale=said.rescale, encode=_released, to_latents=None, frames=frames
    )
    whole, other = base.whole, {}
    if base.other is not None:
        other = nnx.state(base.other)
        mesh, rules = layout_of(config, other)
        other = jax.device_put(other, tree_shardings(other, mesh, rules))

    def run(graph: Any, state: Any, other: Any, arrays: Any) -> jax.Array:
        denoiser = whole(nnx.merge(graph, state).denoiser, other)
        return pipeline.drawn(denoiser, job.table, arrays)

    drawn = jax.jit(run, static_argnums=0)

    def show(step: int, network: Network) -> None:
        graph, state = nnx.split(network)
        latents = hosts.whole(drawn(graph, state, other, job.arrays))
        if jax.process_index() == 0:
            images = pipeline.images(jnp.asarray(latents))
            write_grid(folder / "images" / f"step-{step:07d}.png", images, rate)

    return Samples(every=said.every, show=show)


def _released(prompts: Any, size: Any, guidance: float) -> Any:
    """In place of text encoders that are not needed any more."""
    raise ValueError("the text encoders were released: prompts are encoded before the first step")
