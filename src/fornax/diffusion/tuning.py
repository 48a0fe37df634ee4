"""`tune`: a folder of diffusers, or a run, trained on other images or videos, whole or by adapters.

Of a folder these are encoded by its autoencoder and the captions by its text encoders, once; its
denoiser is then trained on what is kept on disk, by the objective that its scheduler says.

Shapes: X the shape of an example's latents.
"""

import math
from collections.abc import Callable, Sequence
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
from fornax.diffusion.config import DiffusionTuneConfig, takes
from fornax.diffusion.data import Cache, CachedExamples, EncodedConfig, Examples, Latents
from fornax.diffusion.data.buckets import Size
from fornax.diffusion.drawing import to_pixels, write_grid
from fornax.diffusion.load import TunedRun, is_pipeline, open_tuned
from fornax.diffusion.lora import save_lora
from fornax.diffusion.methods import Denoise
from fornax.diffusion.models import save_component
from fornax.diffusion.models.autoencoders import Tiling, latent_moments
from fornax.diffusion.models.transformer import TransformerConfig
from fornax.diffusion.network import NAMES, Network
from fornax.diffusion.objectives import Objective
from fornax.diffusion.pipelines import ImageRequest, Pipeline, join, plan
from fornax.diffusion.pipelines.experts import Experts
from fornax.diffusion.pipelines.load import open_parts, pipeline_of, trained_networks
from fornax.diffusion.pipelines.one_frame import of_images
from fornax.diffusion.pipelines.parts import Parts
from fornax.diffusion.run import opened, tuning_images, tuning_task
from fornax.diffusion.setup import Facts, check_read, sizes_of
from fornax.diffusion.task import check_sizes, examples_task, rate_of, spread_captions
from fornax.mesh import Rules, fit_mesh, hosts, make_mesh, parse_dtype, tree_shardings
from fornax.train import PostTraining, Samples, Task, TrainResult
from fornax.train import train as run_trainer
from fornax.train.state import trained_of

__all__ = ["tune"]

_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")


