"""`train`: one call from a config and a run directory to a trained model, resuming if it can."""

import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from fornax.checkpoint import Checkpointer
from fornax.config import Change, dump_yaml, environment, to_mapping, worker_record
from fornax.config.errors import FornaxError, GroupLostError
from fornax.config.files import write_whole
from fornax.config.goodput import Goodput, summarise
from fornax.config.jsonl import append_json_line
from fornax.config.price import PriceTable
from fornax.config.progress import Progression, ProgressName, Quiet, choose
from fornax.config.run_requests import ask
from fornax.config.spikes import refuse_rewinds
from fornax.data import Dataset, Mixture, Part
from fornax.data.remote import find_workers
from fornax.mesh import hosts, initialize
from fornax.mesh.hardware import chip_of
from fornax.quant import check_speed
from fornax.train import report
from fornax.train.agreement import agree
from fornax.train.captures import Captures, Inbox
from fornax.train.compile_service import CompileService, Event, why_off
from fornax.train.config import TrainConfig, TrainerConfig
from fornax.train.diloco.slices import slice_run
from fornax.train.goodput import Ledger
from fornax.train.interval import Interval
from fornax.train.loop import Loop, Reason
from fornax.train.memory_tier import MemoryTier, peer_of
from fornax.train.metrics import MetricsFile, Sink, Wandb, read_metrics
from fornax.train.program_facts import ProgramFile
from fornax.train.program_memory import ProgramMemory
from fornax.train.recorder import Recorder
from fornax.train.resume import check_changes, check_same
from fornax.train.rewind import SpikeGuard, discard_stale
from fornax.train.run_dir import RunDirectory
from fornax.train.session import Programs, Start, prepare, start
from fornax.train.signals import StopSignals, exit_code
from fornax.train.skip_list import Rewind, SkipList
from fornax.train.snapshot import local_bytes
from fornax.train.state import as_tree
from fornax.train.task import Task
from fornax.train.tasks import pretrain_task
from fornax.train.weights import with_model

__all__ = ["TrainResult", "train"]

