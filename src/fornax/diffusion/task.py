"""Denoising as a task of the trainer.

Shapes: B rows of a batch, X the shape of an example: (H, W, C), of videos (F, H, W, C).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.diffusion.config import DiffusionConfig, RunConfig
from fornax.diffusion.data import BucketStream, Examples, Picks, open_examples
from fornax.diffusion.data.buckets import Size
from fornax.diffusion.drawing import draw, start_noise, to_pixels, write_grid
from fornax.diffusion.models.transformer import TransformerConfig
from fornax.diffusion.models.unet import UNetConfig
from fornax.diffusion.network import Network
from fornax.diffusion.objectives import Objective, example_noise, example_uniform, stratified
from fornax.diffusion.prompts import Prompts, text_arrays
from fornax.diffusion.setup import Facts, flops_per_image, make_network, network_config
from fornax.mesh import constrain, hosts
from fornax.train import Batch, Hosts, Loss, Samples, Task

__all__ = ["denoising_loss", "diffusion_task"]

Arrays = dict[str, np.ndarray]


def denoising_loss(
    network: Network,
    batch: Batch,
    objective: Objective,
    *,
    seed: int,
    strata: int | None,
    within: tuple[float, float] | None = None,
    remat: str = "none",
) -> Loss:
    """The sum over a batch of its rows' weighted errors; `weight` counts images.

    Args:
      network: what is trained.
      batch: `images` float32 (B, *X), `weight` float32 (B,) (0 for padding), int32 (B,) `example`
        and `step`, from which noise and time are drawn, `place` in the global batch, and what
        `Network.condition` reads.
      objective: the loss of a row.
      seed: of noise and times.
      strata: rows of the global batch, over which the times are spread; None for each its own.
      within: the part of the times that is drawn (`Objective.within`); None for all.
      remat: what the backward pass computes again of each block.
    """
    data_BX = batch["images"]
    noise_BX = example_noise(seed, batch["step"], batch["example"], data_BX.shape[1:])
    noise_BX = constrain(noise_BX, ("batch", *[None] * (data_BX.ndim - 1)))
    u_B = example_uniform(seed, batch["step"], batch["example"])
    if strata is not None:
        u_B = stratified(u_B, batch["place"] % strata, strata)
    if within is not None:
        u_B = objective.within(u_B, within)
    point = objective.point(u_B)
    x_BX = objective.noised(data_BX, noise_BX, point)
    condition = network.condition(batch)
    output_BX = network(x_BX, objective, point, condition, remat=remat)
    if condition.first_BX is not None:  # which is given, and nothing is drawn in its place
        output_BX, data_BX, noise_BX = (x[:, 1:] for x in (output_BX, data_BX, noise_BX))
    loss_B = objective.losses(output_BX, data_BX, noise_BX, point)
    weight_B = batch["weight"]
    return Loss(total=jnp.sum(loss_B * weight_B), weight=jnp.sum(weight_B), metrics={})


def collate(
    examples: Examples,
    prompts: Prompts | None,
    picks: Picks,
    over: Callable[..., Iterable[Any]],
    *,
    dropout: float,
    flip: bool,
    seed: int,
    fixed: bool,
) -> Arrays:
    """This host's rows of a batch: see `denoising_loss`. Noise of `fixed` rows is of no step."""
    count = len(picks.index)
    images = np.zeros((count, *examples.sizes[picks.bucket], examples.channels), np.float32)
    captions = [""] * count
    weight = np.zeros(count, np.float32)
    # Rows of padding are as of an example without its caption.
    some = int(np.argmax(examples.bucket == picks.bucket))
    encoded: Arrays = {
        name: np.repeat(array[None], count, 0)
        for name, array in examples.arrays(some, dropped=True).items()
    }
    there = picks.index >= 0

    def make(row: int) -> None:
        draws = np.random.default_rng([seed, picks.number, int(picks.place[row])])
        chance, mirrored = draws.random(2)
        index, dropped = int(picks.index[row]), bool(chance < dropout)
        turned = flip and bool(mirrored < 0.5)
        images[row], caption = examples.get(index, mirrored=turned, rng=None if fixed else draws)
        captions[row] = "" if dropped else caption
        weight[row] = examples.weight(index)
        for name, array in examples.arrays(index, dropped=dropped, mirrored=turned).items():
            encoded[name][row] = array

    for _ in over(make, np.flatnonzero(there).tolist()):
        pass
    # An example is met once an epoch: of two in one batch each has noise of its own.
    ids = (picks.epoch * len(examples.bucket) + picks.index) % 2**31
    step = np.full(count, 0 if fixed else picks.number % 2**31, np.int32)
    return {
        "images": images,
        "weight": weight,
        "example": np.where(there, ids, 0).astype(np.int32),
        "step": step,
        "place": picks.place.astype(np.int32),
        **text_arrays(prompts, captions),
        **encoded,
    }


