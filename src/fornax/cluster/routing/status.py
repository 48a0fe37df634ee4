"""A launched server from another terminal: how it fares, drills, rolling restarts."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fornax.cluster.drill import SIGNALS, Fault, note
from fornax.cluster.files import ClusterFiles
from fornax.cluster.status import read_events
from fornax.config.errors import ClusterError

__all__ = [
    "ReplicaStatus",
    "ServingStatus",
    "drill_replica",
    "read_serving_status",
    "request_rolling_restart",
]


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """A replica."""

    replica: int
    pid: int
    phase: str
    address: str
    """`HOST:PORT`."""
    since: float
    """Wall time of its latest event, seconds since 1970."""
    starts: int
    """How often it was started in this launch."""


@dataclass(frozen=True, kw_only=True)
class ServingStatus:
    """A launched server."""

    run_dir: Path
    url: str
    """Where the router listens."""
    grpc: str | None
    """Where it speaks gRPC, `grpc://HOST:PORT`; None: nowhere."""
    pid: int
    """Its process."""
    in_process: bool
    """Whether that is a Python program which holds a `Cluster`."""
    alive: bool
    state: str
    why: str
    replicas: tuple[ReplicaStatus, ...]

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        state = self.state if self.alive or self.state == "ended" else "gone"
        where = self.url if self.grpc is None else f"{self.url} and {self.grpc}"
        yield f"{self.run_dir}: {where} (process {self.pid}), {state}: {self.why}"
        if self.alive:
            yield "replica     pid  address               phase         since  starts"
        for r in self.replicas if self.alive else ():
            since = time.time() - r.since
            yield (
                f"{r.replica:7}  {r.pid:6}  {r.address:<20}  {r.phase:<9} {since:7.0f} s  "
                f"{r.starts:6}"
            )


def read_serving_status(run_dir: str | Path) -> ServingStatus:
    """The latest launch in a directory.

    Raises:
      ConfigError: for a directory in which nothing was launched.
    """
    files = ClusterFiles(Path(run_dir).expanduser())
    first, *rest = events = _latest_launch(run_dir)
    replicas: dict[int, ReplicaStatus] = {}
    for event in rest:
        if "phase" not in event:
            continue
        number = event["replica"]
        before = replicas.get(number)
        replicas[number] = ReplicaStatus(
            replica=number,
            pid=event["pid"],
            phase=event["phase"],
            address=event["address"] if "address" in event or not before else before.address,
            since=event["time"],
            starts=(before.starts if before else 0) + ("address" in event),
        )
    latest = [event for event in events if "state" in event][-1]
    return ServingStatus(
        run_dir=files.run_dir,
        url=first["url"],
        grpc=first.get("grpc"),
        pid=first["pid"],
        in_process=first.get("in_process", False),
        alive=latest["state"] != "ended" and files.is_held(),
        state=latest["state"],
        why=latest["why"],
        replicas=tuple(replicas[number] for number in sorted(replicas)),
    )


def drill_replica(run_dir: str | Path, fault: Fault, number: int) -> int:
    """Kill (SIGKILL) or stop (SIGSTOP) a replica of a launched server on this machine.

    Returns:
      The process that got the signal.

    Raises:
      ClusterError: when there is no such replica now.
    """
    status = read_serving_status(run_dir)
    files = ClusterFiles(status.run_dir)
    there = {
        each.replica: each.pid
        for each in status.replicas
        if _prints_into(each.pid, files.replica_log(each.replica))
    }
    if number not in there:
        names = ", ".join(map(str, there)) or "none"
        raise ClusterError(
            f"{status.run_dir} has no running replica {number} on this machine; its replicas are: "
            f"{names}. fornax launch status {status.run_dir} shows them"
        )
    epoch = read_events(run_dir)[-1]["epoch"]
    note(files, {"epoch": epoch, "drill": fault, "replica": number})
    os.kill(there[number], SIGNALS[fault])
    return there[number]


def request_rolling_restart(run_dir: str | Path) -> int:
    """Ask the router of a launched server for a rolling restart.

    Returns:
      How many events there were before.

    Raises:
      ClusterError: when no router runs there.
    """
    status = read_serving_status(run_dir)
    if status.alive and status.in_process:
        raise ClusterError(
            f"{status.run_dir} is served by Cluster.serve in process {status.pid}, which takes no "
            "signal for it; call rolling_restart() there"
        )
    if not status.alive:
        raise ClusterError(
            f"{status.run_dir} has no running router; start one with fornax launch --replicas N -- "
            "serve DIR"
        )
    before = len(read_events(run_dir))
    os.kill(status.pid, signal.SIGUSR1)
    return before


def _latest_launch(run_dir: str | Path) -> list[dict[str, Any]]:
    events = read_events(run_dir)
    epoch = max(event["epoch"] for event in events)
    return [event for event in events if event["epoch"] == epoch]


def _prints_into(pid: int, log: Path) -> bool:
    """Whether a process runs here and prints into a log, and so is not another process that reuses
    its number."""
    try:
        return Path(f"/proc/{pid}/fd/1").samefile(log)
    except OSError:  # it is gone, or only its parent does not know it yet
        return False