_MOST_SECONDS = 3600.0
"""Between two checkpoints whose interval is computed, so that no more is lost, at most."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    run_dir: Path
    step: int
    """Steps done in all."""
    reason: Reason
    """`finished`, `signal` (asked to stop; the same command resumes it), or `data` (there is no
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
    prices: PriceTable | None = None,
) -> TrainResult:
    """Train, or continue training, in `run_dir`.

    A run directory with checkpoints is resumed from the latest; the run then goes as if it had
    never stopped. SIGTERM and Ctrl-C finish the step, checkpoint and return.

    Args:
      config: the run. A `TrainConfig` says everything for pretraining; another task brings its
        own subclass of `TrainerConfig`.
      run_dir: where everything is written; a `RunDirectory` may be locked already.
      task: what is trained; None pretrains as `config` says.
      accept_changes: patterns of keys (`optim.schedule.*`) that may differ from the config that
        the checkpoints were made with; of a new run, keys of positions (`model.rope.theta`) that
        may differ from the model of `init_from`.
      progress: what is shown.
      prices: of chips; the report and `goodput.jsonl` then say what the run costs.

    Raises:
      ConfigError: for a changed config, a directory in use or not writable, and for prices
        without one of this chip.
      ShardingError: when the model does not divide over the devices.
      DataError, CheckpointError: from the data and the checkpoints.
      ClusterError: when the processes asked for do not all join, or were given other configs.
      GroupLostError: when another process is gone, and no step can be made without it.
    """
    ledger = Ledger(record=worker_record.current())
    initialize(config.processes)
    bill = _bill(prices)
    shown = choose(progress) if isinstance(progress, str) else progress
    first = jax.process_index() == 0
    directory = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory(run_dir)
    with _naming_lost_processes(), ExitStack() as stack:
        hosts.decide(lambda: _open(directory, stack))
        shown = shown if first else Quiet()
        signals = stack.enter_context(StopSignals(shown.log, _actions(directory, shown)))
        checkpointer = Checkpointer(directory.checkpoints, config.checkpoint)
        stack.callback(checkpointer.close)
        stack.push(_free_background)
        checkpointer.begin_epoch(environment.epoch())
        skip = _skip_list(directory, checkpointer, shown)
        config, changes = _settle(config, checkpointer, accept_changes, shown)
        task = _task(config, task)
        slice_ = slice_run(config)
        if slice_ is not None:
            task = slice_.task(task)
        if task.post.follow is not None:
            refuse_rewinds(config.spikes, type(config).__name__)
        slices = 1 if slice_ is None else slice_.place.count
        programs = prepare(config, task, ledger, slices=slices)
        programs.log = shown.log
        _check_speed(config, checkpointer, programs, shown)
        kept = _program_memory(programs, directory, shown, stack)
        if kept is not None and slice_ is None and isinstance(config, TrainConfig):
            kept.keep_plan({"config": dump_yaml(config)})
        if config.eval.every is not None:
            task.batches("eval", programs.hosts).close()  # a missing split is an error now
        memory = _memory(config, programs, directory, shown) if slice_ is None else None
        begin = partial(
            *(start, config, programs, checkpointer, skip),
            memory=memory,
            allow_data_changes=_touches_data(changes),
        )
        sync = None
        if slice_ is None:
            begun = begin()
        else:
            sync, begun = slice_.begin(programs, checkpointer, lambda outer: begin(outer=outer))
            stack.callback(sync.close)
        _tell_source(begun, memory, directory)
        agree(begun.step, begun.state, begun.batches.state())
        guard = _guard(config, programs, checkpointer, directory, begun)
        if first:
            directory.save_config(dump_yaml(config))
            _describe(directory, task, programs, begun)
        _open_ledger(ledger, directory, programs, begun, bill)
        recorder = _recorder(config, task, directory, begun, ledger, shown, first=first)
        stack.callback(lambda: [sink.close() for sink in recorder.sinks])
        stack.callback(shown.close)
        for line in programs.warnings:
            shown.log(line)
        if find_workers() is not None and (why := _reads_by_itself(config)):
            shown.log(why)
        if begun.step:
            done = " and is done" if begun.step >= config.steps else ""
            where = {"memory": ", in memory", "local disk": ", on local disk"}.get(begun.source, "")
            shown.log(f"the run is at step {begun.step} of {config.steps}{where}{done}")
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
            captures=Captures(
                config=config.profile, directory=directory, log=shown.log, ledger=ledger
            ),
            inbox=Inbox(directory=directory.path, log=shown.log),
            guard=guard,
            sync=sync,
            memory=memory,
            interval=_disk_interval(config),
        )
        try:
            reason = loop.run()
            if sync is not None:
                sync.finish(done=reason != "signal")
        except BaseException:
            ledger.close(loop.step + 1)  # that step was begun, and will be done again
            raise
        finally:
            begun.batches.close()
        ledger.close(loop.step)
        if reason == "data":
            shown.log(f"the data ended after step {loop.step} of {config.steps}")
    # None where it was stopped at once; and not while another group waits to continue.
    if first and not (loop.kept or config.profile.only) and read_metrics(directory.metrics):
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


def _check_speed(
    config: TrainerConfig, checkpointer: Checkpointer, programs: Programs, shown: Progression
) -> None:
    """Measure a new run's products in 8 bits beside bfloat16, in the first process."""
    used = programs.parts.task.eight_bits
    if used is None or checkpointer.resume_step() is not None:
        return
    mesh, rules = programs.parts.mesh, programs.parts.rules
    length = used.length // math.prod(mesh.shape[axis] for axis in rules["length"])
    rows = programs.hosts.padded(config.batch_size) // programs.hosts.multiple
    if said := hosts.decide(lambda: check_speed(used.config, used.model, rows, length)):
        shown.log(said)


def _describe(directory: RunDirectory, task: Task, programs: Programs, begun: Start) -> None:
    """Say in the run directory what its data is, and what its programs do when compiled."""
    mesh, state = programs.parts.mesh, programs.abstract
    arguments = {
        "parameters": state.params,
        "optimizer": state.optimizer,
        "frozen": programs.abstract_frozen,
        "other": (state.other, state.guard, state.rng, state.step, state.updates),
    }
    programs.told = ProgramFile(directory.program, arguments, dict(mesh.shape)).add
    found = {"steps_per_epoch": task.post.steps_per_epoch, **begun.batches.describe()}
    with suppress(OSError):  # a file less
        write_whole(directory.data, json.dumps(found))


def _bill(prices: PriceTable | None) -> dict[str, object]:
    """The run's chips, and the price of one."""
    chip = chip_of(jax.devices()[0].device_kind)
    name, devices = ("cpu", 1) if chip is None else (chip.name, chip.devices)
    bill: dict[str, object] = {"chips": jax.device_count() / devices}
    if prices is not None:
        price = prices.of(name)
        bill |= {"chip_hour": price.chip_hour, "currency": price.currency}
    return bill


