"""`train`: one call from a config and a run directory to a trained model, resuming if it can."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from fornax.checkpoint import Checkpointer
from fornax.config import Change, dump_yaml, to_mapping
from fornax.mesh import hosts, initialize
from fornax.train import report
from fornax.train.config import TrainConfig, TrainerConfig
from fornax.train.goodput import Goodput, Ledger, summarise
from fornax.train.hardware import peak_flops
from fornax.train.loop import Loop, Reason
from fornax.train.metrics import MetricsFile, Sink, TensorBoard, Wandb
from fornax.train.progress import Progression, ProgressName, Quiet, choose
from fornax.train.recorder import Recorder
from fornax.train.resume import check_changes, check_same
from fornax.train.run_dir import RunDirectory
from fornax.train.session import Start, prepare, start
from fornax.train.signals import StopSignals, exit_code
from fornax.train.task import Task
from fornax.train.tasks import pretrain_task
from fornax.train.weights import with_model

__all__ = ["TrainResult", "train"]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    run_dir: Path
    step: int
    """Steps done in all."""
    reason: Reason
    """`finished`, `signal` (asked to stop; the same command goes on), or `data` (there is no
    more)."""
    metrics: dict[str, Any] | None
    """The last logged record of this attempt; None when it made no step."""
    evaluation: dict[str, float] | None
    """The last evaluation of this attempt."""
    goodput: Goodput | None
    """Where the time of the run went; None in processes other than the first."""
    exit_code: int
    """0 when there is nothing left to do; 130 or 143 after Ctrl-C or SIGTERM."""


def train(
    config: TrainerConfig,
    run_dir: str | Path | RunDirectory,
    *,
    task: Task | None = None,
    accept_changes: Sequence[str] = (),
    progress: ProgressName | Progression = "auto",
) -> TrainResult:
    """Train, or go on training, in `run_dir`.

    A run directory with checkpoints is resumed from the latest; the run then goes as if it had
    never stopped. SIGTERM and Ctrl-C finish the step, checkpoint and return.

    Args:
      config: the run. A `TrainConfig` says everything for pretraining; another task brings its
        own subclass of `TrainerConfig`.
      run_dir: where everything is written; a `RunDirectory` may be locked already.
      task: what is trained; None pretrains as `config` says.
      accept_changes: patterns of keys (`optim.schedule.*`) that may differ from the config that
        the checkpoints were made with.
      progress: what is shown.

    Raises:
      ConfigError: for a changed config, a directory in use or not writable.
      ShardingError: when model or batch do not divide over the devices.
      DataError, CheckpointError: from the data and the checkpoints.
      ClusterError: when the processes asked for do not all join, or were given other configs.
    """
    ledger = Ledger()
    initialize(config.processes)
    shown = choose(progress) if isinstance(progress, str) else progress
    first = jax.process_index() == 0
    directory = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory(run_dir)
    with ExitStack() as stack:
        hosts.decide(lambda: _open(directory, stack))
        shown = shown if first else Quiet()
        signals = stack.enter_context(StopSignals(shown.say))
        checkpointer = Checkpointer(directory.checkpoints, config.checkpoint)
        stack.callback(checkpointer.close)
        config, changes = _settle(config, checkpointer, accept_changes, shown)
        task = _task(config, task)
        programs = prepare(config, task, ledger)
        programs.say = shown.say
        if config.eval.every is not None:
            task.batches("eval", programs.hosts).close()  # a missing split is an error now
        begun = start(config, programs, checkpointer, allow_data_changes=_touches_data(changes))
        if first:
            directory.save_config(dump_yaml(config))
            ledger.open(directory.goodput, begun.step)
        recorder = _recorder(config, task, directory, begun, ledger, shown, first=first)
        stack.callback(lambda: [sink.close() for sink in recorder.sinks])
        stack.callback(shown.close)
        for line in programs.warnings:
            shown.say(line)
        if begun.step:
            done = " and is done" if begun.step >= config.steps else ""
            shown.say(f"the run stands at step {begun.step} of {config.steps}{done}")
        shown.start(begun.step, config.steps, task.unit)
        loop = Loop(
            config=config,
            config_yaml=dump_yaml(config),
            programs=programs,
            start=begun,
            checkpointer=checkpointer,
            recorder=recorder,
            ledger=ledger,
            signals=signals,
            directory=directory,
        )
        try:
            reason = loop.run()
        finally:
            begun.batches.close()
            ledger.close(loop.step)
        if reason == "data":
            shown.say(f"the data ended after step {loop.step} of {config.steps}")
    if first:
        report.write(directory.path)
    return TrainResult(
        run_dir=directory.path,
        step=loop.step,
        reason=reason,
        metrics=recorder.last,
        evaluation=loop.evaluation,
        goodput=summarise(directory.goodput) if first else None,
        exit_code=exit_code(loop.signal),
    )


def _settle(
    config: TrainerConfig,
    checkpointer: Checkpointer,
    accept: Sequence[str],
    shown: Progression,
) -> tuple[TrainerConfig, list[Change]]:
    """The config to go on with, its model filled in, and what changed since the checkpoint."""
    step = checkpointer.resume_step()
    saved = None if step is None else checkpointer.read_config(step)
    if isinstance(config, TrainConfig):
        config = with_model(config, saved)
    changes = [] if saved is None else check_changes(saved, config, accept)
    for change in changes:
        shown.say(f"changed since the checkpoint: {change}")
    check_same(config)
    return config, changes


def _open(directory: RunDirectory, stack: ExitStack) -> None:
    """Make the directory and lock it until the run ends."""
    stack.enter_context(directory)


def _touches_data(changes: Sequence[Change]) -> bool:
    """Whether the change of a data position's meaning was accepted."""
    of_data = ("batch_size", "seq_len", "data", "max_length")
    return any(c.path in of_data or c.path.startswith("data.") for c in changes)


def _task(config: TrainerConfig, task: Task | None) -> Task:
    if task is not None:
        return task
    if not isinstance(config, TrainConfig):
        raise TypeError(f"{type(config).__name__} is no TrainConfig: pass the task it is for")
    return pretrain_task(config)


def _recorder(
    config: TrainerConfig,
    task: Task,
    directory: RunDirectory,
    begun: Start,
    ledger: Ledger,
    shown: Progression,
    *,
    first: bool,
) -> Recorder:
    return Recorder(
        sinks=_sinks(config, directory, begun.step) if first else (),
        progress=shown,
        ledger=ledger,
        every=config.log.every,
        steps=config.steps,
        unit=task.unit,
        flops_per_unit=task.flops_per_unit,
        peak_flops=peak_flops(config.log.peak_tflops),
        max_skipped=config.skip.max_consecutive,
        total=begun.total,
    )


def _sinks(config: TrainerConfig, directory: RunDirectory, step: int) -> list[Sink]:
    sinks: list[Sink] = [MetricsFile(directory.metrics, step)]
    if config.log.tensorboard:
        sinks.append(TensorBoard(directory.tensorboard, step))
    if config.log.wandb is not None:
        sinks.append(Wandb(config.log.wandb, directory.path, to_mapping(config)))
    return sinks
