"""A model that draws, as one record: prompts to conditions, a denoiser, latents to images.

Legend: B images or videos, X axes of a latent (H, W, C for images, with F before them for videos),
F frames, H height and W width in pixels, C channels.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from fornax.config.errors import ConfigError
from fornax.diffusion.guidance import guided
from fornax.diffusion.models.condition import Condition
from fornax.diffusion.models.transformer import Around
from fornax.diffusion.pipelines.parts import Parts
from fornax.diffusion.pipelines.step_cache import Asks, StepCache, Stepper
from fornax.diffusion.predictions import Point, Prediction, along, preconditioning, to_data
from fornax.diffusion.samplers import Table
from fornax.diffusion.sampling import KeepingNetwork, Network, inpaint, sample, sample_keeping
from fornax.diffusion.schedules import Schedule
from fornax.mesh import Rules, tree_shardings, use_mesh

__all__ = [
    "Begun",
    "EncodeVideo",
    "Frames",
    "Guidance",
    "Job",
    "Pipeline",
    "References",
    "Size",
    "join",
    "parse_size",
]

Size = tuple[int, int]
"""Height and width in pixels."""

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")

Guidance = Literal["free", "embedded", "none"]
"""`free`: two evaluations, conditioned and not; `embedded`: an input of the network; `none`."""

Prompts = Sequence[str | None]
"""Texts, or None for no condition."""

EncodeVideo = Callable[[jax.Array], jax.Array]
Begun = tuple[Mapping[str, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Frames:
    """The frames of a model that draws videos.

    Attributes:
      count: by default.
      factor: k of the 1 + k n frames that are 1 + n of latents.
      rate: frames per second, by default.
      sizes: of a rate, the numbers that the denoiser receives (`Condition.sizes_BN`); None where
        it receives none.
      encode: a video float32 [1, F, H, W, 3] in [-1, 1] to its latents.
      begin: of `encode` and an image float32 [1, H, W, 3] in [-1, 1] that a video of this many
        frames begins with, the fields of `Condition` that tell the denoiser, and the image's
        latents [1, 1, h, w, C]; None where videos are of text alone.
      lean: share of those latents, beside the noise, in each of a video's latents at the start.
      cut: frames at the front of what is decoded that are not of the video.
    """

    count: int
    factor: int
    rate: float
    sizes: Callable[[float], Sequence[float]] | None = None
    encode: EncodeVideo | None = None
    begin: Callable[[EncodeVideo, jax.Array, int], Begun] | None = None
    lean: float = 0.0
    cut: int = 0

    def latent(self, count: int) -> int:
        """Frames of latents of a video's.

        Raises:
          ConfigError: another number than 1 + k n, or none that is left.
        """
        least = 1 + math.ceil(self.cut / self.factor) * self.factor
        if count < 1 or (count - 1) % self.factor:
            near = max(least, round((count - 1) / self.factor) * self.factor + 1)
            raise ConfigError(
                f"frames={count}: this model draws 1 + {self.factor} n frames; use {near}"
            )
        if count <= self.cut:
            raise ConfigError(
                f"frames={count}: this model draws {self.cut} frames before those of the video; "
                f"use {least} or more"
            )
        return 1 + (count - 1) // self.factor


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class References:
    """The images that a model draws after, as tokens beside the sample's.

    Attributes:
      size: at which a picture of a size is read, before it is cut to a multiple around its middle.
        Raises ConfigError for a picture that the model cannot read.
      most: of them; None for any number.
      needed: whether there must be one.
    """

    size: Callable[[Size], Size]
    most: int | None = None
    needed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """What draws images, whatever its family; the functions take and give whole batches.

    Attributes:
      name: what it is, for messages and lists of models.
      denoiser: `denoiser(x_BX, time_B, condition)`; its output is `prediction`, perhaps with more
        channels behind, which are not read.
      prediction: what the denoiser's output is.
      schedule: steps and a latent's shape X to the noise levels.
      sampler: of a schedule, a sampler's table: the one that the files name.
      encode: prompts, the images' size, guidance to a condition of a row for each prompt. Raises
        ConfigError for a prompt that the model cannot read.
      latent_shape: a size in pixels to the latent's height, width and channels.
      decode: latents float32 [B, *X] to images float32 [B, H, W, C], of videos [B, F, H, W, C],
        about [-1, 1].
      to_latents: the inverse, of images in [-1, 1]; None where the model has no encoder.
      encode_negative: likewise of what guidance compares with; None for `encode`.
      guidance: how the model is guided.
      size: in pixels by default.
      multiple: what sizes must be a multiple of.
      channels: of an image: 3, or 1 for grey.
      sizes: the only ones, where there are any.
      frames: of a model that draws videos; None for images.
      references: of a model that can draw after images; None for others.
      sees: whether `encode` and `encode_negative` take, behind the rest, the images that a request
        draws after or its video begins with, uint8 [H, W, 3] each: prompts are read beside them.
      steps: by default.
      scale: of guidance, by default.
      time_scale: the denoiser's time is the schedule's t times this.
      clip: bounds of the data that the network claims, or None.
      fills: whether the denoiser receives the mask and the latents that it keeps, as models for
        inpainting are (`Condition.image_BX`).
      follows: images in [0, 1] to follow that it receives, one for each ControlNet (likewise).
      adapters: names of the denoiser's adapters, of which each request has one or none.
      rescale: of guidance, see `guided`.
      norm_patch: likewise.
      sigma_data: standard deviation of the data, for EDM; with it the network's input is scaled
        (`predictions.preconditioning`). None for all else.
      parts: of the folder of diffusers that it was loaded from; None for a run. With another
        `denoiser` of the same config, `save_pipeline` writes that.
      cache: of steps, for a denoiser that is a transformer; None to run its blocks every time.
      layout: the mesh and rules that the denoiser's arrays lie by; None for one device.
    """

    name: str
    denoiser: nnx.Module
    prediction: Prediction
    schedule: Callable[[int, tuple[int, ...]], Schedule]
    sampler: Callable[[Schedule], Table]
    encode: Callable[..., Condition]
    latent_shape: Callable[[Size], tuple[int, ...]]
    decode: Callable[[jax.Array], jax.Array]
    to_latents: Callable[[jax.Array], jax.Array] | None = None
    encode_negative: Callable[..., Condition] | None = None
    guidance: Guidance = "free"
    size: Size = (512, 512)
    multiple: int = 8
    channels: Literal[1, 3] = 3
    sizes: tuple[Size, ...] = ()
    frames: Frames | None = None
    references: References | None = None
    sees: bool = False
    steps: int = 30
    scale: float = 5.0
    time_scale: float = 1.0
    clip: float | None = None
    fills: bool = False
    follows: int = 0
    adapters: tuple[str, ...] = ()
    rescale: float = 0.0
    norm_patch: int | None = None
    sigma_data: float | None = None
    parts: Parts | None = None
    cache: StepCache | None = None
    layout: tuple[Mesh, Rules] | None = None

    @property
    def begins(self) -> bool:
        """Whether it draws videos that begin with an image."""
        return self.frames is not None and self.frames.begin is not None

    def on_mesh(self, mesh: Mesh, rules: Rules) -> "Pipeline":
        """The pipeline with its denoiser's arrays on a mesh; text encoders and autoencoder stay.

        Raises:
          ShardingError: an array that does not divide.
        """
        graph, state = nnx.split(self.denoiser)
        placed = jax.device_put(state, tree_shardings(state, mesh, rules))
        return dataclasses.replace(self, denoiser=nnx.merge(graph, placed), layout=(mesh, rules))

    def network(
        self,
        denoiser: nnx.Module,
        condition: Condition,
        empty: Condition | None,
        scale: float | jax.Array,
        around: Around | None = None,
    ) -> Network:
        """The network of a run: `denoiser` under a condition, guided where `empty` is given.

        Args:
          denoiser: this pipeline's, or one with other arrays.
          condition: of B rows.
          empty: of B rows, or None for no guidance by two evaluations.
          scale: () or (B,).
          around: what runs a transformer's blocks; None for all of them.
        """
        options = {} if around is None else {"around": around}

        def conditioned(x_BX: jax.Array, point: Point, condition: Condition) -> jax.Array:
            time = jnp.asarray(point.t, jnp.float32) * self.time_scale
            time_B = jnp.broadcast_to(time, x_BX.shape[:1])
            if self.sigma_data is not None:
                x_BX = x_BX * along(preconditioning(point.sigma, self.sigma_data)[2], x_BX)
            with nullcontext() if self.layout is None else use_mesh(*self.layout):
                output_BX = denoiser(x_BX, time_B, condition, **options)  # pyrefly: ignore[not-callable]
            return output_BX[..., : x_BX.shape[-1]]

        if empty is None:
            return lambda x_BX, point: conditioned(x_BX, point, condition)
        return guided(
            conditioned,
            condition,
            empty,
            scale,
            rescale=self.rescale,
            norm_patch=self.norm_patch,
        )

    def keeping(
        self,
        denoiser: nnx.Module,
        condition: Condition,
        empty: Condition | None,
        scale: float | jax.Array,
        stepper: Stepper,
    ) -> KeepingNetwork:
        """`network` whose blocks a stepper runs; it receives what `StepCache.asks` says, () or
        (B,).

        It keeps what `kept` begins with, of the rows of the condition and behind them those of
        `empty`.
        """

        def network(
            x_BX: jax.Array, point: Point, kept: Any, ask: jax.Array
        ) -> tuple[jax.Array, Any]:
            found = []

            def around(blocks: Any, x_BTD: jax.Array, first: Any) -> jax.Array:
                ask_B = jnp.broadcast_to(ask, x_BX.shape[:1])
                ask_B = jnp.tile(ask_B, x_BTD.shape[0] // x_BX.shape[0])
                y_BTD, now = stepper.step(kept, ask_B, blocks, x_BTD, first)
                found.append(now)
                return y_BTD

            output_BX = self.network(denoiser, condition, empty, scale, around)(x_BX, point)
            (now,) = found  # guidance is one evaluation of all rows
            return output_BX, now

        return network

    def kept(
        self,
        denoiser: nnx.Module,
        condition: Condition,
        empty: Condition | None,
        x_BX: jax.Array,
        stepper: Stepper,
    ) -> Any:
        """What the network of `keeping` keeps before its first evaluation."""

        def start() -> Any:
            found = []

            def around(blocks: Any, x_BTD: jax.Array, first: Any) -> jax.Array:
                del blocks
                found.append(stepper.start(x_BTD, first))
                return x_BTD

            point, here = Point(*jnp.ones((3,), x_BX.dtype)), dataclasses.replace(self, layout=None)
            here.network(denoiser, condition, empty, 1.0, around)(x_BX, point)
            return found[0]

        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(start))

    def claim(self, output_BX: jax.Array, x_BX: jax.Array, point: Point) -> jax.Array:
        """The data that an output of the network stands for, within the model's bounds."""
        data_BX = to_data(
            self.prediction, output_BX, x_BX, point, sigma_data=self.sigma_data or 0.5
        )
        return data_BX if self.clip is None else self._clipped(data_BX, point)

    def _clipped(self, data_BX: jax.Array, point: Point) -> jax.Array:
        return jnp.clip(data_BX, -self.clip, self.clip)  # pyrefly: ignore[unsupported-operation]

    def check_size(self, size: Size) -> None:
        """Refuse a size that the model cannot draw.

        Raises:
          ConfigError: not a positive multiple, or another than the only one.
        """
        height, width = size
        if self.sizes and size not in self.sizes:
            known = ", ".join(f"{width}x{height}" for height, width in self.sizes)
            use = "that" if len(self.sizes) == 1 else "one of these"
            raise ConfigError(f"size {width}x{height}: this model draws only {known}; use {use}")
        if min(size) < self.multiple or height % self.multiple or width % self.multiple:
            raise ConfigError(
                f"size {width}x{height}: width and height must be multiples of {self.multiple}; "
                f"use {_nearest(width, self.multiple)}x{_nearest(height, self.multiple)}"
            )

    def scan(self, table: Table, asks: Asks | None = None) -> "Callable[[Job], jax.Array]":
        """What draws jobs of a table by one scan -> latents float32 [B, *X].

        It compiles for each kind and number of rows, once.

        Args:
          table: of the jobs.
          asks: theirs, for the cache of steps; None to draw without it.
        """
        if self.cache is not None and asks is not None:
            run = self.keeping_scan(table, self.cache, asks)
            return lambda job: run(job)[0]
        graph, arrays = nnx.split(self.denoiser)

        @jax.jit
        def draw(arrays: Any, job: Any) -> jax.Array:
            return self.drawn(nnx.merge(graph, arrays), table, job)

        return lambda job: draw(arrays, job.arrays)

    def keeping_scan(
        self, table: Table, stepper: Stepper, asks: Asks
    ) -> "Callable[[Job], tuple[jax.Array, Any]]":
        """`scan` whose blocks a stepper runs -> latents, and what it keeps at the end."""
        graph, arrays = nnx.split(self.denoiser)

        @jax.jit
        def draw(arrays: Any, job: Any) -> tuple[jax.Array, Any]:
            start_BX, condition, empty, scale, keys, keep = job
            denoiser = nnx.merge(graph, arrays)
            return sample_keeping(
                self.keeping(denoiser, condition, empty, scale, stepper),
                start_BX,
                table,
                keys,
                kept=self.kept(denoiser, condition, empty, start_BX, stepper),
                told=jnp.asarray(asks),
                **self._settings(keep),
            )

        return lambda job: draw(arrays, job.arrays)

    def _settings(self, keep: Any) -> dict[str, Any]:
        """Of `sample`: what the network's output is, and what is kept of a picture."""
        return {
            "prediction": self.prediction,
            "sigma_data": self.sigma_data or 0.5,
            "claim": None if self.clip is None else self._clipped,
            "after": None if keep is None else inpaint(*keep),
        }

    def drawn(self, denoiser: nnx.Module, table: Table, arrays: Any) -> jax.Array:
        """Draw by one scan -> latents float32 [B, *X]; traces under `jax.jit`.

        Args:
          denoiser: this pipeline's, or one with other arrays.
          table: of the sampler.
          arrays: `Job.arrays`.
        """
        start_BX, condition, empty, scale, keys, keep = arrays
        return sample(
            self.network(denoiser, condition, empty, scale),
            start_BX,
            table,
            keys,
            **self._settings(keep),
        )

    def run(self, job: "Job") -> jax.Array:
        """Draw a job -> latents float32 [B, *X]; see `scan`."""
        return self.scan(job.table, job.asks)(job)

    def images(self, latents_BX: jax.Array) -> np.ndarray:
        """Decode latents -> uint8 [B, H, W, C], of videos [B, F, H, W, C].

        Raises:
          ConfigError: an image is not finite.
        """
        images_BHWC = np.asarray(self.decode(latents_BX), np.float32)
        if self.frames is not None:
            images_BHWC = images_BHWC[:, self.frames.cut :]
        if not np.isfinite(images_BHWC).all():
            what = "image" if self.frames is None else "video"
            raise ConfigError(
                f"the {what} has values that are not finite (NaN or infinity): the weights are "
                "damaged, or overflow in their dtype; try --dtype float32, and check the files"
            )
        return np.round((np.clip(images_BHWC, -1, 1) + 1) * 127.5).astype(np.uint8)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What a request comes to: B rows to denoise, each on its own.

    Attributes:
      start_BX: float32 states at the first noise level.
      condition: of B rows.
      empty: of B rows; None where nothing is guided by two evaluations.
      scale: float32 (B,) of guidance.
      keys: (B,) keys of fresh noise.
      table: the sampler's steps, of all rows.
      keep: for inpainting, `inpaint`'s data, mask and noise, float32 [B, *X]; the mask has one
        channel.
      asks: int8, for each of the table's evaluations whether a cache of steps may leave it out.
    """

    start_BX: jax.Array
    condition: Condition
    empty: Condition | None
    scale: jax.Array
    keys: jax.Array
    table: Table
    keep: tuple[jax.Array, jax.Array, jax.Array] | None = None
    asks: Asks | None = None

    @property
    def arrays(self) -> Any:
        """All arrays, whose rows are the job's."""
        return self.start_BX, self.condition, self.empty, self.scale, self.keys, self.keep

    def rows(self, start: int, stop: int) -> "Job":
        """Some of the rows."""
        return self.with_arrays(jax.tree.map(lambda leaf: leaf[start:stop], self.arrays))

    def with_arrays(self, arrays: Any) -> "Job":
        """The job with other rows, in the order of `arrays`."""
        start_BX, condition, empty, scale, keys, keep = arrays
        return dataclasses.replace(
            self,
            start_BX=start_BX,
            condition=condition,
            empty=empty,
            scale=scale,
            keys=keys,
            keep=keep,
        )


def join(jobs: Sequence[Job]) -> Job:
    """Jobs of one table, size and kind as one job.

    Raises:
      ConfigError: jobs that differ in these.
    """
    first = jobs[0]
    same = all(
        np.array_equal(job.table.points, first.table.points)
        and np.array_equal(job.table.update, first.table.update)
        for job in jobs
    )
    if not same:
        raise ConfigError(
            "jobs of different samplers or steps do not run as one scan; run each on its own"
        )

    def joined(*leaves: jax.Array) -> jax.Array:
        return jnp.concatenate(leaves)

    parts = [job.arrays for job in jobs]
    return first.with_arrays(jax.tree.map(joined, *parts))


def _nearest(value: int, multiple: int) -> int:
    return max(1, round(value / multiple)) * multiple


def parse_size(text: str) -> Size:
    """`WIDTHxHEIGHT` as height and width.

    Raises:
      ConfigError: it is not that.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"size {text!r} is not WIDTHxHEIGHT in pixels; write 512x512")
    return int(match[2]), int(match[1])