def _open_ledger(
    ledger: Ledger,
    directory: RunDirectory,
    programs: Programs,
    begun: Start,
    bill: Mapping[str, object],
) -> None:
    """Write where the time goes: of the first process for the run, of others beside their record
    where a launcher keeps one."""
    path, record = directory.goodput, environment.worker_record()
    if jax.process_index() and record is None:
        return
    if jax.process_index() and record is not None:
        path = record.with_suffix(".goodput.jsonl")
    count = jax.process_count()
    state = local_bytes(as_tree(programs.abstract)) * count
    facts = {"hosts": count, "state_bytes": state, "restored": begun.source, **bill}
    ledger.open(path, begun.step, facts)


@contextmanager
def _naming_lost_processes() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, GroupLostError) or not hosts.is_lost(error):
            raise
        said = str(error).splitlines()[0][:200]
        raise GroupLostError(
            f"process {jax.process_index()} lost another process of the run ({said}); start all "
            "of them again: they resume from the newest checkpoint. fornax launch does so by itself"
        ) from error


def _actions(directory: RunDirectory, shown: Progression) -> dict[int, Callable[[], object]]:
    """SIGUSR1 asks for a profile; under a launcher it writes the stacks instead."""
    if worker_record.current() is not None:
        return {}

    def ask_profile() -> None:
        try:
            ask(directory.path, "profile")
        except FornaxError as error:
            shown.log(f"SIGUSR1: no profile: {error}")

    return {signal.SIGUSR1: ask_profile}


def _free_background(kind: object, error: BaseException | None, trace: object) -> None:
    """Under `fornax launch`, free a save that waits for a process that is gone, which would take
    minutes to notice; without it leaving a broken group ends the process."""
    if error is not None and worker_record.current() is not None and hosts.is_lost(error):
        jax.distributed.shutdown()


def _settle(
    config: TrainerConfig,
    checkpointer: Checkpointer,
    accept: Sequence[str],
    shown: Progression,
) -> tuple[TrainerConfig, list[Change]]:
    """The config to continue with, its model filled in, and what changed since the checkpoint."""
    step = checkpointer.resume_step()
    saved = None if step is None else checkpointer.read_config(step)
    if isinstance(config, TrainConfig):
        config = with_model(config, saved, accept)
    changes = [] if saved is None else check_changes(saved, config, accept)
    for change in changes:
        shown.log(f"changed since the checkpoint: {change}")
    check_same(config)
    return config, changes


def _skip_list(directory: RunDirectory, checkpointer: Checkpointer, shown: Progression) -> SkipList:
    """The batches to leave out; checkpoints that were trained on one of them are deleted."""
    rewinds = hosts.decide(lambda: [asdict(r) for r in SkipList.read(directory.spikes).rewinds])
    skip = SkipList(Rewind(**rewind) for rewind in rewinds)
    for step in discard_stale(checkpointer, skip):
        shown.log(
            f"the checkpoint of step {step} is deleted: it was trained on a batch that is on the "
            f"skip list in {directory.spikes}"
        )
    return skip


def _guard(
    config: TrainerConfig,
    programs: Programs,
    checkpointer: Checkpointer,
    directory: RunDirectory,
    begun: Start,
) -> SpikeGuard | None:
    if config.spikes is None:
        return None
    return SpikeGuard(
        config,
        config.spikes,
        programs=programs,
        checkpointer=checkpointer,
        path=directory.spikes,
        begun=begun,
    )


def _memory(
    config: TrainerConfig, programs: Programs, directory: RunDirectory, shown: Progression
) -> MemoryTier | None:
    """Where snapshots go that outlive this process, if a launcher gave a place."""
    paths = environment.snapshot_memory()
    if not paths:
        return None
    own, both = MemoryTier.room(programs.abstract)
    if not own:
        shown.log(
            "no snapshots in memory"
            + (", nor copies of them on local disks" if environment.local_checkpoints() else "")
            + ": two of them would take more than half of what is free"
        )
        return None
    peer = peer_of(jax.process_index(), programs.parts.mesh)
    if peer is not None and not both:
        shown.log(
            "no replicas of snapshots on other hosts: with the snapshots of its own each host "
            "would give them more than half of its free memory"
        )
        peer = None
    return MemoryTier(
        paths,
        environment.mtbf(),
        dump_yaml(config),
        peer,
        replicas=environment.snapshot_replicas(),
        shared=directory.snapshots,
        disk=environment.local_checkpoints(),
    )


