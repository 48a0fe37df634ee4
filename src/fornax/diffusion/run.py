"""`train`: one call from a config and a run directory to a trained denoiser, resuming if it can.

Also what tuning shares with it, and the task of tuning a run.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from flax import nnx
from jax.sharding import Mesh

from fornax import adapters
from fornax.config.errors import ConfigError, DataError
from fornax.config.price import PriceTable
from fornax.config.progress import Progression, ProgressName
from fornax.diffusion.config import (
    DiffusionConfig,
    DiffusionTuneConfig,
    EncodeConfig,
    RunConfig,
)
from fornax.diffusion.data import Examples, ImagesConfig, WithPrior, open_examples
from fornax.diffusion.learners import learner_task
from fornax.diffusion.load import load_base
from fornax.diffusion.methods import Denoise
from fornax.diffusion.network import Network
from fornax.diffusion.setup import Facts, facts_of, sizes_of
from fornax.diffusion.task import check_sizes, denoising_task, diffusion_task
from fornax.mesh import Rules, hosts, initialize
from fornax.train import PostTraining, RunDirectory, Task, TrainResult
from fornax.train import train as run_trainer
from fornax.train.state import trained_of

__all__ = ["opened", "train", "tuning_images", "tuning_task"]


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
    with opened(config, out) as directory:
        examples = open_examples(config.data, "train")
        facts = facts_of(config, examples, directory.path)
        task = diffusion_task(config, facts, examples, directory.path)
        facts.save(directory.path)
        return run_trainer(
            config,
            directory,
            task=task,
            accept_changes=accept_changes,
            progress=progress,
            prices=prices,
        )


@contextmanager
def opened(config: RunConfig, out: str | Path) -> Iterator[RunDirectory]:
    """The directory of a run, made and locked by process 0 while the run lasts."""
    initialize(config.processes)
    directory = RunDirectory(out)
    with ExitStack() as stack:
        hosts.decide(lambda: _open(directory, stack))
        yield directory


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
    try:
        return WithPrior(found, open_examples(said, "train"), config.prior.weight)
    except (ConfigError, DataError) as error:
        raise type(error)(f"the images of prior.path={config.prior.path}: {error}") from error


def tuning_task(
    config: DiffusionTuneConfig, folder: Path
) -> tuple[DiffusionTuneConfig, Task[Network], Facts]:
    """The config of a run that starts from another, its task, and the facts of its data.

    Args:
      config: of `tune`; what it leaves open is the base's.
      folder: where grids of samples are written.

    Raises:
      DataError: images of other channels than the base's, or captions of unknown words.
      ConfigError: no such base, adapters that match no module, or encoders where there are none.
    """
    base = load_base(
        config.model, dtype=config.dtypes.param_dtype, compute_dtype=config.dtypes.compute_dtype
    )
    if config.encode != EncodeConfig():
        raise ConfigError(
            f"encode is set, and {config.model} is a run whose images are not encoded; leave it out"
        )
    objective = config.objective or base.objective
    config = replace(config, objective=objective)
    examples = tuning_images(config, "train")
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
    task = denoising_task(build, config, objective, facts, examples, folder)
    if not isinstance(config.method, Denoise):
        return config, learner_task(config, replace(base, objective=objective), task), facts
    said = f"adapters on {', '.join(adapted)}" if adapted else "all parameters are trained"
    post = PostTraining(trained=trained_of(config.lora), notes=(said,))
    return config, replace(task, pretrained=pretrained, post=post), facts


def _open(directory: RunDirectory, stack: ExitStack) -> None:
    stack.enter_context(directory)
