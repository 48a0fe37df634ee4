"""What happens in the server, for those who listen: metrics, logs and traces.

Everything is called in the event loop's thread. Nobody listening costs one truth test.
"""

import dataclasses
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from fornax.config.errors import ServingCode
from fornax.serving.types import InferRequest, InferResult

__all__ = ["BackgroundQueue", "Events", "Refusal", "StateChange"]

T = TypeVar("T")

_PAUSE = 0.2
"""Seconds between looks at what waits."""
_MOST = 100_000
"""Items that may wait; more are counted and left out."""
_AT_ONCE = 32


@dataclasses.dataclass(frozen=True, slots=True)
class StateChange:
    """A version of a model entered a state."""

    name: str
    version: str
    state: str
    """LOADING, READY, UNLOADING or UNAVAILABLE."""
    reason: str = ""
    """Why it is unavailable."""
    seconds: float = 0.0
    """What it took to come here, where it is known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """A request that a protocol refused before any model saw it."""

    protocol: str
    """`http` or `grpc`."""
    code: ServingCode
    message: str
    model: str = ""
    id: str = ""


Outcome = InferResult | BaseException


class Events:
    """The listeners, and how many requests were refused before a model saw them."""

    __slots__ = ("finished", "refusals", "refused", "states")

    def __init__(self) -> None:
        self.finished: list[Callable[[InferRequest, Outcome], None]] = []
        """Told of each request that a model was asked for, with its answer or its error."""
        self.states: list[Callable[[StateChange], None]] = []
        self.refused: list[Callable[[Refusal], None]] = []
        self.refusals: Counter[tuple[str, str]] = Counter()
        """By protocol and code."""

    def tell_finished(self, request: InferRequest, outcome: Outcome) -> None:
        """A request has its answer or its error."""
        for listener in self.finished:
            listener(request, outcome)

    def tell_state(self, change: StateChange) -> None:
        """A version entered a state."""
        for listener in self.states:
            listener(change)

    def tell_refused(
        self,
        protocol: str,
        code: ServingCode,
        message: str,
        model: str = "",
        id: str = "",  # noqa: A002
    ) -> None:
        """A protocol refused a request: a bad body, a missing token, too much."""
        self.refusals[protocol, code.name] += 1
        if self.refused:
            refusal = Refusal(protocol, code, message, model, id)
            for listener in self.refused:
                listener(refusal)


class BackgroundQueue(Generic[T]):
    """What a listener does later, in a thread: hands items to `work`, in order, a few at a time."""

    def __init__(self, work: Callable[[Sequence[T]], None], name: str):
        """`work` must not raise; it is called by one thread."""
        self._work = work
        self._waiting: deque[T] = deque()
        self._left_out = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, item: T) -> None:
        """Have something done soon; in the event loop's thread."""
        if len(self._waiting) < _MOST:
            self._waiting.append(item)
        else:
            self._left_out += 1

    def take_left_out(self) -> int:
        """How many items were too many since this was last asked."""
        count, self._left_out = self._left_out, 0
        return count

    def close(self) -> None:
        """Do what waits, and end the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE):
            self._empty()
        self._empty()

    def _empty(self) -> None:
        while self._waiting:
            count = min(len(self._waiting), _AT_ONCE)
            self._work([self._waiting.popleft() for _ in range(count)])
            time.sleep(0)  # the event loop goes before
