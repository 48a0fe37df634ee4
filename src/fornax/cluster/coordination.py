"""jax's coordination service in a process of its own, so that no worker's death ends it.

The one private call of jax's: `jax.distributed.initialize` starts this service in process 0 only,
and a process that loses it aborts. A service serves one group; each epoch of a run gets its own.
"""

import contextlib
import socket
from multiprocessing.connection import Connection
from types import TracebackType
from typing import IO, Any

from fornax.config.errors import ClusterError
from fornax.config.worker_process import WorkerProcess, receive, send

__all__ = ["CoordinationService", "cpu_client", "listen"]

_HEARTBEAT_SECONDS = 600  # agents watch the workers; the service must not end a group by itself
_SHUTDOWN_SECONDS = 60
_START_SECONDS = 60
_ATTEMPTS = 5


class CoordinationService:
    """A service for one group of processes on this host; it ends with who made it."""

    def __init__(self, count: int, log: IO[Any], host: str = "127.0.0.1") -> None:
        """Start the service's process; `address` waits until it listens.

        Args:
          count: processes of the group.
          log: file for what it prints.
          host: address of this machine on which it listens.
        """
        self._worker = WorkerProcess("fornax.cluster.coordination:serve", log=log)
        self._worker.send({"count": count, "host": host})
        self.count = count
        self._address: str | None = None

    @property
    def address(self) -> str:
        """Where it listens, host:port.

        Raises:
          ClusterError: when it does not start.
        """
        if self._address is None:
            try:
                self._address = str(self._worker.receive(_START_SECONDS))
            except (EOFError, TimeoutError) as error:
                raise ClusterError(
                    "jax's coordination service did not start; see coordination.log in the run's "
                    "cluster directory"
                ) from error
        return self._address

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._worker.poll() is None

    def close(self) -> None:
        """End the process."""
        self._worker.kill()

    def __enter__(self) -> "CoordinationService":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def serve(parent: Connection) -> None:
    """The service's process: listens until it is killed."""
    address, service = listen(**receive(parent))
    send(parent, address)
    with contextlib.suppress(EOFError):
        receive(parent)  # nothing more is said: this ends with the launcher
    del service


def listen(count: int, host: str) -> tuple[str, object]:
    """Start a service for `count` processes in this process; its address, and what keeps it there.

    Raises:
      ClusterError: when no port is free.
    """
    failure: Exception | None = None
    for _ in range(_ATTEMPTS):
        address = f"{host}:{_free_port(host)}"
        try:
            return address, _start(address, count)
        except Exception as error:  # another process took the port meanwhile
            failure = error
    raise ClusterError(f"no port for the coordination service: {failure}")


def _start(address: str, count: int) -> object:
    from jaxlib import _jax  # pyrefly: ignore[missing-module-attribute]

    return _jax.get_distributed_runtime_service(
        address,
        count,
        heartbeat_timeout=_HEARTBEAT_SECONDS,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        recoverable=True,
    )


def cpu_client(address: str, number: int, count: int, join_seconds: int) -> object:
    """Join a service as process `number` of `count` with a CPU client of its own; what holds both.

    It stands for another process in this one, for programs to be compiled; it computes nothing.
    """
    from jaxlib import _jax, xla_client  # pyrefly: ignore[missing-module-attribute]

    joined = _jax.get_distributed_runtime_client(
        address,
        number,
        init_timeout=join_seconds,
        heartbeat_timeout=_HEARTBEAT_SECONDS,
        shutdown_on_destruction=False,
    )
    joined.connect()
    client = xla_client.make_cpu_client(distributed_client=joined, node_id=number, num_nodes=count)
    return joined, client


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
