"""Requests of one function that wait: by priority, then by arrival, apart by padded shape.

Nothing here knows of arrays, threads or clocks: the time is an argument, in seconds of
`time.monotonic()`.
"""

import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from fornax.config.errors import ServingCode, ServingError
from fornax.serving.batching.plan import RowPlan

__all__ = ["Batch", "Key", "Queue", "Waiting"]

_SLACK = 64
"""Requests that have left and whose places in the queue are not cleared yet."""
_PATIENCE = 8
"""A full queue is searched for the abandoned once in an eighth of its size of refusals."""

Key = tuple[int, ...]
"""The bucket of each ragged dimension, in the signature's order."""


@dataclasses.dataclass(slots=True, eq=False)
class Waiting:
    """A request in a queue, or a part of one that is larger than the largest bucket."""

    owner: Any
    """What answers it; `abandoned` says that nobody waits for the answer any more."""
    inputs: Any
    rows: int
    key: Key = ()
    priority: int = 1
    deadline: float | None = None
    arrived: float = 0.0
    id: str = ""
    """Of the whole request, for profiles."""
    number: int = 0
    taken: bool = False
    """Left the queue: it is in a batch, has expired, or was dropped."""

    def forget(self) -> None:
        """Release the arrays: its place in the queue may be cleared much later."""
        self.owner = self.inputs = None


@dataclasses.dataclass(slots=True, eq=False)
class Batch:
    """Requests that are computed together, and the bucket they are padded to."""

    requests: list[Waiting]
    rows: int
    bucket: int
    key: Key


