"""What tuning a folder of diffusers begins at: its parts, and the network that is trained."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from fornax import adapters
from fornax.config.errors import ConfigError
from fornax.diffusion.config import DiffusionTuneConfig, takes
from fornax.diffusion.data import EncodedConfig
from fornax.diffusion.data.buckets import Size
from fornax.diffusion.load import open_tuned
from fornax.diffusion.methods import Denoise
from fornax.diffusion.network import Network
from fornax.diffusion.pipelines import Pipeline
from fornax.diffusion.pipelines.experts import Experts
from fornax.diffusion.pipelines.load import open_parts, pipeline_of, trained_networks
from fornax.diffusion.pipelines.parts import Parts
from fornax.diffusion.task import check_sizes
from fornax.mesh import Rules, fit_mesh, make_mesh, parse_dtype, tree_shardings

__all__ = ["Base", "layout_of", "open_base"]


@dataclass(frozen=True, kw_only=True)
class Base:
    """What tuning begins at."""

    parts: Parts
    pipeline: Pipeline
    network: Network
    """What is trained."""
    other: nnx.Module | None
    """The other of two networks; abstract where nothing is drawn."""

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
    def within(self) -> tuple[float, float] | None:
        """The times that are of the network; None for all."""
        experts = self.pipeline.denoiser
        if not isinstance(experts, Experts):
            return None
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
        if frames is not None and self.pipeline.begins and count == [1]:
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


def open_base(config: DiffusionTuneConfig, folder: Path) -> Base:
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
    if config.sample.every is None:  # nobody draws with the other of two
        unread = nnx.eval_shape(lambda: nnx.clone(network.denoiser))
        modules = {**dict.fromkeys(parts.denoisers, unread), **modules}
    parts = open_parts(folder, dtype, modules=modules)
    pipeline = pipeline_of(parts)
    if why := _not_tuned(pipeline):
        raise ConfigError(f"{folder} {why}")
    if pipeline.begins and isinstance(config.data, EncodedConfig):
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
    return Base(
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
    tree_shardings(state, *layout_of(config, state))


def layout_of(config: DiffusionTuneConfig, state: Any) -> tuple[Mesh, Rules]:
    """The run's mesh and rules for a network of this state.

    Raises:
      ShardingError: one that does not fit.
    """
    fitted = fit_mesh(config.mesh, state, jax.device_count())
    return make_mesh(fitted), fitted.resolved_rules()


def _not_tuned(pipeline: Pipeline) -> str | None:
    """Why a model is not tuned on images or videos with captions; None where it is."""
    if pipeline.time_scale != 1:
        return (
            "is distilled to few steps and receives other times than an objective here gives; tune "
            "the model that it was distilled from"
        )
    if pipeline.frames is not None and pipeline.frames.cut:
        return (
            "draws frames before those of the video, of which examples have none; tune a model of "
            "which the first frame is the video's own (image_condition_type token_replace)"
        )
    references = pipeline.references
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