def _tell_source(begun: Start, memory: MemoryTier | None, directory: RunDirectory) -> None:
    """Note in the events of a launch from which tier it resumes, and what is passed over."""
    rank, events = jax.process_index(), []
    for each in () if memory is None else memory.passed_over:
        events.append({"why": f"rank {rank}: {each}, and is not used", "rank": rank})
    if begun.source and not rank:
        why = f"resumes after step {begun.step}, from {begun.source}"
        events.append({"why": why, "restored": begun.source, "step": begun.step})
    if worker_record.current() is not None:
        for event in events:
            with suppress(OSError):  # a line less
                append_json_line(directory.events, {"epoch": environment.epoch(), **event})


def _disk_interval(config: TrainerConfig) -> Interval | None:
    """What says when the next checkpoint is due; None where `save_every` is a number or null."""
    if config.save_every != "auto":
        return None
    hours = config.checkpoint.mtbf_hours
    return Interval(environment.mtbf() if hours is None else hours * 3600, most=_MOST_SECONDS)


def _program_memory(
    programs: Programs, directory: RunDirectory, shown: Progression, stack: ExitStack
) -> ProgramMemory | None:
    """Share compiled programs with the other processes, if a launcher gave a place to keep them."""
    path, record = environment.program_memory(), environment.worker_record()
    state = None if record is None else worker_record.read(record)
    if path is None or state is None:
        return None
    if why := why_off():
        shown.log(why)
        return None
    memory = ProgramMemory(path)
    stack.callback(memory.close)

    def tell(event: Event) -> None:
        shown.log(str(event))
        if jax.process_index() == 0:
            with suppress(OSError):  # a line less
                append_json_line(directory.events, {"epoch": state.epoch, **asdict(event)})

    programs.service = CompileService(memory, programs.parts.mesh.devices, tell)
    return memory


def _reads_by_itself(config: TrainerConfig) -> str | None:
    """Why data workers have nothing to do, where they have not."""
    if not isinstance(config, TrainConfig):
        return None
    source = config.data.source
    parts = source.parts if isinstance(source, Mixture) else (Part(name="main", source=source),)
    transforms = [*config.data.transforms, *(t for part in parts for t in part.transforms)]
    if transforms or not all(isinstance(part.source, Dataset) for part in parts):
        return None
    return (
        "the data workers have nothing to do: the records are stored tokens, which each host reads "
        "faster by itself"
    )


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
        raise TypeError(f"{type(config).__name__} is not a TrainConfig: pass the task it is for")
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
        sinks=_sinks(config, directory, begun.step, shown) if first else (),
        progress=shown,
        ledger=ledger,
        every=config.log.every,
        steps=config.steps,
        unit=task.unit,
        flops_per_unit=task.flops_per_unit,
        peak_flops=_peak_flops(config.log.peak_tflops),
        max_skipped=config.skip.max_consecutive,
        total=begun.total,
    )


def _sinks(
    config: TrainerConfig, directory: RunDirectory, step: int, shown: Progression
) -> list[Sink]:
    sinks: list[Sink] = [MetricsFile(directory.metrics, step)]
    if config.log.tensorboard:
        from fornax.train.tensorboard import TensorBoard

        sinks.append(TensorBoard(directory.tensorboard, step))
    if config.log.wandb is not None:
        sinks.append(Wandb(config.log.wandb, directory.path, to_mapping(config)))
    if config.log.mlflow is not None:
        from fornax.train.mlflow import MLflow

        sinks.append(MLflow(config.log.mlflow, directory.path, to_mapping(config), shown.log))
    if config.log.opentelemetry is not None:
        from fornax.train.opentelemetry import OpenTelemetry

        sinks.append(OpenTelemetry(config.log.opentelemetry, directory.path))
    if config.log.prometheus is not None:
        from fornax.train.prometheus import Prometheus

        page = Prometheus(config.log.prometheus, directory.path)
        shown.log(f"metrics for Prometheus: {page.address}")
        sinks.append(page)
    return sinks


def _peak_flops(given_tflops: float | None = None) -> float | None:
    """Peak bfloat16 FLOP/s of all devices together, or None when the device is not a known one.

    Args:
      given_tflops: what the user says one device can do.
    """
    if given_tflops:
        return given_tflops * 1e12 * jax.device_count()
    chip = chip_of(jax.devices()[0].device_kind)
    return None if chip is None else chip.peak() / chip.devices * jax.device_count()
