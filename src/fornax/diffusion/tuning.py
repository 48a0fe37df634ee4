"""`tune`: a folder of diffusers, or a run, trained on other images, whole or by adapters.

Of a folder the images are encoded by its autoencoder and the captions by its text encoders, once;
its denoiser is then trained on what is kept on disk, by the objective that its scheduler says.

Shapes: X the shape of an example's latents.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from numpy.typing import NDArray

from fornax import adapters
from fornax.config.errors import ConfigError, DataError
from fornax.config.price import PriceTable
from fornax.config.progress import Progression, ProgressName
from fornax.diffusion import run
from fornax.diffusion.config import DiffusionTuneConfig, takes
from fornax.diffusion.data import Cache, CachedExamples, EncodedConfig, Examples, Latents
from fornax.diffusion.drawing import write_grid
from fornax.diffusion.load import TunedRun, is_pipeline, open_tuned
from fornax.diffusion.lora import save_lora
from fornax.diffusion.methods import Denoise
from fornax.diffusion.models import save_component
from fornax.diffusion.network import NAMES, Network
from fornax.diffusion.objectives import Objective
from fornax.diffusion.pipelines import ImageRequest, Pipeline, join, plan
from fornax.diffusion.pipelines.families import FAMILIES
from fornax.diffusion.pipelines.load import open_parts, pipeline_of
from fornax.diffusion.pipelines.parts import Parts
from fornax.diffusion.setup import Facts, sizes_of
from fornax.diffusion.task import check_sizes, examples_task, spread_captions
from fornax.mesh import Rules, hosts, initialize, parse_dtype
from fornax.train import PostTraining, RunDirectory, Samples, Task, TrainResult
from fornax.train import train as run_trainer
from fornax.train.state import trained_of

__all__ = ["tune"]

_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
_MORE = ("Img2ImgPipeline", "InpaintPipeline", "ControlNetPipeline")
"""Of the same networks, or refused by what they receive besides."""


def tune(
    config: DiffusionTuneConfig,
    out: str | Path,
    *,
    accept_changes: Sequence[str] = (),
    progress: ProgressName | Progression = "auto",
    prices: PriceTable | None = None,
) -> TrainResult:
    """Train a denoiser on, or adapters for it, on other images; or continue doing so, in `out`.

    With adapters the checkpoints hold nothing else; the base comes from `config.model` each time,
    and what loads the run merges them.

    Args:
      config: the run; `model` is a folder that diffusers saved, a run that was tuned from one, or
        a run of `fornax diffusion train`.
      out: the run directory.
      accept_changes: patterns of keys that may differ from the config of the checkpoints.
      progress: what is shown.
      prices: of chips; the report and `goodput.jsonl` then say what the run costs.

    Raises:
      ConfigError: no such base, or a config that does not fit it.
      DataError: broken or small images, missing captions, latents that are not finite.
      ShardingError, CheckpointError, ClusterError: see `fornax.train.train`.
    """
    before = open_tuned(config.model) if config.model else None
    if before is None and not (config.model and is_pipeline(config.model)):
        return run.tune(
            config, out, accept_changes=accept_changes, progress=progress, prices=prices
        )
    initialize(config.processes)
    config = replace(config, model=str(Path(config.model).expanduser().resolve()))
    folder = Path(config.model) if before is None else before.folder
    directory = RunDirectory(out)
    with ExitStack() as stack:
        hosts.decide(lambda: _open(directory, stack))
        base = _base(config, folder)
        splits = ["train"] if config.eval.every is None else ["train", "eval"]
        examples = _examples(config, base, splits, directory.path)
        task = _task(config, base, examples, directory.path)
        train = examples["train"]
        facts = Facts(channels=train.channels, sizes=sizes_of(train), prompts=None)
        if jax.process_index() == 0:
            facts.save(directory.path)
        name = base.parts.denoiser
        del base  # and the encoders with it
        result = run_trainer(
            config,
            directory,
            task=task,
            accept_changes=accept_changes,
            progress=progress,
            prices=prices,
        )
        if result.reason == "finished" and jax.process_count() == 1:
            _write(TunedRun(path=directory.path, config=config), name)
        return result


def _write(run: TunedRun, name: str) -> None:
    """The adapters, or the whole denoiser, as diffusers reads them."""
    parts = open_parts(run.folder)
    denoiser: Any = parts.module(name, dtype=run.config.dtypes.param_dtype)
    network = run.restore(Network(denoiser, None, takes(denoiser.config)), merge=False)
    if run.config.lora is not None:
        save_lora(network.denoiser, run.path / "lora", name)
    else:
        save_component(network.denoiser, run.path / name, overwrite=True)


@dataclass(frozen=True, kw_only=True)
class _Base:
    """What tuning begins at."""

    parts: Parts
    pipeline: Pipeline
    network: Network

    @property
    def patch(self) -> int:
        """Latents of a patch's side."""
        return getattr(self.network.denoiser.config, "patch", (1,))[0]

    @property
    def factor(self) -> int:
        """Pixels of a latent's side."""
        return self.pipeline.multiple // self.patch


