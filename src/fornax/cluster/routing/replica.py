"""A replica: one process or several, which run a command of Fornax's that serves.

`Handle` is all that a supervisor knows of one, `Placer` what starts it: `LocalReplicas` here,
and Ray (`ray_replicas.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fornax.cluster.files import ClusterFiles
from fornax.cluster.replica_process import Ended, ReplicaProcess, free_ports
from fornax.config.credentials import Credentials

__all__ = [
    "Handle",
    "LocalReplicas",
    "Placer",
    "ProcessGroup",
    "Program",
    "group_variables",
]

_STACK_SECONDS = 0.5
_LOCAL = "127.0.0.1"


class Process(Protocol):
    """A process of a replica, wherever it runs."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def ended(self) -> Ended | None:
        """How it ended; None while it runs."""
        ...

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        ...

    def terminate(self) -> None:
        """Ask it to finish its requests and end."""
        ...

    def kill(self) -> None:
        """End it and what it began."""
        ...

    def last_line(self) -> str:
        """The last line that it printed."""
        ...

    def stacks(self) -> str:
        """Where its main thread is, innermost call first; empty when it cannot say."""
        ...


class Handle(Protocol):
    """A replica that was started."""

    @property
    def url(self) -> str:
        """Where it answers HTTP: `http://HOST:PORT`, of TLS `https`."""
        ...

    @property
    def grpc(self) -> str:
        """Where it answers gRPC, `HOST:PORT`, if it does."""
        ...

    @property
    def pids(self) -> list[int]:
        """The numbers of its processes; the first one serves."""
        ...

    def ended(self) -> Ended | None:
        """How the first of its processes that ended did; None while all run."""
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


class Placer(Protocol):
    """Starts the replicas of a router, now and again."""

    @property
    def count(self) -> int:
        """How many."""
        ...

    @property
    def hosts(self) -> int:
        """Processes of each."""
        ...

    def start(self, number: int) -> Handle:
        """Start a replica; it may take a while.

        Raises:
          ClusterError: when there is no place for it.
        """
        ...

    def give_up(self) -> None:
        """Have starts that still wait for a place fail; there are no more."""
        ...


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the processes of replicas run."""

    entry: str
    """`package.module:NAME`, called with a replica's words; it returns an exit code."""
    words: Callable[[str, int, int], Sequence[str]]
    """A replica's words, of the address that it listens on and its ports for HTTP and gRPC."""
    files: ClusterFiles
    credentials: Credentials
    """What the router and the processes of a replica know each other by."""


def group_variables(hosts: int, rank: int, coordinator: str) -> dict[str, str]:
    """What a process of a replica needs to find the others; nothing where it is the only one."""
    if hosts == 1:
        return {}
    return {
        "FORNAX_COORDINATOR": coordinator,
        "FORNAX_NUM_PROCESSES": str(hosts),
        "FORNAX_PROCESS_ID": str(rank),
    }


@dataclass(frozen=True, kw_only=True)
class LocalReplicas:
    """Starts replicas as processes of this machine; see `Placer`."""

    program: Program
    variables: Sequence[Sequence[Mapping[str, str | None]]]
    """Changes to the environment: of each replica, of each of its processes."""

    @property
    def count(self) -> int:
        """See `Placer`."""
        return len(self.variables)

    @property
    def hosts(self) -> int:
        """See `Placer`."""
        return len(self.variables[0])

    def start(self, number: int) -> Handle:
        """See `Placer`."""
        http, grpc, coordinator = free_ports(_LOCAL, 3)
        program, files = self.program, self.program.files
        processes = [
            ReplicaProcess(
                program.entry,
                program.words(_LOCAL, http, grpc),
                credentials=program.credentials,
                log=files.replica_log(number, rank),
                stacks=files.replica_stacks(number, rank),
                variables={**each, **group_variables(self.hosts, rank, f"{_LOCAL}:{coordinator}")},
            )
            for rank, each in enumerate(self.variables[number])
        ]
        return ProcessGroup(_LOCAL, http, grpc, processes, secure=bool(program.credentials.key))

    def give_up(self) -> None:
        """See `Placer`: here nothing waits."""


class ProcessGroup:
    """The processes of one replica; see `Handle`."""

    def __init__(
        self, host: str, http: int, grpc: int, processes: Sequence[Process], *, secure: bool
    ):
        """The first process listens on these ports of `host`, with TLS where it is `secure`."""
        self.url = f"http{'s' if secure else ''}://{host}:{http}"
        self.grpc = f"{host}:{grpc}"
        self._processes = processes

    @property
    def pids(self) -> list[int]:
        """See `Handle`."""
        return [each.pid for each in self._processes]

    def ended(self) -> Ended | None:
        """See `Handle`."""
        found = (each.ended() for each in self._processes)
        return next((each for each in found if each is not None), None)

    def is_stopped(self) -> bool:
        """See `Handle`."""
        return any(each.is_stopped() for each in self._processes)

    def terminate(self) -> None:
        """See `Handle`."""
        self._processes[0].terminate()

    def kill(self) -> None:
        """See `Handle`."""
        for each in self._processes:
            each.kill()

    def last_line(self) -> str:
        """See `Handle`."""
        ended = [each for each in self._processes if each.ended() is not None]
        return (ended or self._processes)[0].last_line()

    def stacks(self) -> str:
        """See `Handle`."""
        return self._processes[0].stacks()
