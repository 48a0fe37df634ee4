"""A process beside the hosts of a run, on this machine: watched, and replaced when it is lost.

It has a socket that this process opened and keeps: the one that takes its place listens at the same
address, and connections that came meanwhile wait for it.
"""

import contextlib
import importlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fornax.cluster.files import ClusterFiles, RoleName
from fornax.cluster.process_state import ProcessState
from fornax.config import worker_record
from fornax.config.credentials import Credentials
from fornax.config.worker_process import WorkerProcess, ending, last_line, receive

__all__ = ["DATA_WORKER", "SAMPLER", "BesideJob", "BesideProcess", "Event", "Role", "run_program"]

Event = dict[str, Any]
"""What becomes of a process: `why`, and what else is said of it in events.jsonl. With `state`
"ended" the run gets no further, and `why` says what to do."""

_STARTS = 4
_STOPPED_SECONDS = 1.0
_SHORTEST_LIFE = 5.0
_LONGEST_PAUSE = 60.0
_USER_ERROR = 2


@dataclass(frozen=True, kw_only=True)
class Role:
    """What processes of a kind have in common."""

    name: RoleName
    """In events, drills and the names of files."""
    title: str
    """In sentences."""
    entry: str
    """`package.module:NAME` of a worker process. It is sent `listener`, the descriptor of its
    listening socket, `credentials`, which connections must show, and the job's order."""
    addresses: str
    """The variable in which the run's workers find where each is."""
    at_work: str | None = None
    """Phase of the record without which the run gets no further: the run ends when one fails again
    and again before it. None: the run continues without these processes."""
    computes: bool = False
    """Whether it takes the accelerators of a host."""


SAMPLER = Role(
    name="sampler",
    title="sampler",
    entry="fornax.cluster.beside_process:run_program",
    addresses="FORNAX_SAMPLERS",
    at_work="generate",
    computes=True,
)
DATA_WORKER = Role(
    name="data",
    title="data worker",
    entry="fornax.data.worker:run",
    addresses="FORNAX_DATA_WORKERS",
)


@dataclass(frozen=True, kw_only=True)
class BesideJob:
    """What one of the processes is for."""

    run_dir: Path
    """Absolute."""
    role: Role
    number: int
    credentials: Credentials
    order: Mapping[str, object]
    """What it is sent besides its socket and credentials."""
    stall: float
    """Seconds without a heartbeat after which it counts as hanging."""


class BesideProcess:
    """One of the processes, and those that take its place."""

    def __init__(
        self,
        job: BesideJob,
        *,
        host: str = "127.0.0.1",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Open the socket, and start the process.

        Args:
          job: what it is for.
          host: the address of this machine that it listens at.
          variables: changes to the environment.
        """
        self._job, self._variables = job, variables
        self._files = ClusterFiles(job.run_dir)
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """host:port."""
        self._starts = 0  # since one was last at work
        self._pause = 0.0
        self._process: WorkerProcess | None = None
        self._process_state: ProcessState | None = None
        self._start()

    def check(self) -> list[Event]:
        """Replace it when it has ended or hangs; when that was soon after its start, after a pause.

        Many times a second.
        """
        now = time.monotonic()
        if self._process is None:
            if now - self._started > self._pause:
                self._start()
            return []
        state = worker_record.read(self._record)
        if state is not None and state.pid != self._process.pid:
            state = None  # it has not begun to say what it does
        if state is not None and state.phase == self._job.role.at_work:
            self._starts = 1
        code = self._process.poll()
        if code is not None:
            why = f"ended with {ending(code)}"
        elif why := self._hangs(state):
            code = self._process.kill()
        else:
            return []
        soon = now - self._started < _SHORTEST_LIFE
        self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE) if soon else 0.0
        self._process = None
        self._stop_looking()
        return [self._given_up(code, why)]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
        self._stop_looking()
        self._record.unlink(missing_ok=True)
        self._listener.close()

    @property
    def _record(self) -> Path:
        return self._files.beside_record(self._job.role.name, self._job.number)

    def _given_up(self, code: int, why: str) -> Event:
        """That a process is gone, or that the run ends with it."""
        role, number = self._job.role, self._job.number
        log = self._files.beside_log(role.name, number)
        hopeless = code == _USER_ERROR or self._starts >= _STARTS
        if role.at_work is None or not hopeless:
            return {"why": f"{role.title} {number} {why}; another takes its place"}
        with log.open("rb") as lines:
            said = last_line(lines)
        text = (
            f"{role.title} {number} {why} before it did anything; its last line: {said}. Look at "
            f"{log}, fix it, and run the same command again"
        )
        return {"why": text, "state": "ended", "code": 1}

    def _start(self) -> None:
        job = self._job
        worker_record.create(self._record, rank=job.number, hosts=1, epoch=0)
        with self._files.beside_log(job.role.name, job.number).open("ab") as log:
            self._process = WorkerProcess(
                job.role.entry,
                log=log,
                environment={**self._variables, "FORNAX_WORKER_RECORD": str(self._record)},
                inherit=[self._listener.fileno()],
            )
        self._process_state = ProcessState(self._process.pid)
        listener = self._listener.fileno()
        shown = job.credentials.fields()
        self._process.send({"listener": listener, "credentials": shown, **job.order})
        self._started = time.monotonic()
        self._starts += 1

    def _hangs(self, record: worker_record.WorkerState | None) -> str:
        """What is wrong with a process that lives; empty where nothing is."""
        assert self._process_state is not None
        self._process_state.look(record)
        if self._process_state.stopped:
            long = self._process_state.stopped > _STOPPED_SECONDS
            return "is stopped (SIGSTOP)" if long else ""
        if record is None:
            return ""
        silent = (time.monotonic_ns() - record.beat_ns) / 1e9 - self._process_state.starved
        return f"gives no sign of life for {silent:.1f} s" if silent > self._job.stall else ""

    def _stop_looking(self) -> None:
        if self._process_state is not None:
            self._process_state.close()
        self._process_state = None


def run_program(parent: Connection) -> None:
    """A process that runs `program`, `package.module:NAME`, with `words`, the launched command.

    It is called with the words, the listening socket's descriptor and the run's credentials, and
    returns an exit code.
    """
    order = receive(parent)
    module, _, name = order["program"].partition(":")
    program = getattr(importlib.import_module(module), name)
    code = program(order["words"], order["listener"], Credentials(**order["credentials"]))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # threads that read connections must not hold it up
