"""The replicas behind a router, and which of them gets a request."""

import asyncio
import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fornax.cluster.routing.prefixes import PrefixIndex
from fornax.config.errors import ConfigError

__all__ = ["Choice", "Phase", "Policy", "Replica", "ReplicaPool", "RoutingConfig"]

Phase = Literal["starting", "ready", "unready", "draining", "ended"]
Policy = Literal["prefix-aware", "least-requests", "round-robin"]

_PARTIAL: tuple[Phase, ...] = ("starting", "unready")
_OVERLOADED_RATIO = 1.5
_WORTHWHILE = 0.5
"""Share of a prompt that a replica must have seen for the prompt to go there: with less, such as a
system prompt that all share, the replica with fewest requests is better."""


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How a router treats requests and replicas."""

    policy: Policy = "prefix-aware"
    """Which replica gets a request. prefix-aware: the one that has seen most of the prompt's
    beginning, unless it is overloaded; least-requests: the one that answers fewest now;
    round-robin: each in turn."""
    balance_threshold: int = 16
    """A replica is overloaded when it answers this many requests more than the least busy one, and
    half as many again."""
    max_retries: int = 2
    """How often a request whose replica died before it answered is sent to another one."""
    queue_timeout: float = 60.0
    """Seconds that a request waits while no replica is ready, before it gets 503."""
    drain_timeout: float = 300.0
    """Seconds that a replica gets to finish its requests before a restart."""
    stall_limit: float = 30.0
    """Seconds without an answer to the health probe after which a replica is replaced."""
    start_timeout: float = 1800.0
    """Seconds in which a replica must become ready, else it is started again."""

    def __post_init__(self) -> None:
        for name in ("balance_threshold", "stall_limit", "start_timeout"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is below 1; give at least 1")
        for name in ("max_retries", "queue_timeout", "drain_timeout"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative; 0 is the least")


@dataclass(eq=False, kw_only=True)
class Replica:
    """One process that answers requests."""

    number: int
    url: str
    """`http://HOST:PORT`, of TLS `https`."""
    grpc: str = ""
    """`HOST:PORT`, where it speaks gRPC."""
    phase: Phase = "starting"
    answers: bool = False
    """Whether it answered the last probe, ready or not."""
    running: int = 0
    """Requests that it is answering."""
    chosen: int = 0
    """When it was chosen last, counted in requests."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it answers none."""

    def __post_init__(self) -> None:
        self.idle.set()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request."""
        self.running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()


@dataclass(frozen=True)
class Choice:
    """The replica for a request, and what it knows of the prompt."""

    replica: Replica
    matched: int
    """Leading blocks of the prompt that it was sent before."""


class ReplicaPool:
    """The replicas by number; of one event loop."""

    def __init__(self, config: RoutingConfig, *, partial: bool = False):
        """`partial`: while none is ready, those take requests that at least answer."""
        self.config = config
        self._partial = partial
        self.replicas: dict[int, Replica] = {}
        self._prefixes: PrefixIndex[Replica] = PrefixIndex()
        self._turns = itertools.count(1)
        self._changed = asyncio.Event()

    def ready(self) -> list[Replica]:
        """Those that take every request."""
        return [each for each in self.replicas.values() if each.phase == "ready"]

    def usable(self) -> list[Replica]:
        """Those that are ready, else those that may have what a request asks for."""
        ready = self.ready()
        if ready or not self._partial:
            return ready
        return [each for each in self.replicas.values() if each.answers and each.phase in _PARTIAL]

    def add(self, replica: Replica) -> None:
        """Take a new replica in, in place of the one with its number."""
        if (before := self.replicas.get(replica.number)) is not None:
            self._prefixes.forget(before)
        self.replicas[replica.number] = replica
        self._wake()

    def enter(self, replica: Replica, phase: Phase) -> None:
        """A replica changes its phase."""
        replica.phase = phase
        self._wake()

    def heard(self, replica: Replica, answers: bool) -> None:
        """A replica answered a probe, or did not."""
        if replica.answers != answers:
            replica.answers = answers
            self._wake()

    def suspect(self, replica: Replica) -> None:
        """Send nothing to a replica until the next probe finds it ready."""
        replica.answers = False
        if replica.phase == "ready":
            self.enter(replica, "unready")

    def choose(self, keys: Sequence[int], tried: Collection[Replica] = ()) -> Choice | None:
        """A replica that is usable and not among those tried; None where there is none.

        Args:
          keys: of the prompt's blocks; empty for requests that no cache helps.
        """
        ready = [each for each in self.usable() if each not in tried]
        if not ready:
            return None
        choice = self._by_policy(ready, keys)
        choice.replica.chosen = next(self._turns)
        if keys:
            self._prefixes.add(keys, choice.replica)
        return choice

    def _by_policy(self, ready: Sequence[Replica], keys: Sequence[int]) -> Choice:
        matches = self._prefixes.matches(keys)
        if self.config.policy == "round-robin":
            chosen = min(ready, key=lambda each: each.chosen)
            return Choice(chosen, matches.get(chosen, 0))
        if self.config.policy == "prefix-aware":
            least = min(each.running for each in ready)
            fits = [each for each in ready if not self._overloaded(each, least)]
            most = max(matches.get(each, 0) for each in fits)
            if most and most >= _WORTHWHILE * len(keys):
                ready = [each for each in fits if matches.get(each, 0) == most]
        chosen = min(ready, key=lambda each: (each.running, each.chosen))
        return Choice(chosen, matches.get(chosen, 0))

    def _overloaded(self, replica: Replica, least: int) -> bool:
        more = replica.running - least
        return more >= self.config.balance_threshold and replica.running > _OVERLOADED_RATIO * least

    async def wait(self, seconds: float) -> bool:
        """Wait until some replica is usable; False when none is after this many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while not self.usable():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        self._changed.set()
