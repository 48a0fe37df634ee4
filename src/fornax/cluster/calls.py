"""Python functions beside the devices: one process per host, which runs what it is sent."""

import contextlib
import pickle
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import cloudpickle

from fornax.config.errors import ClusterError
from fornax.config.worker_process import WorkerProcess, ending, receive

__all__ = ["LocalCalls", "attempt", "pack", "serve", "unwrap"]

T = TypeVar("T")
R = TypeVar("R")


class LocalCalls:
    """Hosts that are processes of this machine, kept from one call to the next.

    Function, items and results travel by cloudpickle through the pair of sockets that each process
    inherits: nothing listens, and nothing but this process can send it code.
    """

    def __init__(self, hosts: int, variables: Sequence[Mapping[str, str | None]] = ()) -> None:
        """Start nothing yet.

        Args:
          hosts: how many.
          variables: changes to the environment of each; none: no changes.
        """
        self._environment = variables or [{}] * hosts
        self._workers: list[WorkerProcess | None] = [None] * hosts

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """The function of each item, in the items' order, one item per host at a time.

        Raises:
          ClusterError: when the function raises, with its traceback, ends its process, or cannot
            be sent.
        """
        waiting = deque(enumerate(pack(function, item) for item in items))
        results: dict[int, R] = {}
        busy: dict[Connection, tuple[int, int]] = {}
        idle = deque(range(len(self._workers)))
        try:
            while waiting or busy:
                while waiting and idle:
                    host = idle.popleft()
                    number, message = waiting.popleft()
                    worker = self._worker(host)
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        worker.connection.send_bytes(message)
                    busy[worker.connection] = (host, number)
                for connection in wait(list(busy)):
                    assert isinstance(connection, Connection)
                    host, number = busy.pop(connection)
                    results[number] = self._result(host, number)
                    idle.append(host)
        finally:
            for (
                host,
                _,
            ) in busy.values():  # after an error: they are in the middle of items of this call
                self._end(host)
        return [results[number] for number in range(len(results))]

    def close(self) -> None:
        """End the processes."""
        for host in range(len(self._workers)):
            self._end(host)

    def _worker(self, host: int) -> WorkerProcess:
        worker = self._workers[host]
        if worker is None:
            worker = self._workers[host] = WorkerProcess(
                "fornax.cluster.calls:serve", environment=self._environment[host]
            )
            worker.send(sys.path)
        return worker

    def _result(self, host: int, number: int) -> Any:
        worker = self._worker(host)
        try:
            answer = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError) as error:
            code = worker.wait()
            self._end(host)
            raise ClusterError(
                f"host {host} ended with {ending(code)} while it ran item {number}; what it "
                "printed is above. The next call starts it again"
            ) from error
        return unwrap(answer, f"host {host}, item {number}")

    def _end(self, host: int) -> None:
        worker = self._workers[host]
        if worker is not None:
            worker.kill()
            self._workers[host] = None


def serve(parent: Connection) -> None:
    """A host's process: runs functions until its parent is gone."""
    sys.path[:] = receive(parent)
    while True:
        parent.send_bytes(attempt(parent.recv_bytes()))


def pack(function: Callable[[T], object], item: T) -> bytes:
    """What `attempt` takes.

    Raises:
      ClusterError: when one of the two cannot be pickled.
    """
    try:
        return cloudpickle.dumps((function, item))
    except (TypeError, pickle.PicklingError) as error:
        name = getattr(function, "__qualname__", function)
        raise ClusterError(
            f"{name} or its item {item!r:.60} cannot be sent to a host: {error}. Pass plain "
            "values, and open files, locks and devices inside the function"
        ) from error


def attempt(message: bytes) -> bytes:
    """Call a pickled (function, item); a pickled (True, result) or (False, traceback)."""
    try:
        function, item = pickle.loads(message)
        return cloudpickle.dumps((True, function(item)))
    except Exception:
        return cloudpickle.dumps((False, traceback.format_exc()))


def unwrap(answer: tuple[bool, Any], where: str) -> Any:
    """The result of an answer.

    Raises:
      ClusterError: when the function raised.
    """
    done, value = answer
    if not done:
        last = str(value).strip().splitlines()[-1]
        raise ClusterError(f"the function raised {last} ({where})") from RuntimeError(str(value))
    return value
