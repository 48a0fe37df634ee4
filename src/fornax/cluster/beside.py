"""Processes beside the hosts of a run, samplers and data workers: watched, and replaced when lost.

Each has a socket that this process opened and keeps: one that takes another's place listens at the
same address, and connections that came meanwhile wait for it.
"""

import contextlib
import importlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from fornax.cluster.files import ClusterFiles, RoleName
from fornax.cluster.process_state import is_stopped
from fornax.config import worker_record
from fornax.config.errors import ClusterError
from fornax.config.jsonl import append_json_line
from fornax.config.worker_process import WorkerProcess, ending, last_line, receive

__all__ = ["DATA_WORKER", "SAMPLER", "Beside", "Role", "run_program"]

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
    listening socket, `token`, which connections must show, and what `Beside` was given for it."""
    addresses: str
    """The variable in which the run's workers find `host:port` of each, with commas between."""
    token: str
    """The variable in which they find the token."""
    at_work: str | None = None
    """Phase of the record without which the run gets no further: the run ends when one fails again
    and again before it. None: the run goes on without these processes."""


SAMPLER = Role(
    name="sampler",
    title="sampler",
    entry="fornax.cluster.beside:run_program",
    addresses="FORNAX_SAMPLERS",
    token="FORNAX_SAMPLERS_TOKEN",
    at_work="generate",
)
DATA_WORKER = Role(
    name="data",
    title="data worker",
    entry="fornax.data.worker:run",
    addresses="FORNAX_DATA_WORKERS",
    token="FORNAX_DATA_TOKEN",
)


@dataclass
class _Place:
    """One of the processes, and those that had its place before."""

    listener: socket.socket
    process: WorkerProcess | None = None
    starts: int = 0
    """Since one was last at work."""
    started: float = 0.0
    pause: float = 0.0
    stopped: float | None = None


@dataclass(kw_only=True)
class Beside:
    """The processes of one role."""

    files: ClusterFiles
    role: Role
    count: int
    order: Mapping[str, object] = field(default_factory=dict)
    """What each is sent besides its socket and token."""
    announce: Callable[[str], None]
    """Shows a line."""
    stall: float
    """Seconds without a heartbeat after which one counts as hanging."""

    def __post_init__(self) -> None:
        """Open the sockets, and start the processes."""
        self._token = secrets.token_hex(16)
        self._places = [_Place(socket.create_server(("127.0.0.1", 0))) for _ in range(self.count)]
        ports = [place.listener.getsockname()[1] for place in self._places]
        self.environment: Mapping[str, str] = {
            self.role.addresses: ",".join(f"127.0.0.1:{port}" for port in ports),
            self.role.token: self._token,
        }
        """What workers must find in theirs."""
        for number in range(self.count):
            self._start(number)

    def check(self) -> None:
        """Replace those that have ended or hang; one that ended soon again, after a pause.

        Raises:
          ClusterError: when one that the run needs ends by a user's error, or again and again.
        """
        now = time.monotonic()
        for number, place in enumerate(self._places):
            if place.process is None:
                if now - place.started > place.pause:
                    self._start(number)
                continue
            state = worker_record.read(self.files.beside_record(self.role.name, number))
            if state is not None and state.pid != place.process.pid:
                state = None  # it has not begun to say what it does
            if state is not None and state.phase == self.role.at_work:
                place.starts = 1
            code = place.process.poll()
            if code is not None:
                why = f"ended with {ending(code)}"
            elif why := _hangs(place, state, self.stall):
                code = place.process.kill()
            else:
                continue
            self._give_up(number, code, why)
            soon = now - place.started < _SHORTEST_LIFE
            place.pause = min(2 * place.pause + 1, _LONGEST_PAUSE) if soon else 0.0
            place.process, place.stopped = None, None

    def close(self) -> None:
        """End the processes."""
        for number, place in enumerate(self._places):
            if place.process is not None:
                place.process.kill()
            self.files.beside_record(self.role.name, number).unlink(missing_ok=True)
            place.listener.close()

    def _give_up(self, number: int, code: int, why: str) -> None:
        """Say that a process is no more; that the run ends with it, where it does."""
        title, log = self.role.title, self.files.beside_log(self.role.name, number)
        hopeless = code == _USER_ERROR or self._places[number].starts >= _STARTS
        if self.role.at_work is None or not hopeless:
            self._event(number, f"{title} {number} {why}; another takes its place")
            return
        with log.open("rb") as lines:
            said = last_line(lines)
        text = (
            f"{title} {number} {why} before it did anything; its last line: {said}. Look at {log}, "
            "mend it, and run the same command again"
        )
        self._event(number, text, state="ended", code=1)
        raise ClusterError(text)

    def _start(self, number: int) -> None:
        place, record = self._places[number], self.files.beside_record(self.role.name, number)
        worker_record.create(record, rank=number, hosts=self.count, epoch=0)
        with self.files.beside_log(self.role.name, number).open("ab") as log:
            place.process = WorkerProcess(
                self.role.entry,
                log=log,
                environment={"FORNAX_WORKER_RECORD": str(record.absolute())},
                inherit=[place.listener.fileno()],
            )
        listener = place.listener.fileno()
        place.process.send({"listener": listener, "token": self._token, **self.order})
        place.started = time.monotonic()
        place.starts += 1

    def _event(self, number: int, why: str, **facts: object) -> None:
        append_json_line(
            self.files.events, {"epoch": 0, self.role.name: number, "why": why, **facts}
        )
        self.announce(why)


def _hangs(place: _Place, state: worker_record.WorkerState | None, stall: float) -> str:
    """What is wrong with a process that lives; empty where nothing is."""
    assert place.process is not None
    now = time.monotonic()
    if is_stopped(place.process.pid):
        place.stopped = place.stopped or now
        return "is stopped (SIGSTOP)" if now - place.stopped > _STOPPED_SECONDS else ""
    place.stopped = None
    silent = 0.0 if state is None else (time.monotonic_ns() - state.beat_ns) / 1e9
    return f"gives no sign of life for {silent:.1f} s" if silent > stall else ""


def run_program(parent: Connection) -> None:
    """A process that runs `program`, `package.module:NAME`, with `words`, the launched command.

    It is called with the words, the listening socket's descriptor and the token, and returns an
    exit code.
    """
    order = receive(parent)
    module, _, name = order["program"].partition(":")
    program = getattr(importlib.import_module(module), name)
    code = program(order["words"], order["listener"], order["token"])
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # threads that read connections must not hold it up
