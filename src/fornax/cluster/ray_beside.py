"""A process beside the hosts of a run that Ray places: on another node when its own is lost."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fornax.cluster.beside_process import BesideJob, BesideProcess, Event
from fornax.cluster.ray_nodes import end_actor, own_address, own_node
from fornax.config import environment
from fornax.config.errors import ClusterError

__all__ = ["GiveBack", "RayBeside", "Room"]

_START_SECONDS = 120.0
_REPORT_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class Room:
    """Where an actor is to be."""

    options: dict[str, Any]
    """Of the actor: what it takes, and its node where that is chosen."""
    private: bool
    """Whether it listens at the address of its node, for other machines; else at loopback."""
    node: str | None = None
    """The node that it has for itself."""


class GiveBack(Protocol):
    """Releases the resources of a process."""

    def __call__(self, room: Room, *, shun: bool) -> None:
        """`shun`: nothing could be started there."""
        ...


@dataclass(frozen=True)
class _Begun:
    address: str
    """host:port at which the process listens."""
    pid: int
    """Of the actor."""
    node: str
    node_address: str


class RayBeside:
    """See `BesidePlace`; a thread follows the actor that watches the process on its node."""

    def __init__(
        self,
        ray: Any,
        job: BesideJob,
        take: Callable[[], Room],
        give_back: GiveBack,
    ) -> None:
        """Start it.

        Args:
          ray: the module, connected.
          job: what the process is for.
          take: finds room for it; ClusterError where there is none.
          give_back: told when the room is free again, and whether Ray failed to start there.

        Raises:
          ClusterError: when Ray starts no actor.
        """
        self._ray, self._job = ray, job
        self._take, self._give_back = take, give_back
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._closed = False
        self._changing = threading.Lock()
        self._room: Room | None = None
        self._actor: Any = None
        self._begun: _Begun | None = None
        self.address = ""
        self._begin()
        name = f"{job.role.name} {job.number}"
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
        self._thread.start()

    def check(self) -> list[Event]:
        """See `BesidePlace`."""
        found: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._events.get_nowait())
        return found

    def close(self) -> None:
        """See `BesidePlace`."""
        self._closed = True
        self._end()

    def _begin(self) -> None:
        """Start an actor and its process.

        Raises:
          ClusterError: when there is no room, or Ray does not start it in time.
        """
        room = self._take()
        with self._changing:
            self._room = room
            self._actor = (
                self._ray.remote(_BesideHost)
                .options(max_restarts=0, **room.options)
                .remote(os.getcwd(), environment.of_computation())
            )
        try:
            begun = self._ray.get(
                self._actor.begin.remote(self._job, room.private), timeout=_START_SECONDS
            )
        except self._ray.exceptions.RayError as error:
            self._end(shun=True)
            text = str(error).strip().splitlines()[0]
            title = f"{self._job.role.title} {self._job.number}"
            raise ClusterError(f"Ray started no {title}: {text:.300}") from error
        self._begun = begun
        self.address = begun.address
        if self._closed:
            self._end()

    def _end(self, *, shun: bool = False) -> None:
        """End the actor, and what it holds."""
        with self._changing:
            actor, self._actor = self._actor, None
            begun, self._begun = self._begun, None
            room, self._room = self._room, None
        if actor is not None:
            if begun is None:
                self._ray.kill(actor, no_restart=True)
            else:
                end_actor(self._ray, actor, begun.pid, begun.node, begun.node_address)
        if room is not None:
            self._give_back(room, shun=shun)

    def _follow(self) -> None:
        """Pass on what the actor says; start again where it is lost, as long as it takes."""
        title = f"{self._job.role.title} {self._job.number}"
        while not self._closed:
            try:
                watched = self._actor.watch.remote()
                for event in self._ray.get(watched, timeout=self._job.stall + _START_SECONDS / 10):
                    self._events.put(event)
                continue
            except Exception as error:  # whatever Ray raises: the actor is gone, or is held
                if self._closed:
                    return
                lost = _first_line(error)
            where = "" if self._begun is None else f" on {self._begun.node_address}"
            self._end()
            self._events.put({"why": f"{title}{where} was lost ({lost}); another takes its place"})
            self._begin_when_possible(title)

    def _begin_when_possible(self, title: str) -> None:
        told = ""
        while not self._closed:
            try:
                self._begin()
            except Exception as error:
                why = _first_line(error)
                if why != told:
                    self._events.put({"why": f"{title} waits for a place: {why}"})
                    told = why
                time.sleep(_PAUSE_SECONDS)
            else:
                return


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


class _BesideHost:
    """The actor of a process."""

    def __init__(self, folder: str, variables: dict[str, str]) -> None:
        if Path(folder).is_dir():  # relative paths mean what they do where the command was given
            os.chdir(folder)
        self._variables = variables
        self._process: BesideProcess | None = None

    def begin(self, job: BesideJob, private: bool) -> _Begun:
        host = own_address() if private else "127.0.0.1"
        self._process = BesideProcess(job, host=host, variables=self._variables)
        return _Begun(self._process.address, os.getpid(), own_node(), own_address())

    def watch(self) -> list[Event]:
        """What became of it, within a second."""
        assert self._process is not None
        until = time.monotonic() + _REPORT_SECONDS
        while not (found := self._process.check()) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        return found