class Queue:
    """The queue of one function.

    A batch begins with the oldest request of the best priority, and takes on others of its
    padded shape in their order; rows of the bucket that are free after that go to requests of
    smaller shapes, which they cost nothing.
    """

    def __init__(
        self,
        plans: dict[Key, RowPlan],
        *,
        limit: int,
        delay: float = 0.0,
        preferred: tuple[int, ...] = (),
        fits: Callable[[Key, Key], bool] = lambda small, large: False,
        abandoned: Callable[[Any], bool] = lambda owner: False,
        gone: Callable[["Waiting"], None] = lambda waiting: None,
        together: bool = True,
    ):
        """A queue of `limit` requests.

        `fits(small, large)`: whether a request of one padded shape may be computed in the other.
        `abandoned(owner)`: whether nobody waits for the answer any more; such a request is found
        when its turn comes or when room is short, and `gone` is notified of it.
        `together`: whether requests may share a batch at all.
        """
        self.plans = plans
        self.limit = limit
        self.delay = delay
        self.preferred = tuple(sorted(preferred))
        self.size = 0
        self._fits = fits
        self._abandoned = abandoned
        self._gone = gone
        self._together = together
        self._levels: dict[int, dict[Key, deque[Waiting]]] = {}
        self._order: list[int] = []
        self._rows: dict[Key, int] = dict.fromkeys(plans, 0)
        self._deadlines: list[tuple[float, int, Waiting]] = []
        self._numbers = itertools.count()
        self._entries = 0
        self._refused = 0

    def put(self, *waiting: Waiting) -> None:
        """Take in one request, or the parts of one: all of them or none.

        Raises:
          ServingError: RESOURCE_EXHAUSTED when it would exceed the limit.
        """
        if self.size + len(waiting) > self.limit and not self._room(len(waiting)):
            self._refused += 1
            raise ServingError(
                ServingCode.RESOURCE_EXHAUSTED,
                f"the queue is full: {self.size} wait, {len(waiting)} came, "
                f"queue_limit={self.limit}; send again later, or raise batching.queue_limit",
            )
        for each in waiting:
            each.number = next(self._numbers)
            level = self._levels.get(each.priority)
            if level is None:
                level = self._levels[each.priority] = {}
                self._order = sorted(self._levels)
            shape = level.get(each.key)
            if shape is None:
                shape = level[each.key] = deque()
            shape.append(each)
            self._rows[each.key] += each.rows
            if each.deadline is not None:
                heapq.heappush(self._deadlines, (each.deadline, each.number, each))
        self.size += len(waiting)
        self._entries += len(waiting)
        if self._entries > 2 * self.size + _SLACK:
            self._sweep()

    def expire(self, now: float) -> list[Waiting]:
        """Take out those whose deadline has passed."""
        late = []
        while self._deadlines and (self._deadlines[0][2].taken or self._deadlines[0][0] <= now):
            each = heapq.heappop(self._deadlines)[2]
            if not each.taken:
                self._leave(each)
                late.append(each)
        return late

    def next_deadline(self) -> float | None:
        """The soonest deadline of those that wait."""
        while self._deadlines and self._deadlines[0][2].taken:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def head(self) -> Waiting | None:
        """The request whose turn it is."""
        for priority in self._order:
            best = None
            for shape in self._levels[priority].values():
                first = self._first(shape)
                if first is not None and (best is None or first.number < best.number):
                    best = first
            if best is not None:
                return best
        return None

    def ready_at(self, now: float) -> float | None:
        """When the next batch should go out (`now` or earlier: at once); None: nothing waits.

        It may be that all who wait have left: then `take` finds out.
        """
        if not self.size:
            return None
        if self.delay <= 0 or not self._together:
            return now
        head = self.head()
        if head is None:
            return None
        if self._enough(head.key):
            return now
        wait = self.delay
        if head.deadline is not None:  # it must be computed before, not at, its deadline
            wait = min(wait, (head.deadline - head.arrived) / 2)
        return head.arrived + wait

    def full(self) -> bool:
        """Whether waiting longer could not make the next batch larger."""
        head = self.head() if self.size else None
        return head is not None and (
            not self._together or self._rows[head.key] >= self.plans[head.key].most
        )

    def take(self, now: float) -> Batch | None:
        """The next batch, of requests that are neither late nor abandoned; None: there is none.

        Call `expire` first: a request that is late gets its answer there.
        """
        head = self.head()
        if head is None:
            return None
        plan = self.plans[head.key]
        if self.size == 1 or not self._together:
            self._leave(head)
            return Batch([head], head.rows, plan.bucket(head.rows), head.key)
        waiting = self._rows[head.key]
        target = max(self._aim(plan, waiting, now - head.arrived < self.delay), head.rows)
        chosen: list[Waiting] = []
        rows = self._gather(chosen, head.key, target)
        bucket = plan.bucket(rows)
        most = min(bucket, plan.most)
        if rows < most and self.size:
            rows += self._gather(chosen, head.key, most - rows)
            for key in sorted(self._rows, reverse=True):
                if rows < most and self._rows[key] and self._fits(key, head.key):
                    rows += self._gather(chosen, key, most - rows)
        return Batch(chosen, rows, bucket, head.key)

    def clear(self) -> list[Waiting]:
        """Take out all that wait."""
        every = [
            each
            for priority in self._order
            for shape in self._levels[priority].values()
            for each in shape
            if not each.taken
        ]
        for each in every:
            self._leave(each)
        return every

    def _aim(self, plan: RowPlan, waiting: int, early: bool) -> int:
        if self.preferred and early:
            within = [size for size in self.preferred if size <= waiting]
            if within:
                return within[-1]
        return plan.rows(max(waiting, 1))

    def _enough(self, key: Key) -> bool:
        least = self.preferred[0] if self.preferred else self.plans[key].most
        return self._rows[key] >= least

    def _gather(self, chosen: list[Waiting], key: Key, most: int) -> int:
        """Move requests of one padded shape into a batch, in order, until one does not fit."""
        rows = 0
        for priority in self._order:
            shape = self._levels[priority].get(key)
            while shape:
                first = self._first(shape)
                if first is None:
                    break
                if rows + first.rows > most:
                    return rows
                shape.popleft()
                self._leave(first)
                chosen.append(first)
                rows += first.rows
        return rows

    def _first(self, shape: deque[Waiting]) -> Waiting | None:
        while shape:
            first = shape[0]
            if not first.taken:
                if not self._abandoned(first.owner):
                    return first
                self._leave(first)
                self._gone(first)
            shape.popleft()
        return None

    def _leave(self, each: Waiting) -> None:
        each.taken = True
        self.size -= 1
        self._rows[each.key] -= each.rows

    def _sweep(self) -> None:
        """Forget those that have left from the middle of the queue."""
        for level in self._levels.values():
            for key, shape in level.items():
                level[key] = deque(each for each in shape if not each.taken)
        self._deadlines = [entry for entry in self._deadlines if not entry[2].taken]
        heapq.heapify(self._deadlines)
        self._entries = self.size

    def _room(self, wanted: int) -> bool:
        """Whether there is room once the abandoned have left."""
        if self._refused < self.size // _PATIENCE:
            return False
        self._refused = 0
        for each in list(self._every()):
            if not each.taken and self._abandoned(each.owner):
                self._leave(each)
                self._gone(each)
        return self.size + wanted <= self.limit

    def _every(self) -> Iterator[Waiting]:
        for level in self._levels.values():
            for shape in level.values():
                for each in shape:
                    if not each.taken:
                        yield each
