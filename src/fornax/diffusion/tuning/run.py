"""`tune`: a folder of diffusers, or a run, trained on other images or videos, whole or by adapters.

Of a folder these are encoded by its autoencoder and the captions by its text encoders, once; its
denoiser is then trained on what is kept on disk, by the objective that its scheduler says.

Shapes: X the shape of an example's latents.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flax import nnx
from jax.sharding import Mesh

from fornax import adapters
from fornax.config.errors import ConfigError
from fornax.config.price import PriceTable
from fornax.config.progress import Progression, ProgressName
from fornax.diffusion.config import DiffusionTuneConfig
from fornax.diffusion.data import Examples
from fornax.diffusion.load import TunedRun, is_pipeline, open_tuned
from fornax.diffusion.lora import save_lora
from fornax.diffusion.models import save_component
from fornax.diffusion.network import Network
from fornax.diffusion.objectives import Objective
from fornax.diffusion.pipelines.load import open_parts, trained_networks
from fornax.diffusion.run import opened, tuning_task
from fornax.diffusion.setup import Facts, sizes_of
from fornax.diffusion.task import examples_task
from fornax.diffusion.tuning.base import Base, open_base
from fornax.diffusion.tuning.encoding import encoded_examples
from fornax.diffusion.tuning.grids import grids_of
from fornax.mesh import Rules, hosts
from fornax.train import PostTraining, Task, TrainResult
from fornax.train import train as run_trainer
from fornax.train.state import trained_of

__all__ = ["tune"]


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
    base = open_base(config, folder)
    splits = ["train"] if config.eval.every is None else ["train", "eval"]
    examples = encoded_examples(config, base, splits, out)
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


def _task(
    config: DiffusionTuneConfig, base: Base, examples: dict[str, Examples], folder: Path
) -> Task[Network]:
    adapted: list[str] = []
    # Not `base` itself, which holds the encoders.
    network, scheduler, patch = base.network, base.parts.scheduler, base.patch

    def objective_of(shape: tuple[int, ...]) -> Objective:
        patches = math.prod(n // p for n, p in zip(shape, patch, strict=False))
        return config.objective or scheduler.objective(patches)

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
        grids_of(config, base, examples["train"], folder),
        base.within,
    )
    said = f"adapters on {', '.join(adapted)}" if adapted else "all parameters are trained"
    post = PostTraining(trained=trained_of(config.lora), notes=(said,))
    return replace(task, pretrained=pretrained, post=post)
