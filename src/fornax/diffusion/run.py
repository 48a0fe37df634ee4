"""`train`: one call from a config and a run directory to a trained denoiser, resuming if it can."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from fornax import adapters
from fornax.config.errors import ConfigError, DataError
from fornax.config.price import PriceTable
from fornax.config.progress import Progression, ProgressName
from fornax.diffusion.config import DiffusionConfig, DiffusionTuneConfig, EncodeConfig
from fornax.diffusion.data import Examples, ImagesConfig, WithPrior, open_examples
from fornax.diffusion.learners import learner_task
from fornax.diffusion.load import LoadedRun, load_base
from fornax.diffusion.methods import Denoise
from fornax.diffusion.network import Network
from fornax.diffusion.setup import Facts, facts_of, sizes_of
from fornax.diffusion.task import check_sizes, denoising_task, diffusion_task
from fornax.mesh import Rules, hosts, initialize
from fornax.train import PostTraining, RunDirectory, Task, TrainResult
from fornax.train import train as run_trainer
from fornax.train.state import trained_of

__all__ = ["train", "tune", "tuning_images"]


def train(
    config: DiffusionConfig,
    out: str | Path,
    *,
    accept_changes: Sequence[str] = (),
    progress: ProgressName | Progression = "auto",
    prices: PriceTable | None = None,
) -> TrainResult:
    """Train a denoiser, or continue training, in the run directory `out`.

    The images are looked at before the first step. The directory is one like any other, resumed
    from its latest checkpoint as if it had never stopped; it also has `diffusion.json`, the words
    and sizes of the data, and `images/`, grids of samples by step.

    Args:
      config: the run.
      out: the run directory.
      accept_changes: patterns of keys that may differ from the config of the checkpoints.
      progress: what is shown.
      prices: of chips; the report and `goodput.jsonl` then say what the run costs.

    Raises:
      ConfigError: for a config that does not fit the data, or was changed.
      DataError: broken or small images, missing captions, each with its place.
      ShardingError, CheckpointError, ClusterError: see `fornax.train.train`.
    """
    initialize(config.processes)
    directory = RunDirectory(out)
    with ExitStack() as stack:
        hosts.decide(lambda: _open(directory, stack))
        examples = open_examples(config.data, "train")
        facts = facts_of(config, examples, directory.path)
        task = diffusion_task(config, facts, examples, directory.path)
        if jax.process_index() == 0:
            facts.save(directory.path)
        return run_trainer(
            config,
            directory,
            task=task,
            accept_changes=accept_changes,
            progress=progress,
            prices=prices,
        )


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
    and `load_run` merges them. Captions are of the words that the base knows.

    Args:
      config: the run.
      out: the run directory.
      accept_changes: patterns of keys that may differ from the config of the checkpoints.
      progress: what is shown.
      prices: of chips; the report and `goodput.jsonl` then say what the run costs.

    Raises:
      ConfigError: no such base, or a config that does not fit it.
      DataError: as of `train`; captions with words that the base does not know.
      ShardingError, CheckpointError, ClusterError: see `fornax.train.train`.
    """
    initialize(config.processes)
    directory = RunDirectory(out)
    with ExitStack() as stack:
        hosts.decide(lambda: _open(directory, stack))
        base = load_base(
            config.model,
            dtype=config.dtypes.param_dtype,
            compute_dtype=config.dtypes.compute_dtype,
        )
        config = replace(
            config,
            model=str(Path(config.model).expanduser().resolve()),
            objective=config.objective or base.objective,
        )
        if config.encode != EncodeConfig():
            raise ConfigError(
                f"encode is set, and {config.model} is a run whose images are not encoded; leave "
                "it out"
            )
        examples = tuning_images(config, "train")
        task, facts = tuning_task(config, base, examples, directory.path)
        if jax.process_index() == 0:
            facts.save(directory.path)
        return run_trainer(
            config,
            directory,
            task=task,
            accept_changes=accept_changes,
            progress=progress,
            prices=prices,
        )


def tuning_images(config: DiffusionTuneConfig, split: str) -> Examples:
    """The images of a split, those of the class beside them in training.

    Raises:
      ConfigError, DataError: see `open_examples`.
    """
    found = open_examples(config.data, split)
    if config.prior is None or split != "train":
        return found
    assert isinstance(config.data, ImagesConfig), "checked by the config"
    said = replace(config.data, path=config.prior.path, prompt=config.prior.prompt, holdout=0.0)
    return WithPrior(found, open_examples(said, "train"), config.prior.weight)


def tuning_task(
    config: DiffusionTuneConfig, base: LoadedRun, examples: Examples, folder: Path
) -> tuple[Task[Network], Facts]:
    """The task of `tune`, and the facts of its data.

    Raises:
      DataError: images of other channels than the base's, or captions of unknown words.
      ConfigError: adapters that match no module.
    """
    facts = replace(base.facts, sizes=sizes_of(examples))
    if facts.channels != examples.channels:
        raise DataError(
            f"the model draws images of {facts.channels} channels, and these have "
            f"{examples.channels}; set data.channels to {facts.channels}"
        )
    if facts.prompts is not None:
        facts.prompts.encode(list(dict.fromkeys(examples.texts())))
    adapted: list[str] = []

    def adapt(network: Network, rngs: nnx.Rngs) -> Network:
        if config.lora is not None:
            adapted[:] = adapters.attach(network, config.lora, rngs=rngs)
        return network

    def build(rngs: nnx.Rngs) -> Network:
        return adapt(nnx.clone(base.network), rngs)

    def pretrained(mesh: Mesh, rules: Rules) -> Network:
        del mesh, rules  # the trainer lays it out
        return build(nnx.Rngs(config.seed))

    nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    check_sizes(facts.sizes, base.denoiser.config)
    objective = config.objective or base.objective
    task = denoising_task(build, config, objective, facts, examples, folder)
    if not isinstance(config.method, Denoise):
        return learner_task(config, replace(base, objective=objective), task), facts
    said = f"adapters on {', '.join(adapted)}" if adapted else "all parameters are trained"
    post = PostTraining(trained=trained_of(config.lora), notes=(said,))
    return replace(task, pretrained=pretrained, post=post), facts


def _open(directory: RunDirectory, stack: ExitStack) -> None:
    """Make the directory and lock it until the run ends."""
    stack.enter_context(directory)