def streams(
    config: RunConfig, open_split: Callable[[str], Examples], prompts: Prompts | None
) -> Callable[[str, Hosts], BucketStream]:
    """`Task.batches`: training without end, evaluation once in order without dropout."""

    def open_stream(split: str, hosts: Hosts) -> BucketStream:
        training = split == "train"
        examples = open_split(split)
        rows = partial(
            collate,
            examples,
            prompts,
            dropout=config.caption_dropout if training else 0.0,
            flip=training and getattr(config.data, "flip", False),
            seed=config.seed,
            fixed=not training,
        )
        return BucketStream(
            examples.bucket,
            rows,
            batch_size=config.batch_size,
            seed=config.seed,
            endless=training,
            hosts=hosts,
            identity=examples.identity,
            threads=getattr(config.data, "threads", 1),
        )

    return open_stream


def diffusion_task(
    config: DiffusionConfig, facts: Facts, examples: Examples, folder: Path
) -> Task[Network]:
    """The task of `fornax diffusion train`.

    Args:
      config: the run.
      facts: of its data.
      examples: to train on.
      folder: where grids of samples are written, in `images/`.
    """
    check_sizes(facts.sizes, network_config(config, facts))

    def build(rngs: nnx.Rngs) -> Network:
        return make_network(
            config,
            facts,
            rngs,
            dtype=config.dtypes.param_dtype,
            compute_dtype=config.dtypes.compute_dtype,
        )

    task = denoising_task(build, config, config.objective, facts, examples, folder)
    if config.log.peak_tflops is None and jax.default_backend() == "cpu":
        return task  # whose peak is not known
    return replace(task, flops_per_unit=flops_per_image(config, facts))


ObjectiveOf = Callable[[tuple[int, ...]], Objective]
"""The objective of examples of a shape X."""


