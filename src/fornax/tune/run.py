"""`tune`: one call from a config and a directory to a tuned model, resuming if it can."""

import dataclasses
import math
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import jax

from fornax.checkpoint import Checkpointer
from fornax.config.errors import ConfigError
from fornax.mesh import hosts, initialize
from fornax.train import RunDirectory, Task, TrainResult, train
from fornax.train.progress import Progression, ProgressName, Quiet, choose
from fornax.tune.config import TuneConfig
from fornax.tune.methods import method_of
from fornax.tune.policy import Origin, read_origin

__all__ = ["resolve", "settle", "tune"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "generation_config.json",
)


def tune(
    config: TuneConfig,
    out: str | Path,
    *,
    accept_changes: Sequence[str] = (),
    progress: ProgressName | Progression = "auto",
) -> TrainResult:
    """Tune a model, or go on tuning, in the run directory `out`.

    The data is read and checked before any weight is loaded; then `fornax.tune.doctor` looks at
    the rest, unless the run goes on or `config.doctor` is off. The directory is one like any other:
    it is resumed from its latest checkpoint as if it had never stopped, and it keeps the tokenizer.
    With adapters its checkpoints hold nothing else; the base comes from `config.model` each time.

    Args:
      config: the run; its class says by which method.
      out: the run directory.
      accept_changes: patterns of keys that may differ from the config of the checkpoints.
      progress: what is shown.

    Raises:
      ConfigError: for a config that does not fit the model or the data, or was changed; what the
        doctor found.
      DataError: naming file and line of what is wrong with the data.
      ShardingError, CheckpointError, ClusterError: see `train.train`.
    """
    method = method_of(config)
    initialize(config.processes)
    first = jax.process_index() == 0
    shown = choose(progress) if isinstance(progress, str) else progress
    shown = shown if first else Quiet()
    directory = RunDirectory(out)
    with ExitStack() as stack:
        hosts.decide(lambda: _open(directory, stack))
        origin = read_origin(config)
        given, config = config, settle(config, origin)
        if config.max_length < given.max_length:
            shown.say(
                f"max_length is {config.max_length} instead of {given.max_length}: the model has "
                "no more positions"
            )
        task: Task = method.make()(config, origin, directory.path)
        config = resolve(config, task)
        for line in task.notes:
            shown.say(line)
        if config.doctor:
            _consult(config, origin, directory, shown)
        if first:
            _keep_tokenizer(origin, config, directory.path)
        return train(config, directory, task=task, accept_changes=accept_changes, progress=shown)


def _open(directory: RunDirectory, stack: ExitStack) -> None:
    """Make the directory and lock it until the run ends."""
    stack.enter_context(directory)


def _consult(
    config: TuneConfig, origin: Origin, directory: RunDirectory, shown: Progression
) -> None:
    """Let the doctor look at a run that begins.

    Raises:
      ConfigError: a paragraph for each foundation that is wrong.
    """
    if Checkpointer(directory.checkpoints).latest_step() is not None:
        shown.say("the doctor looks at runs that begin: this one goes on, and is not checked again")
    elif jax.process_count() > 1:
        shown.say(
            f"the doctor works in one process, and this run has {jax.process_count()}: it checks "
            "nothing here; run `fornax tune doctor` with the same flags on one host"
        )
    else:
        from fornax.tune.doctor import admit

        admit(config, origin, shown.say)


def settle(config: TuneConfig, origin: Origin) -> TuneConfig:
    """The config with what follows from the model: its path, or its commit on the Hub, so that the
    run is found to belong to it from any folder, and `max_length`, no larger than its positions."""
    length = min(config.max_length, origin.model_config.max_position_embeddings)
    return dataclasses.replace(config, model=origin.name, max_length=length)


def resolve(config: TuneConfig, task: Task) -> TuneConfig:
    """The config with the numbers that follow from the data: steps, and when to evaluate.

    Raises:
      ConfigError: when `steps` and `epochs` both say how long the run is, and disagree.
    """
    per_epoch = task.steps_per_epoch
    if config.steps is None or config.epochs is not None:
        if per_epoch is None:
            raise ConfigError("this data has no epochs; say how long the run is with --steps")
        steps = max(1, math.ceil(round((config.epochs or 1.0) * per_epoch, 6)))
        if config.steps not in (None, steps):
            raise ConfigError(
                f"steps={config.steps} and epochs={config.epochs:g}, which are {steps} steps of "
                f"batch_size={config.batch_size}, both say how long the run is; give one of them"
            )
        config = dataclasses.replace(config, steps=steps)
    if config.evaluates and config.eval.every is None:
        every = config.steps or 1
        if per_epoch is not None:
            every = max(1, min(every, math.ceil(per_epoch)))
        config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, every=every))
    return config


def _keep_tokenizer(origin: Origin, config: TuneConfig, out: Path) -> None:
    """Copy what belongs to the tokenizer, so that the run is a model to generate with."""
    try:
        for name in _TOKENIZER_FILES:
            for folder in (origin.tokenizer_path, origin.path):
                file = folder / name
                if file.is_file():
                    shutil.copyfile(file, out / name)
                    break
                if file.is_dir():
                    shutil.copytree(file, out / name, dirs_exist_ok=True)
                    break
        if config.template is not None:
            shutil.copyfile(Path(config.template).expanduser(), out / "chat_template.jinja")
    except OSError as error:
        raise ConfigError(
            f"cannot keep the tokenizer in {out}: {error.strerror or error}; make room, or make "
            "it writable"
        ) from error
