"""`tune`: one call from a config and a directory to a tuned model, resuming if it can."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import jax

from fornax.checkpoint import Checkpointer
from fornax.config.errors import ConfigError
from fornax.config.progress import Progression, ProgressName, Quiet, choose
from fornax.mesh import hosts, initialize
from fornax.train import RunDirectory, Task, TrainResult, train
from fornax.tune.config import TuneConfig
from fornax.tune.methods import method_of
from fornax.tune.policy import Origin, fit_to_model, read_origin
from fornax.tune.splits import with_steps

__all__ = ["tune"]

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
        given, config = config, fit_to_model(config, origin)
        if config.max_length < given.max_length:
            shown.log(
                f"max_length is {config.max_length} instead of {given.max_length}: the model has "
                "no more positions"
            )
        task: Task = method.make()(config, origin, directory.path)
        config = with_steps(config, task)
        for line in task.post.notes:
            shown.log(line)
        if config.doctor:
            _check_before_start(config, origin, directory, shown)
        if first:
            _keep_tokenizer(origin, config, directory.path)
        return train(config, directory, task=task, accept_changes=accept_changes, progress=shown)


def _open(directory: RunDirectory, stack: ExitStack) -> None:
    """Make the directory and lock it until the run ends."""
    stack.enter_context(directory)


def _check_before_start(
    config: TuneConfig, origin: Origin, directory: RunDirectory, shown: Progression
) -> None:
    """Let the doctor look at a run that begins.

    Raises:
      ConfigError: a paragraph for each foundation that is wrong.
    """
    if Checkpointer(directory.checkpoints).latest_step() is not None:
        shown.log("the doctor looks at runs that begin: this one goes on, and is not checked again")
    elif jax.process_count() > 1:
        shown.log(
            f"the doctor works in one process, and this run has {jax.process_count()}: it checks "
            "nothing here; run `fornax tune doctor` with the same flags on one host"
        )
    else:
        from fornax.tune.doctor import require_sound

        require_sound(config, origin, shown.log)


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
