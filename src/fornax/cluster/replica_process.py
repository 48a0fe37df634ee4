"""A process of a replica on this machine, and the actor of Ray's that holds one on a node.

What it imports is little: an actor is there before the command is.
"""

import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from fornax.cluster.process_state import is_stopped
from fornax.cluster.ray_nodes import own_address, own_node
from fornax.config.credentials import Credentials, set_of_run
from fornax.config.worker_process import WorkerProcess, ending, last_line, receive

__all__ = ["Ended", "Place", "ReplicaHost", "ReplicaProcess", "free_ports", "run"]

_STACK_SECONDS = 0.5
_LOOK_SECONDS = 0.05
_REPORT_SECONDS = 1.0


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int | None
    """Its exit code, minus the number of the signal that ended it; None: nobody knows."""
    how: str
    """In words: `was ended by SIGKILL`."""

    @classmethod
    def of(cls, code: int) -> "Ended":
        """From an exit code."""
        return cls(code, f"{'was ended by' if code < 0 else 'ended with'} {ending(code)}")


class ReplicaProcess:
    """A process of a replica, on this machine; see `routing.replica.Process`."""

    def __init__(
        self,
        program: str,
        words: Sequence[str],
        *,
        credentials: Credentials,
        log: Path,
        stacks: Path,
        variables: Mapping[str, str | None],
    ):
        """Start it.

        Args:
          program: `package.module:NAME`, called with `words` there; it returns an exit code.
          credentials: what a caller must show.
          log: file to which what it prints is appended.
          stacks: where it writes its stacks when it is asked.
          variables: changes to the environment.
        """
        self._log, self._stacks = log, stacks
        stacks.unlink(missing_ok=True)
        with log.open("ab") as file:
            self._process = WorkerProcess(
                "fornax.cluster.replica_process:run", log=file, environment=variables
            )
        self._process.send(
            {
                "program": program,
                "words": list(words),
                "credentials": credentials.fields(),
                "stacks": str(stacks),
            }
        )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def ended(self) -> Ended | None:
        """See `Process`."""
        code = self._process.poll()
        return None if code is None else Ended.of(code)

    def is_stopped(self) -> bool:
        """See `Process`."""
        return is_stopped(self.pid)

    def terminate(self) -> None:
        """See `Process`."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """See `Process`."""
        self._process.kill()

    def last_line(self) -> str:
        """See `Process`."""
        with self._log.open("rb") as file:
            return last_line(file)[:500]

    def stacks(self) -> str:
        """See `Process`."""
        if not self._stacks.exists():  # it has no handler yet: the signal would end it
            return ""
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        text = self._stacks.read_text(encoding="utf-8", errors="replace")
        calls = text.rpartition("(most recent call first):")[2].strip().splitlines()
        return " < ".join(line.strip() for line in calls[:3])


def run(parent: Connection) -> None:
    """The replica's process: SIGUSR1 writes the stacks of all threads to the file named."""
    job = receive(parent)
    set_of_run(Credentials(**job["credentials"]))
    with Path(job["stacks"]).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        module, _, name = job["program"].partition(":")
        sys.exit(getattr(importlib.import_module(module), name)(job["words"]))


def free_ports(host: str, count: int) -> list[int]:
    """Ports of an address of this machine that nobody listens on now.

    Where another process takes one first, the replica ends and is started on others.
    """
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]


@dataclass(frozen=True)
class Place:
    """Where an actor is."""

    pid: int
    node: str
    address: str


class ReplicaHost:
    """The actor of a process."""

    def __init__(self, folder: str, variables: dict[str, str]) -> None:
        if Path(folder).is_dir():  # relative paths mean what they do where the command was given
            os.chdir(folder)
        self._variables = variables
        self._process: ReplicaProcess | None = None
        self._told: tuple[bool, int | None, str] = (False, None, "")

    def place(self) -> Place:
        """Where it is."""
        return Place(os.getpid(), own_node(), own_address())

    def ports(self, host: str, count: int) -> list[int]:
        """See `free_ports`."""
        return free_ports(host, count)

    def begin(
        self,
        entry: str,
        words: list[str],
        *,
        credentials: dict[str, str],
        log: str,
        stacks: str,
        variables: dict[str, str],
    ) -> int:
        """Start the process; its number."""
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        self._process = ReplicaProcess(
            entry,
            words,
            credentials=Credentials(**credentials),
            log=Path(log),
            stacks=Path(stacks),
            variables={**self._variables, **variables},
        )
        return self._process.pid

    def terminate(self) -> None:
        """See `ReplicaProcess`."""
        assert self._process is not None
        self._process.terminate()

    def stacks(self) -> str:
        """See `ReplicaProcess`."""
        return "" if self._process is None else self._process.stacks()

    def watch(self) -> tuple[bool, int | None, str]:
        """Whether it is stopped, its exit code, its last line; once that changes, or a second."""
        until = time.monotonic() + _REPORT_SECONDS
        while (found := self._look()) == self._told and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        self._told = found
        return found

    def _look(self) -> tuple[bool, int | None, str]:
        assert self._process is not None
        ended = self._process.ended()
        if ended is None:
            return self._process.is_stopped(), None, ""
        return False, ended.code, self._process.last_line()
