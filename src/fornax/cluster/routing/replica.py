"""A replica: one process or several, which run a command of Fornax's that serves on 127.0.0.1.

`Handle` is all that a supervisor knows of one, whoever starts it.
"""

import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from fornax.cluster.files import ClusterFiles
from fornax.cluster.process_state import is_stopped
from fornax.config import environment
from fornax.config.errors import ClusterError
from fornax.config.worker_process import WorkerProcess, last_line, receive

__all__ = ["Handle", "LocalReplicas", "ReplicaProcess", "Start", "device_variables", "run"]

_STACK_SECONDS = 0.5
_LOCAL = "127.0.0.1"


class Handle(Protocol):
    """A replica that was started."""

    @property
    def url(self) -> str:
        """Where it answers HTTP, `http://HOST:PORT`."""
        ...

    @property
    def grpc(self) -> str:
        """Where it answers gRPC, `HOST:PORT`, if it does."""
        ...

    @property
    def pids(self) -> list[int]:
        """The numbers of its processes; the first one serves."""
        ...

    def poll(self) -> int | None:
        """The exit code of the first of its processes that ended, minus the number of the signal
        that ended it; None while all run."""
        ...

    def is_stopped(self) -> bool:
        """Whether a signal has stopped one of them."""
        ...

    def terminate(self) -> None:
        """Ask it to finish its requests and end."""
        ...

    def kill(self) -> None:
        """End it and what it began."""
        ...

    def last_line(self) -> str:
        """The last line printed by the process that ended, else by the first."""
        ...

    def stacks(self) -> str:
        """Where its main thread is, innermost call first; empty when it cannot say."""
        ...


Start = Callable[[int], Handle]
"""Starts the replica of a number."""


@dataclass(frozen=True, kw_only=True)
class LocalReplicas:
    """Starts replicas as processes of this machine."""

    program: str
    """`package.module:NAME`, called with a replica's words; it returns an exit code."""
    words: Callable[[int, int], Sequence[str]]
    """A replica's words, of its ports for HTTP and gRPC."""
    files: ClusterFiles
    variables: Sequence[Sequence[Mapping[str, str | None]]]
    """Changes to the environment: of each replica, of each of its processes."""

    def start(self, number: int) -> Handle:
        """Start a replica."""
        http, grpc, coordinator = free_ports(3)
        variables = self.variables[number]
        group: dict[str, str | None] = {}
        if len(variables) > 1:
            group = {
                "FORNAX_COORDINATOR": f"{_LOCAL}:{coordinator}",
                "FORNAX_NUM_PROCESSES": str(len(variables)),
            }
        processes = [
            ReplicaProcess(
                self.program,
                self.words(http, grpc),
                log=self.files.replica_log(number, rank),
                stacks=self.files.replica_stacks(number, rank),
                variables={**each, **group, **({"FORNAX_PROCESS_ID": str(rank)} if group else {})},
            )
            for rank, each in enumerate(variables)
        ]
        return LocalReplica(f"http://{_LOCAL}:{http}", f"{_LOCAL}:{grpc}", processes)


class LocalReplica:
    """The processes of one replica; see `Handle`."""

    def __init__(self, url: str, grpc: str, processes: Sequence["ReplicaProcess"]):
        self.url = url
        self.grpc = grpc
        self._processes = processes

    @property
    def pids(self) -> list[int]:
        """See `Handle`."""
        return [each.pid for each in self._processes]

    def poll(self) -> int | None:
        """See `Handle`."""
        codes = (each.poll() for each in self._processes)
        return next((code for code in codes if code is not None), None)

    def is_stopped(self) -> bool:
        """See `Handle`."""
        return any(is_stopped(each.pid) for each in self._processes)

    def terminate(self) -> None:
        """See `Handle`."""
        self._processes[0].terminate()

    def kill(self) -> None:
        """See `Handle`."""
        for each in self._processes:
            each.kill()

    def last_line(self) -> str:
        """See `Handle`."""
        ended = [each for each in self._processes if each.poll() is not None]
        return (ended or self._processes)[0].last_line()

    def stacks(self) -> str:
        """See `Handle`."""
        return self._processes[0].stacks()


class ReplicaProcess:
    """A process of a replica."""

    def __init__(
        self,
        program: str,
        words: Sequence[str],
        *,
        log: Path,
        stacks: Path,
        variables: Mapping[str, str | None],
    ):
        """Start it.

        Args:
          program: `package.module:NAME`, called with `words` there; it returns an exit code.
          log: file to which what it prints is appended.
          stacks: where it writes its stacks when it is asked.
          variables: changes to the environment.
        """
        self._log, self._stacks = log, stacks
        stacks.unlink(missing_ok=True)
        with log.open("ab") as file:
            self._process = WorkerProcess(
                "fornax.cluster.routing.replica:run", log=file, environment=variables
            )
        self._process.send({"program": program, "words": list(words), "stacks": str(stacks)})

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, minus the signal's number where one ended it; None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to finish its requests and end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it and what it began."""
        self._process.kill()

    def last_line(self) -> str:
        """The last line that it printed."""
        with self._log.open("rb") as file:
            return last_line(file)[:500]

    def stacks(self) -> str:
        """Where its main thread is, innermost call first; empty when it cannot say."""
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
    with Path(job["stacks"]).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        module, _, name = job["program"].partition(":")
        sys.exit(getattr(importlib.import_module(module), name)(job["words"]))


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now.

    Where another process takes one first, the replica ends and is started on others.
    """
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((_LOCAL, 0))
        return [probe.getsockname()[1] for probe in probes]


def device_variables(replicas: int, each: int, hosts: int = 1) -> list[list[dict[str, str | None]]]:
    """What each process of each replica needs in its environment to have GPUs of its own.

    Args:
      each: GPUs of a replica; 0: an equal share of all.
      hosts: processes of a replica, which divide its GPUs evenly.

    Raises:
      ClusterError: when there are too few, or the accelerators are TPUs.
    """
    plain: list[list[dict[str, str | None]]] = [[{} for _ in range(hosts)] for _ in range(replicas)]
    if environment.only_cpu():
        return plain
    for path in ("/dev/accel0", "/dev/vfio/0"):
        if Path(path).exists() and replicas * hosts > 1:
            raise ClusterError(
                f"this machine has TPUs ({path}), of which one process takes all; launch one "
                "replica a host, or set JAX_PLATFORMS=cpu to run them on its cores"
            )
    gpus = environment.visible_gpus()
    if not gpus:
        return plain
    each = each or max(1, len(gpus) // replicas)
    if replicas * each > len(gpus):
        raise ClusterError(
            f"{replicas} replicas of {each} GPUs need {replicas * each}, and this machine has "
            f"{len(gpus)} ({', '.join(gpus)}); launch fewer replicas, divide each over fewer GPUs, "
            "or set JAX_PLATFORMS=cpu to run them on its cores"
        )
    if each % hosts:
        raise ClusterError(
            f"{each} GPUs of a replica cannot be divided over {hosts} processes; give a "
            "--tensor-parallel-size that --hosts divides"
        )
    part = each // hosts
    shares = [gpus[first * part : (first + 1) * part] for first in range(replicas * hosts)]
    found: list[dict[str, str | None]] = [
        {"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares
    ]
    return [found[number * hosts : (number + 1) * hosts] for number in range(replicas)]
