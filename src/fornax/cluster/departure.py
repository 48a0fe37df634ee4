"""A host that is to go while it still works: another is made ready before the group leaves it.

The agent that will take its place starts beside it, and a process there imports what a worker
needs, so that the steps stop only while all leave one group and form the next.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from fornax.cluster.local import AgentProcess, Launcher
from fornax.cluster.messages import Observation
from fornax.cluster.snapshot_places import SnapshotPlaces
from fornax.cluster.verdict import Verdict, departed
from fornax.config.errors import ClusterError

__all__ = ["Arrivals", "Departure", "Departures"]

_READY_SECONDS = 10.0
"""How long the others continue for the new host: of the half minute that schedulers give by
custom."""
_LEAVE_SECONDS = 60.0
_LEAVE_STEPS = 20


class Departure:
    """One host, from the notice until its place is taken."""

    def __init__(
        self, rank: int, launcher: Launcher, greet: Callable[[AgentProcess], None], *, slow: bool
    ) -> None:
        """Begin to start an agent elsewhere.

        Args:
          rank: whose host is to go.
          launcher: places the agent.
          greet: called once with it.
          slow: whether the host goes because it is slow, and not by a scheduler's notice.
        """
        self.rank, self.slow = rank, slow
        self.since = time.time()
        """When the notice came, or the rank was named as slow."""
        self.agent: AgentProcess | None = None
        """The agent that takes the place, once there is one."""
        self.address: str | None = None
        """Where that listens for snapshots."""
        self._greet = greet
        self._ready = self._closed = False
        self._until = time.monotonic() + _READY_SECONDS
        self._started: Mapping[int, AgentProcess] = {}
        self._starting = threading.Thread(target=self._start, args=(launcher,), daemon=True)
        self._starting.start()

    def _start(self, launcher: Launcher) -> None:
        """In a thread, as a launcher may wait for a machine."""
        try:
            self._started = launcher.start([self.rank])
        except ClusterError:  # there is no other host: it is waited for when this one is gone
            self._ready = True

    def advance(self) -> None:
        """Read the agent's messages."""
        if self._starting.is_alive() or self._closed:
            return
        if self.agent is None and self._started:
            self.agent = self._started[self.rank]
            self._greet(self.agent)
            self.agent.send({"kind": "spare"})
        try:
            while self.agent is not None and self.agent.connection.poll():
                message = self.agent.receive(0)
                assert isinstance(message, dict)
                self._ready = self._ready or message["kind"] == "ready"
                self.address = message.get("address", self.address)
        except (EOFError, TimeoutError):
            self.close()

    def is_due(self) -> bool:
        """Whether the group is to leave: the other host is ready, or will not be in time."""
        return self._ready or self._closed or time.monotonic() > self._until

    def wait(self) -> None:
        """Until the launcher has placed the agent, or has not."""
        self._starting.join()
        self.advance()

    def close(self) -> None:
        """End the agent that was to take the place."""
        self._starting.join()
        for agent in self._started.values():
            agent.kill()
        self.agent, self._closed = None, True


class Arrivals:
    """The hosts by which a run is to grow: made ready while the others train on."""

    def __init__(self, launcher: Launcher, places: SnapshotPlaces) -> None:
        """None is."""
        self._launcher, self._places = launcher, places
        self._each: dict[int, Departure] = {}

    def are_ready(self, ranks: Iterable[int]) -> bool:
        """Begin with those that have not begun; whether all are ready, or will not be in time."""
        towards = self._launcher.address
        for rank in ranks:
            if rank not in self._each:
                self._each[rank] = Departure(
                    rank,
                    self._launcher,
                    lambda agent, rank=rank: self._places.let_listen(
                        agent, towards, rank, sys.maxsize
                    ),
                    slow=False,
                )
            self._each[rank].advance()
        return all(self._each[rank].is_due() for rank in ranks)

    def take(self, ranks: Iterable[int]) -> dict[int, tuple[AgentProcess, str | None]]:
        """The agents of some ranks, with where they listen; the others end."""
        found = {}
        for rank in ranks:
            if rank in self._each:
                each = self._each.pop(rank)
                each.wait()
                if each.agent is not None:
                    found[rank] = (each.agent, each.address)
        self.close()
        return found

    def close(self) -> None:
        """End all that were started."""
        while self._each:
            self._each.popitem()[1].close()


class Departures:
    """The hosts of a run that are to go, which leave it together."""

    def __init__(self, launcher: Launcher, places: SnapshotPlaces) -> None:
        """None is."""
        self.leave_by = 0.0
        """When those that are asked to leave must have; 0.0 while nobody is asked."""
        self.in_memory = False
        """Whether the newest step is in the agents' memory only, until the next group runs."""
        self._launcher, self._places = launcher, places
        self._each: dict[int, Departure] = {}
        self._replaced: list[AgentProcess] = []

    @property
    def ranks(self) -> set[int]:
        """Whose hosts are to go."""
        return set(self._each)

    def begin(self, rank: int, *, slow: bool = False) -> None:
        """Begin to start an agent that takes the place of a rank's."""
        towards = self._launcher.address
        self._each[rank] = Departure(
            rank,
            self._launcher,
            lambda agent: self._places.let_listen(agent, towards, rank, sys.maxsize),
            slow=slow,
        )

    def are_due(self) -> bool:
        """Read the new agents' messages; whether the group is to leave those that go now."""
        for each in self._each.values():
            each.advance()
        return bool(self._each) and all(each.is_due() for each in self._each.values())

    def ask(self, agents: Mapping[int, AgentProcess], step_seconds: float) -> bool:
        """Have all workers leave at one step; whether they keep it in memory, not on disk.

        Args:
          agents: by rank.
          step_seconds: how long the longest of the last steps took.
        """
        by_memory = all(each.agent is not None for each in self._each.values())
        kind = "depart" if by_memory else "signal"
        for rank in self._each:
            agents[rank].send({"kind": kind, "number": signal.SIGTERM})
        self.leave_by = time.monotonic() + max(_LEAVE_SECONDS, _LEAVE_STEPS * step_seconds)
        return by_memory

    def verdict(self, seen: Mapping[int, Observation], what: str) -> Verdict:
        """Of the first of the hosts that are to go."""
        first = next(iter(self._each.values()))
        return departed(seen[first.rank], what, slow=first.slow, since=first.since)

    def of(self, verdict: Verdict) -> dict[int, Departure]:
        """Those that a verdict ends, once their agents are placed, or are not."""
        ended = {
            rank: each
            for rank, each in self._each.items()
            if verdict.leaves or (verdict.takes_agent and rank == verdict.rank)
        }
        for rank, each in ended.items():
            del self._each[rank]
            each.wait()
        return ended

    def keep(self, rank: int, agent: AgentProcess) -> None:
        """An agent leaves its place, and stays until the next group has what is in its memory."""
        self._replaced.append(agent)
        self._places.replace(rank)

    def settle(self, hosts: int) -> None:
        """The next group runs: those that were replaced end."""
        self._places.settle(hosts)
        self.in_memory = False
        while self._replaced:
            self._replaced.pop().kill()

    def drop(self, rank: int) -> None:
        """There is no such rank any more."""
        if rank in self._each:
            self._each.pop(rank).close()

    def close(self) -> None:
        """End all agents that were started, and those that were replaced."""
        for rank in self.ranks:
            self.drop(rank)
        while self._replaced:
            self._replaced.pop().kill()