def check_sizes(sizes: Sequence[Size], whole: TransformerConfig | UNetConfig) -> None:
    """Refuse examples of other axes than the network's, and such that a transformer's patches do
    not divide, or its table of positions does not cover, before anything is compiled.

    Raises:
      ConfigError: with the first such size.
    """
    patch = (1, 1) if isinstance(whole, UNetConfig) else whole.patch
    for size in sizes:
        if len(size) != len(patch):
            said = " x ".join(map(str, size))
            raise ConfigError(
                f"the network draws videos, and examples are images of {said}; set data.frames to "
                "how many are an example, such as 17, or to 1 for images"
                if len(patch) == 3
                else f"the network draws images, and examples are videos of {said}; leave "
                "data.frames empty, or take a network of videos"
            )
        if any(n % p for n, p in zip(size, patch, strict=True)):
            raise ConfigError(
                f"examples of {' x '.join(map(str, size))} do not divide into patches of "
                f"{' x '.join(map(str, patch))}; set model.patch to divisors, or "
                "data.multiple (of frames data.frames) to multiples of the patch"
            )
        stored = getattr(getattr(whole, "positions", None), "stored", None)
        if stored is not None and max(n // p for n, p in zip(size, patch, strict=True)) > stored:
            raise ConfigError(
                f"examples of {' x '.join(map(str, size))} have more patches of "
                f"{' x '.join(map(str, patch))} along a side than the {stored} of the network's "
                "table of positions; lower data.resolution or data.max_aspect"
            )


def denoising_task(
    build: Callable[[nnx.Rngs], Network],
    config: RunConfig,
    objective: Objective,
    facts: Facts,
    examples: Examples,
    folder: Path,
) -> Task[Network]:
    """The task of any network on any pixels; arguments as of `diffusion_task`.

    Args:
      build: makes the network, with fresh weights.
      config: data, captions' dropout, samples.
      objective: the loss.
      facts: of the data.
      examples: to train on.
      folder: where grids of samples are written.
    """
    return examples_task(
        build,
        config,
        lambda shape: objective,
        lambda split: examples if split == "train" else open_examples(config.data, split),
        facts.prompts,
        grids(config, objective, facts, examples, folder),
    )


def examples_task(
    build: Callable[[nnx.Rngs], Network],
    config: RunConfig,
    objective_of: ObjectiveOf,
    open_split: Callable[[str], Examples],
    prompts: Prompts | None,
    samples: Samples[Network] | None,
    within: tuple[float, float] | None = None,
) -> Task[Network]:
    """The task of any network on any examples.

    Args:
      build: makes the network, with fresh weights.
      config: data and captions' dropout.
      objective_of: the loss of examples of a shape.
      open_split: the examples of `train` and `eval`.
      prompts: captions to integers, where the network learns them.
      samples: what is shown while it trains.
      within: as of `denoising_loss`.
    """
    strata = config.batch_size if config.stratified else None

    def loss(network: Network, batch: Batch, key: jax.Array) -> Loss:
        del key  # noise is of the example and the step, whatever the mesh
        return denoising_loss(
            network,
            batch,
            objective_of(batch["images"].shape[1:]),
            seed=config.seed,
            strata=strata,
            within=within,
            remat=config.remat,
        )

    def evaluate(network: Network, batch: Batch) -> Loss:
        objective = objective_of(batch["images"].shape[1:])
        return denoising_loss(
            network, batch, objective, seed=config.seed, strata=None, within=within
        )

    return Task(
        build=build,
        loss=loss,
        evaluate=evaluate,
        batches=streams(config, open_split, prompts),
        unit="images",
        samples=samples,
    )


def grids(
    config: RunConfig, objective: Objective, facts: Facts, examples: Examples, folder: Path
) -> Samples[Network] | None:
    """Grids of what the model draws, by step; None where none are asked for."""
    said = config.sample
    if said.every is None:
        return None
    prompts = list(said.prompts) or spread_captions(examples, said.count)
    prompts = [prompts[i % len(prompts)] for i in range(said.count)]
    arrays = text_arrays(facts.prompts, prompts)
    empty = text_arrays(facts.prompts, [""] * len(prompts))
    shape = (*facts.usual, facts.channels)
    unguided = facts.prompts is None or said.guidance == 1

    def run(graph: Any, state: Any, arrays: Mapping[str, Any], empty: Mapping[str, Any]) -> Any:
        network = nnx.merge(graph, state)
        return draw(
            network.denoiser,
            objective,
            network.condition(arrays),
            None if unguided else network.condition(empty),
            start_noise(said.seed, said.count, shape),
            sampler=said.sampler,
            steps=said.steps,
            guidance=said.guidance,
            rescale=said.rescale,
            key=jax.random.key(said.seed),
        )

    drawn = jax.jit(run, static_argnums=0)

    def show(step: int, network: Network) -> None:
        graph, state = nnx.split(network)
        images = hosts.whole(drawn(graph, state, arrays, empty))
        if jax.process_index() == 0:
            path = folder / "images" / f"step-{step:07d}.png"
            write_grid(path, to_pixels(images), rate_of(config))

    return Samples(every=said.every, show=show)


def rate_of(config: RunConfig) -> float:
    """Frames per second at which the videos of a run are shown."""
    return getattr(config.data, "rate", None) or 8.0


def spread_captions(examples: Examples, count: int) -> list[str]:
    """Captions of examples that are spread over the set."""
    return [examples.caption(i) for i in spread(np.arange(len(examples.bucket)), count)]


def spread(numbers: np.ndarray, count: int) -> list[int]:
    """A count of some numbers, or all where there are fewer: evenly from the first to the last."""
    places = np.linspace(0, len(numbers) - 1, min(count, len(numbers))).astype(int)
    return numbers[places].tolist()