def _base(config: DiffusionTuneConfig, folder: Path) -> _Base:
    """The folder's pipeline, its denoiser in the dtypes of the run.

    Raises:
      ConfigError: a pipeline that is not tuned here, or a method that is not.
    """
    if not isinstance(config.method, Denoise):
        raise ConfigError(
            f"method.type={config.method.type} starts from a run of fornax diffusion train, and "
            f"{folder} is a folder of diffusers; set method.type to denoise"
        )
    dtype = None if config.encode.dtype is None else parse_dtype(config.encode.dtype)
    dtypes = {"dtype": config.dtypes.param_dtype, "compute_dtype": config.dtypes.compute_dtype}
    parts = open_parts(folder, dtype)
    if (name := str(parts.index["_class_name"])) not in FAMILIES:
        tuned = ", ".join(n for n in FAMILIES if not n.endswith(_MORE))
        raise ConfigError(f"{folder}: {name} is drawn with, and not tuned; use one of {tuned}")
    denoiser: Any = parts.module(parts.denoiser, **dtypes)
    network = Network(denoiser, None, takes(denoiser.config))
    before = open_tuned(config.model)
    if before is not None:
        network = before.restore(network)
    parts = open_parts(folder, dtype, denoiser=network.denoiser)
    pipeline = pipeline_of(parts)
    if pipeline.fills or pipeline.follows:
        what = "a mask and a masked picture" if pipeline.fills else "an image to follow"
        raise ConfigError(
            f"{folder} draws from {what}, which images with captions do not have; tune the model "
            "that it was made of"
        )
    if config.lora is not None and config.lora.dora:
        raise ConfigError(
            "lora.dora has magnitudes, which files of adapters for diffusers are not written with; "
            "set it to false"
        )
    if config.encode.guidance is not None and pipeline.guidance != "embedded":
        raise ConfigError(
            f"encode.guidance={config.encode.guidance:g}: {folder} is not told its guidance; leave "
            "it out"
        )
    return _Base(parts=parts, pipeline=pipeline, network=network)


def _examples(
    config: DiffusionTuneConfig, base: _Base, splits: Sequence[str], out: Path
) -> dict[str, Examples]:
    """The examples of splits, encoded.

    Raises:
      DataError: they do not fit the model, or cannot be encoded.
      ConfigError: sizes that it does not draw.
    """
    found = {split: run.tuning_images(config, split) for split in splits}
    if isinstance(config.data, EncodedConfig):
        _check_encoded(config.data, base, found["train"])
        return found
    latents = _latents(config, base)
    cache = Cache(Path(config.encode.cache or out / "encoded").expanduser())
    encode, read = _encode_with(base.parts), _read_with(base.pipeline)
    for split, images in found.items():
        if images.channels != base.pipeline.channels:
            raise DataError(
                f"the model draws images of {base.pipeline.channels} channels, and these have "
                f"{images.channels}; set data.channels to {base.pipeline.channels}"
            )
        for size in images.sizes:
            base.pipeline.check_size(size)
        flip = split == "train" and getattr(config.data, "flip", False)
        one = CachedExamples(images, cache, latents, flip=flip)
        hosts.decide(lambda one=one: list(one.fill(encode, read)))
        found[split] = one
    return found


def _latents(config: DiffusionTuneConfig, base: _Base) -> Latents:
    """What images and captions become."""
    pipeline, parts, dtype = base.pipeline, base.parts, str(config.encode.dtype)
    guidance = 1.0 if config.encode.guidance is None else config.encode.guidance
    fixed = {"guidance": np.asarray(guidance, np.float32)}
    encoders = parts.fingerprint(*_ENCODERS, *_TOKENIZERS)
    return Latents(
        factor=base.factor,
        channels=pipeline.latent_shape(pipeline.size)[-1],
        images_key=f"{parts.fingerprint('vae')} {dtype}",
        texts_key=f"{encoders} {parts.index['_class_name']} {dtype}",
        fixed=fixed if pipeline.guidance == "embedded" else {},
        sizes="sizes_BN" in base.network.takes,
        draw=config.encode.latents == "sample",
    )


def _encode_with(parts: Parts) -> Callable[[NDArray[np.float32]], dict[str, NDArray[Any]]]:
    """An image to the mean and deviation of its latents, as the denoiser is given them."""
    graph, state = nnx.split(parts.module("vae"))

    @jax.jit
    def run(state: Any, image_HWC: jax.Array) -> dict[str, jax.Array]:
        vae: Any = nnx.merge(graph, state)
        found = vae.encode(image_HWC[None])
        mean = vae.scaled(found.mean_BHWC)
        deviation = jnp.exp(0.5 * found.logvar_BHWC)
        # Scaling is affine.
        return {"mean": mean[0], "deviation": (vae.scaled(deviation) - vae.scaled(0 * mean))[0]}

    return lambda image: jax.tree.map(np.asarray, run(state, image))