def tune(
    config: DiffusionTuneConfig,
    out: str | Path,
    *,
    accept_changes: Sequence[str] = (),
    progress: ProgressName | Progression = "auto",
    prices: PriceTable | None = None,
) -> TrainResult:
    """Train a denoiser, or adapters for it, on other images or videos, or continue to, in `out`.

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
    with opened(config, out) as directory:
        if config.model:
            config = replace(config, model=str(Path(config.model).expanduser().resolve()))
        before = open_tuned(config.model) if config.model else None
        if before is not None or (config.model and is_pipeline(config.model)):
            folder = Path(config.model) if before is None else before.folder
            task, facts = _pipeline_task(config, folder, directory.path)
        elif config.component:
            raise ConfigError(
                f"component={config.component}: {config.model} is a run of one network, or no "
                "model; leave it out"
            )
        else:
            config, task, facts = tuning_task(config, directory.path)
        facts.save(directory.path)
        result = run_trainer(
            config,
            directory,
            task=task,
            accept_changes=accept_changes,
            progress=progress,
            prices=prices,
        )
        made = open_tuned(directory.path)
        if result.reason == "finished" and made is not None:
            _write(made)
        return result


def _pipeline_task(
    config: DiffusionTuneConfig, folder: Path, out: Path
) -> tuple[Task[Network], Facts]:
    """The task of tuning a folder's denoiser, and the facts of its data. The encoders are used
    here, and are not in it."""
    base = _base(config, folder)
    splits = ["train"] if config.eval.every is None else ["train", "eval"]
    examples = _examples(config, base, splits, out)
    train = examples["train"]
    facts = Facts(channels=train.channels, sizes=sizes_of(train), prompts=None)
    return _task(config, base, examples, out), facts


def _write(run: TunedRun) -> None:
    """The adapters, or the whole denoiser, as diffusers reads them: each process reads the
    checkpoint, and process 0 writes."""
    parts = open_parts(run.folder)
    name = run.config.component or parts.denoisers[0]
    trained = trained_networks(run, parts, merge=False, dtype=run.config.dtypes.param_dtype)
    network = trained[name]
    if run.config.lora is not None:
        prefix = parts.denoisers[0]  # which diffusers expects of both networks' files
        hosts.decide(lambda: save_lora(network.denoiser, run.path / "lora", prefix))
    else:
        hosts.decide(lambda: save_component(network.denoiser, run.path / name, overwrite=True))


@dataclass(frozen=True, kw_only=True)
class _Base:
    """What tuning begins at."""

    parts: Parts
    pipeline: Pipeline
    network: Network
    """What is trained."""
    other: nnx.Module | None
    """The other of two networks."""

    @property
    def whole(self) -> Callable[[Any, Any], Any]:
        """The denoiser that draws, of the trained one and the arrays of the other."""
        experts = self.pipeline.denoiser
        if not isinstance(experts, Experts):
            return lambda denoiser, other: denoiser
        graph, boundary = nnx.graphdef(self.other), experts.boundary
        if self.other is experts.late:
            return lambda denoiser, other: Experts(denoiser, nnx.merge(graph, other), boundary)
        return lambda denoiser, other: Experts(nnx.merge(graph, other), denoiser, boundary)

    @property
    def within(self) -> tuple[float, float]:
        """The times that are of the network."""
        experts = self.pipeline.denoiser
        if not isinstance(experts, Experts):
            return (0.0, 1.0)
        boundary = experts.boundary / 1000
        return (boundary, 1.0) if self.other is experts.late else (0.0, boundary)

    @property
    def patch(self) -> tuple[int, ...]:
        """Latents of a patch along each axis of an example."""
        axes = 2 if self.pipeline.frames is None else 3
        return getattr(self.network.denoiser.config, "patch", (1,) * axes)

    @property
    def factor(self) -> int:
        """Pixels of a latent's side."""
        return self.pipeline.multiple // self.patch[-1]

    def latent_size(self, size: Size) -> Size:
        """Of an example in pixels, that of its latents.

        Raises:
          ConfigError: one that the model does not draw.
        """
        *count, height, width = size
        frames = self.pipeline.frames
        if (frames is None) == bool(count):
            check_sizes([size], self.network.denoiser.config)  # which says so
        if frames is not None and frames.begin is not None and count == [1]:
            raise ConfigError(
                "the model draws what follows a first frame, and examples of one frame have "
                "nothing more; set data.frames to 1 + "
                f"{frames.factor} n, such as {1 + 4 * frames.factor}"
            )
        try:
            self.pipeline.check_size((height, width))
        except ConfigError as error:
            raise ConfigError(
                f"{error}: set data.resolution, data.multiple and data.max_aspect accordingly"
            ) from error
        place: Size = (height // self.factor, width // self.factor)
        if frames is not None:
            place = (frames.latent(count[0]), *place)
        check_sizes([place], self.network.denoiser.config)
        return place


def _base(config: DiffusionTuneConfig, folder: Path) -> _Base:
    """The folder's pipeline, its denoiser in the dtypes of the run.

    Raises:
      ConfigError: a pipeline that draws from more than a prompt, or a method that is not for it.
    """
    if not isinstance(config.method, Denoise):
        raise ConfigError(
            f"method.type={config.method.type} starts from a run of fornax diffusion train, and "
            f"{folder} is a folder of diffusers; set method.type to denoise"
        )
    dtype = None if config.encode.dtype is None else parse_dtype(config.encode.dtype)
    dtypes = {"dtype": config.dtypes.param_dtype, "compute_dtype": config.dtypes.compute_dtype}
    parts = open_parts(folder, dtype)
    component = _component(config, parts)
    before = open_tuned(config.model)
    trained = {} if before is None else trained_networks(before, parts, **dtypes)
    if component not in trained:
        denoiser: Any = parts.module(component, **dtypes)
        trained[component] = Network(denoiser, None, takes(denoiser.config))
    network = trained[component]
    modules = {name: each.denoiser for name, each in trained.items()}
    parts = open_parts(folder, dtype, modules=modules)
    pipeline = pipeline_of(parts)
    if why := _not_tuned(pipeline):
        raise ConfigError(f"{folder} {why}")
    begins = pipeline.frames is not None and pipeline.frames.begin is not None
    if begins and isinstance(config.data, EncodedConfig):
        raise ConfigError(
            f"{folder} draws from a first frame, of which data.path={config.data.path} has "
            "nothing; give videos, which this run encodes"
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
    _check_layout(config, network)
    others = [parts.module(name) for name in parts.denoisers if name != component]
    return _Base(
        parts=parts, pipeline=pipeline, network=network, other=others[0] if others else None
    )


def _component(config: DiffusionTuneConfig, parts: Parts) -> str:
    """The network of a folder to train.

    Raises:
      ConfigError: it has two and the config names none, or none of that name.
    """
    names = parts.denoisers
    if config.component in names:
        return config.component
    if not config.component and len(names) == 1:
        return names[0]
    if not config.component:
        raise ConfigError(
            f"{parts.folder} has two networks, of which a run trains one: set component to "
            f"{names[0]}, of the times with more noise, or {names[1]}; a further run that starts "
            "from that one can train the other"
        )
    raise ConfigError(
        f"component={config.component}: {parts.folder} draws with {' and '.join(names)}; "
        + (f"set it to {' or '.join(names)}" if len(names) > 1 else "leave it out")
    )


def _check_layout(config: DiffusionTuneConfig, network: Network) -> None:
    """Refuse, before anything is encoded, adapters that match nothing and a mesh that does not fit.

    Raises:
      ConfigError, ShardingError: with what does not fit.
    """

    def build() -> Network:
        copy = nnx.clone(network)
        if config.lora is not None:
            adapters.attach(copy, config.lora, rngs=nnx.Rngs(0))
        return copy

    state = nnx.state(nnx.eval_shape(build))
    tree_shardings(state, *_layout(config, state))


def _layout(config: DiffusionTuneConfig, state: Any) -> tuple[Mesh, Rules]:
    fitted = fit_mesh(config.mesh, state, jax.device_count())
    return make_mesh(fitted), fitted.resolved_rules()


def _not_tuned(pipeline: Pipeline) -> str | None:
    """Why a model is not tuned on what has captions alone; None where it is."""
    if pipeline.time_scale != 1:
        return (
            "is distilled to few steps and receives other times than an objective here gives; tune "
            "the model that it was distilled from"
        )
    references = pipeline.references
    if pipeline.frames is not None and pipeline.frames.cut:
        return (
            "draws frames before those of the video, of which examples have none; tune a model of "
            "which the first frame is the video's own (image_condition_type token_replace)"
        )
    more = {
        "a mask and a masked picture": pipeline.fills,
        "an image to follow": pipeline.follows > 0,
        "images that it edits": references is not None and references.needed,
    }
    what = next((what for what, there in more.items() if there), None)
    return what and (
        f"draws from {what}, which examples with captions do not have; tune the model that it was "
        "made of"
    )


def _examples(
    config: DiffusionTuneConfig, base: _Base, splits: Sequence[str], out: Path
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


def _latents(config: DiffusionTuneConfig, base: _Base) -> Latents:
    """What images and captions become."""
    pipeline, parts, dtype = base.pipeline, base.parts, str(config.encode.dtype)
    tile = "" if config.encode.tile is None else f" {config.encode.tile}"
    guidance = 1.0 if config.encode.guidance is None else config.encode.guidance
    fixed = {"guidance": np.asarray(guidance, np.float32)}
    encoders = parts.fingerprint(*_ENCODERS, *_TOKENIZERS)
    seen = ""
    if pipeline.frames is not None and pipeline.frames.begin is not None:
        seen = f" first {parts.fingerprint('image_encoder', 'image_processor')}"
    return Latents(
        size=base.latent_size,
        channels=pipeline.latent_shape(pipeline.size)[-1],
        images_key=f"{parts.fingerprint('vae')} {dtype}{tile}{seen}",
        sees=pipeline.sees,
        texts_key=f"{encoders} {parts.index['_class_name']} {dtype}",
        fixed=fixed if pipeline.guidance == "embedded" else {},
        sizes=_sizes(config, base),
        draw=config.encode.latents == "sample",
    )


def _sizes(
    config: DiffusionTuneConfig, base: _Base
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
    config: DiffusionTuneConfig, base: _Base
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


def _check_encoded(data: EncodedConfig, base: _Base, found: Examples) -> None:
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


def _task(
    config: DiffusionTuneConfig, base: _Base, examples: dict[str, Examples], folder: Path
) -> Task[Network]:
    adapted: list[str] = []
    # Not `base` itself, which holds the encoders.
    network, scheduler, patch, within = base.network, base.parts.scheduler, base.patch, base.within

    def objective_of(shape: tuple[int, ...]) -> Objective:
        patches = math.prod(n // p for n, p in zip(shape, patch, strict=False))
        found = config.objective or scheduler.objective(patches)
        return replace(found, within=within) if found.within == (0, 1) else found

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
    usual = int(np.bincount(examples.bucket).argmax())
    *count, height, width = examples.sizes[usual]
    prompts, images = list(said.prompts), [None]
    frames = pipeline.frames
    if frames is not None and frames.begin is not None and isinstance(examples, CachedExamples):
        found = np.flatnonzero(examples.bucket == usual)
        found = found[np.linspace(0, len(found) - 1, min(said.count, len(found))).astype(int)]
        prompts = prompts or [examples.caption(int(index)) for index in found]
        images = [examples.first_frame(int(index)) for index in found]
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
        mesh, rules = _layout(config, other)
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
