"""The agents of a run by rank, as the controller talks to them."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from fornax.cluster.local import AgentProcess
from fornax.cluster.messages import encode

__all__ = ["AgentLostError", "Agents"]

_START_SECONDS = 45.0
_END_SECONDS = 15.0
_ANSWERS = ("left", "stacks")
_POLL_SECONDS = 0.05


class AgentLostError(Exception):
    """The agent of a rank is gone, or says nothing."""

    def __init__(self, rank: int, what: str, *, silent: float = 0.0, cut: bool = False) -> None:
        """Of one agent.

        Args:
          rank: whose.
          what: how it was noticed.
          silent: seconds since something was received from it.
          cut: whether it may run, out of reach.
        """
        super().__init__(what)
        self.rank, self.what, self.cut = rank, what, cut
        self.since = time.time() - silent
        """Wall time at which something was received from it last."""


class Agents(Mapping[int, AgentProcess]):
    """One for each rank; each message renews the lease that lets its worker run."""

    def __init__(self, take: Callable[[int, Mapping[str, Any]], None]) -> None:
        """None yet.

        Args:
          take: called with the rank and each message that answers no `ask`.
        """
        self._take = take
        self._agents: dict[int, AgentProcess] = {}
        self._heard: dict[int, float] = {}
        self._answers: dict[int, Mapping[str, Any]] = {}

    def __getitem__(self, rank: int) -> AgentProcess:
        """The agent of a rank."""
        return self._agents[rank]

    def __iter__(self) -> Iterator[int]:
        """The ranks."""
        return iter(self._agents)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._agents)

    def put(self, rank: int, agent: AgentProcess, *, starts: bool = True) -> None:
        """Have an agent be that of a rank.

        Args:
          rank: whose place it takes.
          agent: any that was there is not ended.
          starts: whether it is given the time of a start before it counts as silent.
        """
        self._agents[rank] = agent
        if starts:
            self._heard[rank] = time.monotonic() + _START_SECONDS

    def renew(self) -> None:
        """Count silence from now on."""
        self._heard.update(dict.fromkeys(self._agents, time.monotonic()))

    @property
    def silent(self) -> float:
        """Seconds since the agent heard from least recently said something."""
        return time.monotonic() - min(self._heard[rank] for rank in self._agents)

    def hear(self, seconds: float) -> None:
        """Take what is said within some seconds.

        Raises:
          AgentLostError: for an agent that ended.
        """
        ranks = {agent.connection: rank for rank, agent in self._agents.items()}
        for connection in wait(list(ranks), seconds):
            assert isinstance(connection, Connection)
            self._receive(ranks[connection])

    def check(self, silence: float) -> None:
        """Check that all agents sent something lately.

        Raises:
          AgentLostError: for an agent that has been silent for more than `silence` seconds.
        """
        now = time.monotonic()
        for rank in self._agents:
            if now - self._heard[rank] > silence:
                why = f"nothing was received from it for {silence:g} s"
                raise AgentLostError(rank, why, silent=now - self._heard[rank], cut=True)

    def ask(self, rank: int, message: object, kind: str, seconds: float = 0.0) -> Mapping[str, Any]:
        """An agent's answer of a kind; messages of the others are received meanwhile.

        Args:
          rank: of the agent.
          message: the question; None where it was sent before.
          kind: of the answer.
          seconds: that the answer may take, beside what an agent needs in any case.

        Raises:
          AgentLostError: for this agent; another that is lost is noticed later.
        """
        if message is not None:
            self._agents[rank].send(message)
        seconds += _END_SECONDS
        until = time.monotonic() + seconds
        ranks = {agent.connection: other for other, agent in self._agents.items()}
        while self._answers.get(rank, {}).get("kind") != kind:
            if time.monotonic() > until:
                why = f"it does not answer within {seconds:g} s"
                raise AgentLostError(rank, why, silent=seconds, cut=True)
            for connection in wait(list(ranks), _POLL_SECONDS):
                assert isinstance(connection, Connection)
                try:
                    self._receive(ranks[connection])
                except AgentLostError as lost:
                    if lost.rank == rank:
                        raise
                    del ranks[connection]
        return self._answers.pop(rank)

    def release(self, rank: int) -> AgentProcess:
        """Take an agent out of its place; it is not ended, and its messages are not read any
        more."""
        return self._agents.pop(rank)

    def forget(self, rank: int) -> None:
        """End an agent with its worker."""
        self.release(rank).kill()

    def dismiss(self, ranks: Sequence[int]) -> None:
        """Let agents end with their workers, and wait until they have."""
        for rank in ranks:
            self._agents[rank].send(encode("end"))
        until = time.monotonic() + _END_SECONDS
        for rank in ranks:
            with contextlib.suppress(EOFError, TimeoutError):
                while True:
                    self._agents[rank].receive(max(0.0, until - time.monotonic()))
            self.forget(rank)

    def _receive(self, rank: int) -> None:
        try:
            message = self._agents[rank].receive(0)
        except (EOFError, TimeoutError) as error:
            raise AgentLostError(rank, "it ended") from error
        assert isinstance(message, dict)
        self._heard[rank] = time.monotonic()
        if message["kind"] == "alive":
            self._agents[rank].send({"kind": "lease", "at": message["at"]})
        elif message["kind"] in _ANSWERS:
            self._answers[rank] = message
        else:
            self._take(rank, message)