def _read_with(pipeline: Pipeline) -> Callable[[str | None], dict[str, NDArray[Any]]]:
    """A caption to its states; sizes and guidance are of the example."""

    def read(caption: str | None) -> dict[str, NDArray[Any]]:
        condition = pipeline.encode([caption], pipeline.size, 1.0)
        given = {name: getattr(condition, field) for name, field in NAMES.items()}
        return {
            name: np.asarray(array[0])
            for name, array in given.items()
            if array is not None and name not in ("sizes", "guidance")
        }

    return read


def _check_encoded(data: EncodedConfig, base: _Base, found: Examples) -> None:
    """Refuse latents and states of other encoders than the folder's.

    Raises:
      DataError: they do not fit the denoiser.
    """
    _, _, channels = base.pipeline.latent_shape(base.pipeline.size)
    if found.channels != channels:
        raise DataError(
            f"data.path={data.path}: latents have {found.channels} channels, and the "
            f"autoencoder of {base.parts.folder} gives {channels}; encode the images with that"
        )
    check_sizes(found.sizes, base.network.denoiser.config)
    want = _read_with(base.pipeline)(None)
    for name in want:
        given = data.arrays.get(name)
        if given is None or given[0][-1:] != want[name].shape[-1:]:
            raise DataError(
                f"data.path={data.path}: {name} has shape {given and given[0]}, and the "
                f"text encoders of {base.parts.folder} give {want[name].shape}; encode the "
                "captions with these"
            )


def _task(
    config: DiffusionTuneConfig, base: _Base, examples: dict[str, Examples], folder: Path
) -> Task[Network]:
    adapted: list[str] = []
    # Not `base` itself, which holds the encoders.
    network, scheduler, patch = base.network, base.parts.scheduler, base.patch

    def objective_of(shape: tuple[int, ...]) -> Objective:
        return config.objective or scheduler.objective(shape[0] * shape[1] // patch**2)

    def build(rngs: nnx.Rngs) -> Network:
        copy = nnx.clone(network)
        if config.lora is not None:
            adapted[:] = adapters.attach(copy, config.lora, rngs=rngs)
        return copy

    def pretrained(mesh: Mesh, rules: Rules) -> Network:
        del mesh, rules  # the trainer lays it out
        return build(nnx.Rngs(config.seed))

    nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    task = examples_task(
        build,
        config,
        objective_of,
        lambda split: examples[split],
        None,
        _grids(config, base, examples["train"], folder),
    )
    said = f"adapters on {', '.join(adapted)}" if adapted else "all parameters are trained"
    post = PostTraining(trained=trained_of(config.lora), notes=(said,))
    return replace(task, pretrained=pretrained, post=post)


def _grids(
    config: DiffusionTuneConfig, base: _Base, examples: Examples, folder: Path
) -> Samples[Network] | None:
    """Grids of what the model draws, by step; None where none are asked for."""
    said, pipeline = config.sample, base.pipeline
    if said.every is None:
        return None
    prompts = list(said.prompts) or spread_captions(examples, said.count)
    height, width = examples.sizes[int(np.bincount(examples.bucket).argmax())]
    jobs = [
        plan(
            pipeline,
            ImageRequest(
                prompt=prompts[i % len(prompts)],
                size=(height * base.factor, width * base.factor),
                steps=said.steps,
                guidance=None if pipeline.guidance == "none" else said.guidance,
                sampler=said.sampler,
                seed=(said.seed + i) % 2**32,
            ),
        )
        for i in range(said.count)
    ]
    job = join(jobs)
    pipeline = replace(pipeline, rescale=said.rescale, encode=_released, to_latents=None)

    def run(graph: Any, state: Any, arrays: Any) -> jax.Array:
        return pipeline.drawn(nnx.merge(graph, state).denoiser, job.table, arrays)

    drawn = jax.jit(run, static_argnums=0)

    def show(step: int, network: Network) -> None:
        graph, state = nnx.split(network)
        latents = drawn(graph, state, job.arrays)
        if jax.process_index() == 0:
            images = pipeline.images(jnp.asarray(np.asarray(latents)))
            write_grid(folder / "images" / f"step-{step:07d}.png", images)

    return Samples(every=said.every, show=show)


def _released(prompts: Any, size: Any, guidance: float) -> Any:
    """In place of text encoders that are not needed any more."""
    raise ValueError("the text encoders were released: prompts are encoded before the first step")


def _open(directory: RunDirectory, stack: ExitStack) -> None:
    """Make the directory and lock it until the run ends."""
    stack.enter_context(directory)
