"""Time of a schedule: one queue of computation and one for each link, walked in program order.

An exchange that is started and later waited for runs while the computation between them does; the
wait costs what is left of it. Exchanges that share a link stand in line. A loop's first turns are
walked one by one, so that what one leaves on the links delays the next; the rest repeat the last.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["Compute", "Done", "Exchange", "Item", "Loop", "Walk", "bounds", "flatten", "walk"]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Work of the core."""

    name: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A transfer that begins here."""

    name: str
    seconds: float
    links: tuple[str, ...]
    """Queues it stands in; with none it occupies nothing."""
    waits: bool = True
    """Whether the core stands still until it is over; otherwise a `Done` waits for it."""
    hidden: float = 0.0
    """Seconds of work that the same instruction does beside the transfer."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """The core waits here for the exchange of that name."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Items repeated."""

    name: str
    count: int
    body: "tuple[Item, ...]"


Item = Compute | Exchange | Done | Loop

_TURNS = 3
"""Turns of a loop that are walked: the first meets what came before it, the second what the first
left, the third stands for all others."""


def _sums() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass
class Walk:
    """What a walk found; all times in seconds."""

    seconds: float = 0.0
    """From the first item to the end of the last exchange."""
    compute: float = 0.0
    """The core's own work."""
    exposed: defaultdict[str, float] = field(default_factory=_sums)
    """Exchange to the time the core stood still for it."""
    transfer: defaultdict[str, float] = field(default_factory=_sums)
    """Exchange to the time it took on its links."""
    busy: defaultdict[str, float] = field(default_factory=_sums)
    """Link to the time it was in use."""

    @property
    def exposed_seconds(self) -> float:
        """All standing still."""
        return sum(self.exposed.values())


@dataclass
class _State:
    now: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    running: dict[str, float] = field(default_factory=dict)


def walk(items: Sequence[Item]) -> Walk:
    """Walk a schedule from beginning to end; what nobody waits for ends with the program."""
    state, found = _State(), Walk()
    _run(items, state, found, 1.0)
    for name in list(state.running):
        _wait(name, state, found, 1.0)
    found.seconds = state.now
    return found


def _run(items: Sequence[Item], state: _State, found: Walk, weight: float) -> None:
    """Walk `items`; times are noted `weight` times."""
    for item in items:
        match item:
            case Compute():
                state.now += item.seconds
                found.compute += weight * item.seconds
            case Exchange():
                _start(item, state, found, weight)
            case Done():
                _wait(item.name, state, found, weight)
            case Loop():
                _repeat(item, state, found, weight)


def _start(item: Exchange, state: _State, found: Walk, weight: float) -> None:
    begin = max([state.now, *(state.free.get(link, 0.0) for link in item.links)])
    end = begin + item.seconds
    for link in item.links:
        state.free[link] = end
        found.busy[link] += weight * item.seconds
    found.transfer[item.name] += weight * item.seconds
    state.running[item.name] = end
    state.now += item.hidden
    found.compute += weight * item.hidden
    if item.waits:
        _wait(item.name, state, found, weight)


def _wait(name: str, state: _State, found: Walk, weight: float) -> None:
    end = state.running.pop(name, None)
    if end is not None and end > state.now:
        found.exposed[name] += weight * (end - state.now)
        state.now = end


def _repeat(loop: Loop, state: _State, found: Walk, weight: float) -> None:
    walked = min(loop.count, _TURNS)
    for _ in range(walked - 1):
        _run(loop.body, state, found, weight)
    if walked < 1:
        return
    rest = loop.count - walked
    now, free, running = state.now, {**state.free}, {**state.running}
    _run(loop.body, state, found, weight * (1 + rest))
    state.now += rest * (state.now - now)
    for times, old in ((state.free, free), (state.running, running)):
        for name, end in times.items():
            times[name] = end + rest * (end - old.get(name, end))


def flatten(items: Sequence[Item], weight: float = 1.0) -> Iterator[tuple[Item, float]]:
    """Every item that is no loop, with the times it runs."""
    for item in items:
        if isinstance(item, Loop):
            yield from flatten(item.body, weight * item.count)
        else:
            yield item, weight


def bounds(items: Sequence[Item]) -> tuple[float, float]:
    """Seconds with every exchange hidden as far as the links allow, and with none hidden."""
    compute, transfer, busy = 0.0, 0.0, _sums()
    for item, weight in flatten(items):
        match item:
            case Compute():
                compute += weight * item.seconds
            case Exchange():
                compute += weight * item.hidden
                transfer += weight * item.seconds
                for link in item.links:
                    busy[link] += weight * item.seconds
            case _:
                pass
    return max([compute, *busy.values()]), compute + transfer
