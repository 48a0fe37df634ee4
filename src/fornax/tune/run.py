"""`tune`: one call from a config and a directory to a tuned model, resuming if it can."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import jax

from fornax.checkpoint import Checkpointer
from fornax.config.errors import ConfigError
from fornax.config.price import PriceTable
from fornax.config.progress import Progression, ProgressName, Quiet, choose
from fornax.gguf import is_gguf, write_tokenizer
from fornax.mesh import hosts, initialize
from fornax.models import abstract_decoder
from fornax.quant import check_training, plan_qat
from fornax.train import RunDirectory, Task, TrainResult, train
from fornax.train.task import in_eight_bits
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
    prices: PriceTable | None = None,
) -> TrainResult:
    """Tune a model, or continue tuning, in the run directory `out`.

    The data is read and checked before any weight is loaded; then `fornax.tune.doctor` looks at
    the rest, unless the run is resumed or `config.doctor` is off. The directory is one like any
    other: it is resumed from its latest checkpoint as if it had never stopped, and it keeps the
        tokenizer.
    With adapters its checkpoints hold nothing else; the base comes from `config.model` each time.

    Args:
      config: the run; its class says by which method.
      out: the run directory.
      accept_changes: patterns of keys that may differ from the config of the checkpoints.
      progress: what is shown.
      prices: of chips; the report and `goodput.jsonl` then say what the run costs.

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
    if directory.path.resolve() == Path(config.model).expanduser().resolve():
        raise ConfigError(
            f"{directory.path} is the model to start from, and a run writes to a directory of its "
            "own: give another --out; to resume a run, leave --model out"
        )
    with ExitStack() as stack:
        hosts.decide(lambda: _open(directory, stack))
        origin = read_origin(config)
        given, config = config, fit_to_model(config, origin)
        if config.max_length < given.max_length:
            shown.log(
                f"max_length is {config.max_length} instead of {given.max_length}: the model has "
                "no more positions"
            )
        model = origin.model_config
        check_training(config.quant, model, config.mesh)
        task: Task = method.make()(config, origin, directory.path)
        task = replace(task, quantizer=plan_qat(abstract_decoder(model), config.quant))
        task = in_eight_bits(task, config.quant, model, config.max_length)
        config = with_steps(config, task)
        for line in task.post.notes:
            shown.log(line)
        if config.doctor:
            _check_before_start(config, origin, directory, shown)
        if first:
            _keep_tokenizer(origin, config, directory.path)
        return train(
            config,
            directory,
            task=task,
            accept_changes=accept_changes,
            progress=shown,
            prices=prices,
        )


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
        shown.log("the doctor checks new runs: this one is resumed, and is not checked again")
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
        if is_gguf(origin.tokenizer_path):
            write_tokenizer(origin.tokenizer_path, out)
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
