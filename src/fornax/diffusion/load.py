"""Loads what a run of `fornax diffusion train` made, to sample, serve, export or tune it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from numpy.typing import NDArray

from fornax import adapters, optim
from fornax.checkpoint import CheckpointConfig, Checkpointer
from fornax.config import from_yaml
from fornax.config.errors import ConfigError
from fornax.config.text import read_yaml
from fornax.diffusion.config import DiffusionConfig, DiffusionTuneConfig, RunConfig, SampleConfig
from fornax.diffusion.data.buckets import Size
from fornax.diffusion.drawing import draw, start_noise, to_pixels
from fornax.diffusion.models import Condition
from fornax.diffusion.network import Network
from fornax.diffusion.objectives import Objective
from fornax.diffusion.prompts import text_arrays
from fornax.diffusion.schedules import Schedule
from fornax.diffusion.setup import FACTS, Facts, make_network
from fornax.optim.averages import power_exponent, reconstruct
from fornax.optim.tree import flatten, rebuild
from fornax.train import RunDirectory
from fornax.train.state import ModelParts, split_model, trained_of

__all__ = [
    "LoadedRun",
    "TunedRun",
    "is_diffusion_run",
    "is_pipeline",
    "load_base",
    "load_run",
    "open_tuned",
]


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A trained denoiser with what is needed to draw with it."""

    network: Network
    config: DiffusionConfig | DiffusionTuneConfig
    """What it was trained with, last."""
    objective: Objective
    """Path, prediction and shift of the run."""
    facts: Facts
    step: int
    """Of the checkpoint."""

    @property
    def denoiser(self) -> Any:
        """(x_BX, time_B, condition) to its output."""
        return self.network.denoiser

    @property
    def sample(self) -> SampleConfig:
        """Sampler, steps and guidance of the run."""
        return self.config.sample

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """(H, W, C) of each bucket of training, of videos (F, H, W, C); the most frequent first."""
        return tuple((*size, self.facts.channels) for size in self.facts.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """(H, W, C) of most examples, of videos (F, H, W, C)."""
        return self.shapes[0]

    def schedule(self, steps: int) -> Schedule:
        """Noise levels for a sampler."""
        return self.objective.schedule(steps)

    def encode(self, prompts: Sequence[str]) -> Condition:
        """The condition of prompts, a row each; "" is the one of dropped captions.

        Raises:
          DataError: a word that training never saw, or too many.
        """
        return self.network.condition(text_arrays(self.facts.prompts, prompts))

    def decode(self, x_BX: Any) -> NDArray[np.uint8]:
        """(B, *X) uint8 images or videos of what the sampler ends with."""
        return to_pixels(x_BX)

    def draw(
        self,
        prompts: Sequence[str],
        *,
        seed: int = 0,
        steps: int | None = None,
        guidance: float | None = None,
        sampler: str | None = None,
        size: Size | None = None,
    ) -> NDArray[np.float32]:
        """Images or videos in [-1, 1], (B, *X); what is None is as the run samples.

        Row b of a seed starts from the same noise whatever the other prompts are.

        Raises:
          ConfigError: guidance of a network without captions.
          DataError: see `encode`.
        """
        said = self.sample
        scale = said.guidance if guidance is None else guidance
        if self.facts.prompts is None and scale != 1:
            raise ConfigError(
                f"guidance={scale:g}: the run has no captions (text is null); leave it out"
            )
        shape = (*(size or self.facts.usual), self.facts.channels)
        settings = (sampler or said.sampler, steps or said.steps, said.rescale, scale != 1)
        graph, state = nnx.split(self.network)
        found = _drawn(
            graph,
            self.objective,
            settings,
            state,
            self.encode(prompts),
            self.encode([""] * len(prompts)),
            start_noise(seed, len(prompts), shape),
            np.float32(scale),
            jax.random.key(seed),
        )
        return np.asarray(found)


def is_diffusion_run(path: str | Path) -> bool:
    """Whether `path` is a run directory of `fornax diffusion train`."""
    return (Path(path).expanduser() / FACTS).is_file()


def is_pipeline(path: str | Path) -> bool:
    """Whether `path` is a folder that diffusers saved."""
    return (Path(path).expanduser() / "model_index.json").is_file()


@dataclass(frozen=True, kw_only=True)
class TunedRun:
    """A run of tuning whose model began as a folder of diffusers."""

    path: Path
    config: DiffusionTuneConfig
    """Of its latest checkpoint, or of the run where it has none yet."""

    @property
    def folder(self) -> Path:
        """That folder, through any number of runs."""
        before = open_tuned(self.config.model)
        return Path(self.config.model) if before is None else before.folder

    def restore(
        self, load: Callable[[str], Network], only: str, *, merge: bool = True
    ) -> dict[str, Network]:
        """What this run and those before it made of networks of `folder`, by component.

        Args:
          load: a network of the folder, by component.
          only: the component of a run that names none.
          merge: whether the run's adapters are merged; those of runs before it always are.

        Raises:
          CheckpointError: no checkpoint, or a damaged one.
        """
        before, own = open_tuned(self.config.model), self.config.component or only
        found = {} if before is None else before.restore(load, only)
        network = found[own] if own in found else load(own)
        checkpointer = Checkpointer(RunDirectory(self.path).checkpoints, CheckpointConfig())
        try:
            parts = _adapted(network, self.config)
            params, _ = _restored(checkpointer, self.config, parts, None, None)
        finally:
            checkpointer.close()
        network = parts.merge(params, nnx.to_pure_dict(parts.other), jax.random.key(0))
        if self.config.lora is not None and merge:
            network = adapters.merged(network)
        return {**found, own: network}


def open_tuned(path: str | Path) -> TunedRun | None:
    """The run in a directory, if it tunes what began as a folder of diffusers.

    Raises:
      ConfigError: what it began with is not where it was.
    """
    directory = RunDirectory(path)
    if not is_diffusion_run(path) or not directory.config.is_file():
        return None
    text = directory.config.read_text(encoding="utf-8")
    values, _ = read_yaml(text, str(directory.config))
    model = values.get("model") if isinstance(values, dict) else None
    if not isinstance(model, str):
        return None
    if not is_pipeline(model) and not is_diffusion_run(model):
        raise ConfigError(
            f"{path} was tuned from {model}, which holds no model any more; move it back"
        )
    if not is_pipeline(model) and open_tuned(model) is None:
        return None
    config = from_yaml(DiffusionTuneConfig, text, source=str(directory.config))
    return TunedRun(path=Path(path), config=config)


def _adapted(network: Network, config: DiffusionTuneConfig) -> ModelParts:
    """A network with the adapters of a run, taken apart into what that trains and the rest."""
    if config.lora is not None:
        adapters.attach(network, config.lora, rngs=nnx.Rngs(0))
    return split_model(network, trained_of(config.lora))


def _run(
    graph: Any,
    objective: Objective,
    settings: tuple[str, int, float, bool],
    state: Any,
    condition: Condition,
    empty: Condition,
    noise: jax.Array,
    scale: jax.Array,
    key: jax.Array,
) -> jax.Array:
    sampler, steps, rescale, guided = settings
    network = nnx.merge(graph, state)
    return draw(
        network.denoiser,
        objective,
        condition,
        empty if guided else None,
        noise,
        sampler=sampler,
        steps=steps,
        guidance=scale,
        rescale=rescale,
        key=key,
    )


_drawn = jax.jit(_run, static_argnums=(0, 1, 2))


def load_run(
    path: str | Path,
    *,
    step: int | None = None,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    merge: bool = True,
    width: float | None = None,
) -> LoadedRun:
    """The network of a run, with averaged parameters where it keeps an average.

    Args:
      path: the run directory.
      step: which checkpoint; None takes the latest.
      dtype: of the parameters; None keeps the run's.
      compute_dtype: of the products; None keeps the run's.
      merge: whether adapters are merged into the weights that they were trained on.
      width: take an average of this relative width instead, made of those of `optim.ema.widths`
        in all checkpoints up to the step (Karras et al. 2024).

    Raises:
      ConfigError: a run of another kind; the run that tuning began at is not where it was.
      CheckpointError: no such checkpoint, or a damaged one.
    """
    directory = RunDirectory(path)
    checkpointer = Checkpointer(directory.checkpoints, CheckpointConfig())
    try:
        text = checkpointer.read_config(step)
        facts = Facts.load(directory.path)
        source = f"the config saved in {directory.path}"
        values, _ = read_yaml(text, source)
        if isinstance(values, dict) and isinstance(values.get("model"), str):
            config = from_yaml(DiffusionTuneConfig, text, source=source)
            base = load_base(config.model, dtype=dtype, compute_dtype=compute_dtype)
            objective = config.objective or base.objective
            parts = _adapted(base.network, config)
        else:
            config = from_yaml(DiffusionConfig, text, source=source)
            objective = config.objective
            own = config.dtypes
            dtypes = {
                "dtype": own.param_dtype if dtype is None else dtype,
                "compute_dtype": own.compute_dtype if compute_dtype is None else compute_dtype,
            }
            built = nnx.eval_shape(lambda: make_network(config, facts, nnx.Rngs(0), **dtypes))
            parts = split_model(built)
        params, at = _restored(checkpointer, config, parts, step, width)
    finally:
        checkpointer.close()
    network = parts.merge(params, nnx.to_pure_dict(parts.other), jax.random.key(0))
    if isinstance(config, DiffusionTuneConfig) and config.lora is not None and merge:
        network = adapters.merged(network)
    return LoadedRun(network=network, config=config, objective=objective, facts=facts, step=at)


def load_base(
    path: str, *, dtype: DTypeLike | None = None, compute_dtype: DTypeLike | None = None
) -> LoadedRun:
    """The run that tuning begins at.

    Raises:
      ConfigError: no path, or no diffusion run there.
    """
    if not path:
        raise ConfigError("model is empty; name the folder or run to start from with --model DIR")
    if not is_diffusion_run(path) or open_tuned(path) is not None:
        raise ConfigError(
            f"model={path} is not a run directory of fornax diffusion train, nor a folder with "
            f"model_index.json that diffusers saved (from {Path.cwd()}); name one, or move it back"
        )
    return load_run(path, dtype=dtype, compute_dtype=compute_dtype)


def _restored(
    checkpointer: Checkpointer,
    config: RunConfig,
    parts: ModelParts,
    step: int | None,
    width: float | None,
) -> tuple[Any, int]:
    """The trained arrays of a checkpoint, averaged where it keeps an average, and its step."""
    wanted: dict[str, Any] = {"params": jax.tree.map(_abstract, nnx.to_pure_dict(parts.params))}
    chain = None
    if config.optim.ema is not None or config.optim.lookahead is not None:
        chain = optim.build(config.optim, total_steps=config.steps, params=parts.params)
        abstract = jax.eval_shape(chain.init, wanted["params"])
        wanted["optimizer"] = jax.tree.map(_abstract, abstract)
    if width is not None:
        return _reconstructed(checkpointer, config, wanted, chain, step, width)
    restored = checkpointer.restore(wanted, step, partial=True)
    found = restored.state["params"]
    if chain is not None:
        found = chain.eval_params(found, restored.state["optimizer"])
    return found, restored.step


def _reconstructed(
    checkpointer: Checkpointer,
    config: RunConfig,
    wanted: Any,
    chain: optim.Built | None,
    step: int | None,
    width: float,
) -> tuple[Any, int]:
    """The average of a width, from those that checkpoints hold, and its step."""
    ema = config.optim.ema
    if chain is None or ema is None or not ema.widths:
        raise ConfigError(
            f"width={width:g}: no averages were kept to make it of; train with optim.ema.widths, "
            "such as 0.05 and 0.1, or leave width out"
        )
    snapshots, at, exponents = [], [], []
    last = checkpointer.resume_step() if step is None else step
    for number in (n for n in checkpointer.all_steps() if last is not None and n <= last):
        restored = checkpointer.restore(wanted, number, partial=True)
        kept = chain.power_averages(restored.state["optimizer"])
        if kept is not None and int(kept.count):
            snapshots += kept.averages
            at += [int(kept.count)] * len(ema.widths)
            exponents += map(power_exponent, ema.widths)
    average = reconstruct(snapshots, at, exponents, max(at, default=0), power_exponent(width))
    shapes = flatten(wanted["params"])
    found = {p: jnp.asarray(x, shapes[p].dtype) for p, x in flatten(average).items()}
    return rebuild(wanted["params"], found), last or 0


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """An array on a device of this process: each of several loads a whole network."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
