"""A host that is to go while it still works: another is made ready before the group leaves it.

The agent that will take its place starts beside it, and a process there imports what a worker
needs, so that the steps stop only while all leave one group and form the next.
"""

import threading
import time
from collections.abc import Callable, Mapping

from fornax.cluster.local import AgentProcess, Launcher
from fornax.config.errors import ClusterError

__all__ = ["Departure"]

_READY_SECONDS = 10.0
"""How long the others go on for the new host: of the half minute that schedulers give by custom."""


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
        """Hear the agent."""
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
