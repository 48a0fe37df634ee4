"""Faults injected on purpose, to see that a run recovers from them: real signals, no pretending."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from fornax.cluster.files import ClusterFiles, RoleName
from fornax.config import worker_record
from fornax.config.errors import ClusterError
from fornax.config.jsonl import append_json_line, read_json_lines

__all__ = ["SIGNALS", "Fault", "drill", "drill_beside", "note"]

Fault = Literal["kill", "stop", "lose", "preempt", "partition", "slow", "controller"]

_STOPPED_SECONDS = 0.3
_RUNNING_SECONDS = 0.1
_SLOW_SECONDS = 180.0
_RELAY_SECONDS = 30.0

SIGNALS: Mapping[Fault, signal.Signals] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "lose": signal.SIGKILL,
    "preempt": signal.SIGTERM,
    "partition": signal.SIGSTOP,
    "controller": signal.SIGKILL,
}


def drill(run_dir: str | Path, fault: Fault, rank: int | None = None) -> int:
    """Do something bad to a rank of a launched run on this machine, or to its controller; a line of
    events.jsonl says so.

    Args:
      run_dir: the run.
      fault: `kill` (SIGKILL) or `stop` (SIGSTOP) the worker; `lose` its host, with all that is
        in its memory (SIGKILL to the agent, which the worker does not outlive), or `preempt` it
        (SIGTERM to the agent); cut it off by a `partition` (SIGSTOP to a relay, through which the
        controller reaches it from then on); or make the worker `slow`: stopped for three quarters
        of the time, until the run has named it or it is gone. `controller` (SIGKILL) takes that,
        and with it the agents and workers of all ranks.
      rank: whose; None for the controller.

    Returns:
      The process that got the signal.

    Raises:
      ClusterError: when the run has no such worker or controller now, is to be partitioned and
        its hosts are Ray's, or does not name a worker that is slow.
    """
    files = ClusterFiles(Path(run_dir).expanduser())
    if fault == "controller" or rank is None:
        return _kill_controller(files)
    state = _running(files, files.records(), rank, "rank")
    pid = _target(files, state, fault)
    note(files, {"epoch": state.epoch, "drill": fault, "rank": rank, "step": state.step})
    if fault == "slow":
        _slow_down(files, rank, pid)
    else:
        os.kill(pid, SIGNALS[fault])
    return pid


def _kill_controller(files: ClusterFiles) -> int:
    pid = files.controller_pid()
    if pid is None:
        raise ClusterError(
            f"{files.run_dir} has no controller in a process of its own: it is not launched now, "
            "or from Python, where the controller is a thread of the process that has the Cluster"
        )
    states = (worker_record.read(path) for path in files.records().values())
    known = [state for state in states if state is not None]
    step = min((state.step for state in known), default=-1)
    epoch = max((state.epoch for state in known), default=0)
    note(files, {"epoch": epoch, "drill": "controller", "step": step})
    os.kill(pid, SIGNALS["controller"])
    return pid


def _target(files: ClusterFiles, state: worker_record.WorkerState, fault: Fault) -> int:
    """The process that a drill is done to: the worker, its agent, or a relay to the agent."""
    if fault in ("lose", "preempt"):
        return _parent(state.pid)
    return _relay(files, state) if fault == "partition" else state.pid


def _relay(files: ClusterFiles, state: worker_record.WorkerState) -> int:
    """Have the controller put a relay before the agent of a rank."""
    files.ask("relay", state.rank)
    deadline = time.monotonic() + _RELAY_SECONDS
    while time.monotonic() < deadline:
        for event in reversed(read_json_lines(files.events)):
            if event["epoch"] == state.epoch and event.get("relay") == state.rank:
                return event["pid"]
        time.sleep(_RUNNING_SECONDS)
    raise ClusterError(
        f"no relay was put before the host of rank {state.rank}: it is not a process that the "
        "launch started on this machine; a partition is for --engine local"
    )


def drill_beside(
    run_dir: str | Path,
    fault: Fault,
    role: RoleName,
    number: int,
) -> int:
    """Kill or stop a process beside the hosts, a sampler or a data worker; see `drill`.

    Raises:
      ClusterError: for another fault, or when the run has no such process now.
    """
    if fault not in ("kill", "stop"):
        raise ClusterError(f"a {role} has no drill {fault}; kill or stop it")
    files = ClusterFiles(Path(run_dir).expanduser())
    title = "sampler" if role == "sampler" else "data worker"
    state = _running(files, files.beside_records(role), number, title)
    note(files, {"epoch": 0, "drill": fault, role: number, "done": state.step})
    os.kill(state.pid, SIGNALS[fault])
    return state.pid


def _running(
    files: ClusterFiles, records: Mapping[int, Path], number: int, what: str
) -> worker_record.WorkerState:
    state = worker_record.read(records[number]) if number in records else None
    if state is None or not worker_record.is_written_by(state.pid, records[number]):
        there = ", ".join(map(str, sorted(records))) or "none"
        raise ClusterError(
            f"{files.run_dir} has no running worker of {what} {number} on this machine; its "
            f"{what}s are: {there}. fornax launch status {files.run_dir} shows what they do"
        )
    return state


def _slow_down(files: ClusterFiles, rank: int, pid: int) -> None:
    before = len(read_json_lines(files.events))
    deadline = time.monotonic() + _SLOW_SECONDS
    while time.monotonic() < deadline:
        state = worker_record.read(files.record(rank))
        named = any(e.get("slow") == rank for e in read_json_lines(files.events)[before:])
        if named or state is None or state.pid != pid:
            return
        with contextlib.suppress(ProcessLookupError):
            try:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(_STOPPED_SECONDS)
            finally:
                os.kill(pid, signal.SIGCONT)
        time.sleep(_RUNNING_SECONDS)
    raise ClusterError(
        f"rank {rank} was stopped for three quarters of {_SLOW_SECONDS:g} s and the run did not "
        f"name it as slow; a run of one host has no other host to compare with: see {files.events}"
    )


def note(files: ClusterFiles, drill: Mapping[str, object]) -> None:
    """Append a drill to the events of a run."""
    append_json_line(files.events, drill)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
