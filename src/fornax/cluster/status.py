"""How a launched run fares, read from its files without asking any process of it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fornax.cluster.files import ClusterFiles
from fornax.config import worker_record
from fornax.config.errors import ClusterError, ConfigError
from fornax.config.goodput import Goodput, summarise
from fornax.config.jsonl import read_json_lines
from fornax.config.worker_record import WorkerState

__all__ = [
    "DataWorkerStatus",
    "RankStatus",
    "SamplerStatus",
    "Status",
    "hosts_at_work",
    "read_events",
    "read_status",
    "resize",
]


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """How a rank fares."""

    rank: int
    pid: int
    phase: str
    step: int
    unchanged: float
    """Seconds since it last changed phase or step."""
    silent: float
    """Seconds since its heartbeat; more than one means that it does not run."""
    late: float
    """Seconds by which it entered its step after the first rank that did."""
    slow: float
    """Seconds by which it holds each step up; 0 unless it was found to be slow."""


@dataclass(frozen=True, kw_only=True)
class SamplerStatus:
    """How a sampler of reinforcement learning fares."""

    number: int
    pid: int
    phase: str
    """`start`, `compile`, `update`, `generate` or `idle`."""
    version: int
    """Optimizer steps behind the weights it draws with; -1 before the first."""
    unchanged: float
    """Seconds since it last changed phase or version."""
    silent: float
    """Seconds since its heartbeat."""
    staleness: int | None
    """Optimizer steps that the trainer has done since that version; None where none is known."""


@dataclass(frozen=True, kw_only=True)
class DataWorkerStatus:
    """How a data worker fares."""

    number: int
    pid: int
    phase: str
    """`start`, `idle` or `read`."""
    records: int
    """Records that it has read, in this process."""
    unchanged: float
    """Seconds since it last began or ended to read."""
    silent: float
    """Seconds since its heartbeat."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """How a run fares."""

    run_dir: Path
    epoch: int
    state: str
    """That of the latest event; `gone` after a launch that was killed."""
    since: float
    """Wall time of that event, seconds since 1970."""
    why: str
    ranks: tuple[RankStatus, ...]
    """Of the workers there are; none after the end."""
    controller: int | None = None
    """The process of the controller; None after the end, and where it is a thread of a `Cluster`'s
    process."""
    data_workers: tuple[DataWorkerStatus, ...] = ()
    """Processes that read the input of the hosts, where there are any."""
    goodput: Goodput | None = None
    """Where the time went; None before the first process has a record of it."""
    samplers: tuple[SamplerStatus, ...] = ()
    """Of reinforcement learning, where there are any."""
    restored: str = ""
    """From which tier the latest group that was not at the run's beginning resumed, and from which
    step; in words."""

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        age = time.time() - self.since
        epoch = f"epoch {self.epoch}, " if self.epoch else ""
        yield f"{self.run_dir}: {epoch}{self.state} for {age:.0f} s: {self.why}"
        if self.restored:
            yield self.restored
        if self.controller is not None:
            yield f"controller: process {self.controller}"
        if self.ranks:
            yield "rank     pid  phase           step    since  heartbeat     late"
        for r in self.ranks:
            step = "-" if r.step < 0 else str(r.step)
            yield (
                f"{r.rank:4}  {r.pid:6}  {r.phase:<14}  {step:>4}  {r.unchanged:5.1f} s"
                f"  {r.silent:7.1f} s  {r.late * 1000:4.0f} ms"
                + (f"  slow: {r.slow * 1000:.0f} ms of each step" if r.slow else "")
            )
        if self.samplers:
            yield "sampler  pid  phase        version    since  heartbeat  staleness"
        for s in self.samplers:
            version = "-" if s.version < 0 else str(s.version)
            yield (
                f"{s.number:4}  {s.pid:6}  {s.phase:<11}  {version:>7}  {s.unchanged:5.1f} s"
                f"  {s.silent:7.1f} s  {'-' if s.staleness is None else s.staleness:>9}"
            )
        if self.data_workers:
            yield "data     pid  phase        records    since  heartbeat"
        for w in self.data_workers:
            yield (
                f"{w.number:4}  {w.pid:6}  {w.phase:<11}  {max(w.records, 0):>7}"
                f"  {w.unchanged:5.1f} s  {w.silent:7.1f} s"
            )
        if self.goodput is not None:
            yield from _where_time_went(self.goodput)


def read_status(run_dir: str | Path) -> Status:
    """The latest event of a run, what its workers do, if there are any, and where its time went.

    Raises:
      ConfigError: for a directory in which nothing was launched or trained.
    """
    files = ClusterFiles(Path(run_dir).expanduser())
    ledger = files.run_dir / "goodput.jsonl"
    goodput = summarise(ledger) if ledger.exists() else None
    if goodput is not None and not files.events.exists():
        said = "trained by one command, without fornax launch"
        return Status(
            run_dir=files.run_dir,
            epoch=0,
            state="silent",
            since=ledger.stat().st_mtime,
            why=said,
            ranks=(),
            goodput=goodput,
        )
    said = read_events(run_dir)
    events = [event for event in said if "state" in event]
    restored = [e for e in said if "restored" in e]
    from_where = f"epoch {restored[-1]['epoch']} {restored[-1]['why']}" if restored else ""
    latest = events[-1]
    if latest["state"] != "ended" and not files.is_held():
        return Status(
            run_dir=files.run_dir,
            epoch=latest["epoch"],
            state="gone",
            since=latest["time"],
            why="the launch was killed, and its processes with it; the same command resumes it",
            ranks=(),
            goodput=goodput,
            restored=from_where,
        )
    of_epoch = [e for e in events if e["epoch"] == latest["epoch"] and "slow" in e]
    slow = of_epoch[-1] if of_epoch else {"slow": None}
    records = [worker_record.read(path) for path in files.records().values()]
    states = [state for state in records if state is not None]
    now = time.monotonic_ns()
    ranks = (
        RankStatus(
            rank=state.rank,
            pid=state.pid,
            phase=state.phase,
            step=state.step,
            unchanged=(now - state.changed_ns) / 1e9,
            silent=(now - state.beat_ns) / 1e9,
            late=_late(state, states),
            slow=slow["own_seconds"] - slow["others_seconds"] if slow["slow"] == state.rank else 0,
        )
        for state in sorted(states, key=lambda state: state.rank)
    )
    return Status(
        run_dir=files.run_dir,
        epoch=latest["epoch"],
        state=latest["state"],
        since=latest["time"],
        why=latest["why"],
        ranks=tuple(ranks),
        controller=files.controller_pid(),
        data_workers=tuple(_data_workers(files)),
        goodput=goodput,
        samplers=tuple(_samplers(files, states)),
        restored=from_where,
    )


def _samplers(files: ClusterFiles, ranks: Sequence[WorkerState]) -> Iterator[SamplerStatus]:
    done = max((state.step - 1 for state in ranks if state.step > 0), default=None)
    now = time.monotonic_ns()
    for number, path in sorted(files.beside_records("sampler").items()):
        state = worker_record.read(path)
        if state is not None:
            behind = None if done is None or state.step < 0 else max(done - state.step, 0)
            yield SamplerStatus(
                number=number,
                pid=state.pid,
                phase=state.phase,
                version=state.step,
                unchanged=(now - state.changed_ns) / 1e9,
                silent=(now - state.beat_ns) / 1e9,
                staleness=behind,
            )


def _data_workers(files: ClusterFiles) -> Iterator[DataWorkerStatus]:
    now = time.monotonic_ns()
    for number, path in sorted(files.beside_records("data").items()):
        state = worker_record.read(path)
        if state is not None:
            yield DataWorkerStatus(
                number=number,
                pid=state.pid,
                phase=state.phase,
                records=state.step,
                unchanged=(now - state.changed_ns) / 1e9,
                silent=(now - state.beat_ns) / 1e9,
            )


def _where_time_went(goodput: Goodput) -> Iterator[str]:
    wall = goodput.wall_seconds or 1.0
    down = f", and {goodput.down_seconds:.0f} s with no process" if goodput.down_seconds > 1 else ""
    yield f"goodput: {goodput.goodput:.1%} of {goodput.wall_seconds:.0f} s{down}"
    if goodput.cost is not None and goodput.price is not None:
        yield (
            f"cost: {goodput.cost:,.4g} {goodput.price.currency} at "
            f"{goodput.price.chip_hour:g} {goodput.price.currency} per chip-hour"
        )
    for category, spent in sorted(goodput.seconds.items(), key=lambda item: -item[1]):
        if spent / wall >= 5e-4:
            yield f"  {category:<14}{spent:9.1f} s  {spent / wall:6.1%}"


def read_events(run_dir: str | Path) -> list[dict[str, Any]]:
    """The events of a run, oldest first: changes of state, and drills.

    Raises:
      ConfigError: for a directory in which nothing was launched.
    """
    files = ClusterFiles(Path(run_dir).expanduser())
    events = read_json_lines(files.events)
    if not events:
        raise ConfigError(
            f"{files.run_dir} has no events: nothing was launched there; name the --run-dir of a "
            "fornax launch"
        )
    return events


def hosts_at_work(events: Sequence[Mapping[str, Any]]) -> int | None:
    """How many hosts train, by a run's events; None while a group forms or ends."""
    states = [event for event in events if "state" in event]
    formed = next((e["hosts"] for e in reversed(states) if "free" in e), None)
    return formed if states[-1]["state"] == "running" and "step" in states[-1] else None


