"""Engines and launchers: what runs agents and functions on hosts; here, as local processes."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

from fornax.cluster.beside_process import BesideJob, BesideProcess, Event
from fornax.cluster.calls import LocalCalls
from fornax.cluster.devices import host_variables
from fornax.cluster.files import ClusterFiles
from fornax.config.credentials import Credentials
from fornax.config.errors import ClusterError
from fornax.config.worker_process import WorkerProcess

__all__ = [
    "AgentProcess",
    "BesidePlace",
    "Engine",
    "Launcher",
    "LocalEngine",
    "LocalLauncher",
]

T = TypeVar("T")
R = TypeVar("R")


class AgentProcess(Protocol):
    """An agent's process, as the controller holds it."""

    @property
    def connection(self) -> Connection:
        """Readable when there is a message, or the agent is gone."""
        ...

    def send(self, message: object) -> None:
        """Send JSON; that the agent is no more is noticed by `receive`."""
        ...

    def receive(self, seconds: float | None = None) -> object:
        """The next message; EOFError where there will be none."""
        ...

    def kill(self) -> int:
        """End the agent and its workers."""
        ...


class BesidePlace(Protocol):
    """A process beside the hosts, and those that take its place."""

    @property
    def address(self) -> str:
        """host:port at which it listens now."""
        ...

    def check(self) -> list[Event]:
        """Have it replaced when it has ended or hangs; what became of it. Many times a second."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Launcher(Protocol):
    """Places agents, and processes beside them."""

    @property
    def address(self) -> str:
        """Where the hosts reach this machine: loopback where they are on it."""
        ...

    @property
    def credentials(self) -> Credentials:
        """What the processes of the run know each other by."""
        ...

    def capacity(self) -> int:
        """How many hosts could have an agent now, those included that have one."""
        ...

    def start(self, ranks: Sequence[int]) -> Mapping[int, AgentProcess]:
        """Start the agents of some ranks, each on a host without one.

        Raises:
          ClusterError: when one cannot be started; then none is.
        """
        ...

    def start_beside(self, job: BesideJob) -> BesidePlace:
        """Start a sampler or data worker.

        Raises:
          ClusterError: when there is no place for it.
        """
        ...


class Engine(Protocol):
    """Hosts, whatever they are, on which runs are launched and functions called."""

    def launcher(self, files: ClusterFiles, *, spare: bool) -> Launcher:
        """Places the agents of a run.

        Args:
          files: of the run.
          spare: whether each agent keeps a process for the next assignment.
        """
        ...

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """The function of each item, in the items' order, one item per host at a time.

        Raises:
          ClusterError: when the function raises, with its traceback, ends its process, or cannot
            be sent.
        """
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class LocalEngine(LocalCalls):
    """Every host is a process of this machine, on its cores or with a share of its GPUs."""

    def __init__(self, hosts: int) -> None:
        """Start nothing yet.

        Args:
          hosts: how many.

        Raises:
          ClusterError: see `host_variables`.
        """
        self._variables = host_variables(hosts)
        super().__init__(hosts, self._variables)

    def launcher(self, files: ClusterFiles, *, spare: bool) -> "LocalLauncher":
        """See `Engine`."""
        return LocalLauncher(files=files, spare=spare, variables=self._variables)


@dataclass(frozen=True, kw_only=True)
class LocalLauncher:
    """Every host is a process of this machine.

    Agent and controller talk over an inherited socket pair: nothing listens, so no other process
    can speak to them. The kernel ends an agent with its controller, and workers with their agent.
    """

    files: ClusterFiles
    spare: bool
    """Whether each agent keeps a process for the next assignment."""
    imports: tuple[str, ...] = ("fornax.train",)
    """Modules that such a process has imported."""
    variables: Sequence[Mapping[str, str | None]] = ()
    """Changes to the environment of each host, by rank; none: any number of hosts is there."""
    address: str = "127.0.0.1"
    credentials: Credentials = field(default_factory=Credentials.make)

    def capacity(self) -> int:
        """As many as are asked for, or as accelerators were divided over."""
        return len(self.variables) or sys.maxsize

    def start(self, ranks: Sequence[int]) -> dict[int, WorkerProcess]:
        """See `Launcher`."""
        return {rank: self._agent(rank) for rank in ranks}

    def start_beside(self, job: BesideJob) -> BesideProcess:
        """See `Launcher`."""
        if job.role.computes and self.variables:
            raise ClusterError(
                f"the hosts take all accelerators of this machine, which leaves none for a "
                f"{job.role.title}; set JAX_PLATFORMS=cpu, or have Ray place it on a host of its "
                "own with --engine ray --address auto"
            )
        return BesideProcess(job)

    def _agent(self, rank: int) -> WorkerProcess:
        with self.files.services.open("ab") as log:
            agent = WorkerProcess(
                "fornax.cluster.agent:run",
                log=log,
                environment=self.variables[rank] if self.variables else {},
            )
        run_dir = str(self.files.run_dir.absolute())
        setup = {"run_dir": run_dir, "rank": rank, "place": rank}
        agent.send({**setup, "spare": self.spare, "imports": self.imports})
        return agent
