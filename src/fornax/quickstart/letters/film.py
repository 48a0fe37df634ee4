"""One run of the sampler as an animated picture: noise becomes letters."""

import io
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from fornax.diffusion import SAMPLERS, guided, noised
from fornax.diffusion.drawing import grid, start_noise, to_pixels
from fornax.diffusion.load import LoadedRun
from fornax.diffusion.network import apply
from fornax.diffusion.predictions import Point, to_data
from fornax.diffusion.sampling import Row, State, advance

__all__ = ["animation", "trajectory"]


def trajectory(
    run: LoadedRun, prompts: Sequence[str], *, seed: int, steps: int, guidance: float
) -> NDArray[np.float32]:
    """(steps + 1, B, H, W, C): what the network sees at each step of Euler's method; the end."""
    schedule = run.schedule(steps)
    table = SAMPLERS["euler"](schedule)
    graph, params = nnx.split(run.network)
    condition, empty = run.encode(prompts), run.encode([""] * len(prompts))
    noise_BX = start_noise(seed, len(prompts), run.shape)

    @jax.jit
    def whole(params, condition, empty, noise_BX):
        denoiser = nnx.merge(graph, params).denoiser
        network = guided(
            lambda x, point, c: apply(denoiser, run.objective, x, point, c),
            condition,
            empty,
            guidance,
        )

        def step(state: State, slices):
            at, correct, update = slices
            row = Row(Point(*at), tuple(correct), tuple(update), jnp.float32(0))
            data = to_data(
                run.objective.prediction, network(state.x_BX, row.point), state.x_BX, row.point
            )
            state = advance(state, data, row, None)
            return state, state.x_BX

        slices = tuple(
            jnp.asarray(part, jnp.float32)
            for part in (table.points[:-1], table.correct, table.update)
        )
        x_BX = noised(schedule, noise_BX)
        empty_KBX = jnp.zeros((table.memory, *x_BX.shape), x_BX.dtype)
        frames = jax.lax.scan(step, State(x_BX, x_BX, empty_KBX), slices)[1]
        return jnp.concatenate([x_BX[None], frames])

    return np.asarray(whole(params, condition, empty, noise_BX))


def animation(frames: NDArray[np.float32], *, milliseconds: int = 120) -> bytes:
    """Frames of images in [-1, 1] as an animated WebP that repeats, its last frame held longer."""
    pictures = [grid(to_pixels(frame)) for frame in frames]
    buffer = io.BytesIO()
    durations = [milliseconds] * (len(pictures) - 1) + [1500]
    pictures[0].save(
        buffer,
        "WEBP",
        save_all=True,
        append_images=pictures[1:],
        duration=durations,
        loop=0,
        lossless=True,
    )
    return buffer.getvalue()