def resize(run_dir: str | Path, hosts: int) -> int:
    """Ask a launched run for another number of hosts; it changes at its next step.

    Args:
      run_dir: the run, which is launched on this machine.
      hosts: how many; of a run with a range of hosts the most.

    Returns:
      How many events there were before.

    Raises:
      ConfigError: for a directory in which nothing was launched.
      ClusterError: when the run has ended, or is one of slices or a server.
    """
    events = read_events(run_dir)
    files = ClusterFiles(Path(run_dir).expanduser())
    latest = [event for event in events if "state" in event][-1]
    if latest["state"] == "ended" or not files.is_held():
        raise ClusterError(
            f"{files.run_dir} has ended; launch it again with --hosts {hosts}: it resumes from "
            "where it was"
        )
    if "replicas" in latest or (files.run_dir / "slice-0").is_dir():
        raise ClusterError(
            f"{files.run_dir} is a server or a run of slices; resize a training run, such as one "
            "slice of it"
        )
    files.ask("hosts", hosts)
    return len(events)


def _late(state: WorkerState, states: list[WorkerState]) -> float:
    """Seconds after the first of those that entered the same step."""
    if state.entered_step < 0:
        return 0.0
    peers = [s.entered_ns for s in states if s.entered_step == state.entered_step]
    return (state.entered_ns - min(peers)) / 1e9
