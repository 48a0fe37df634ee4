"""When the state is next kept, in memory or on disk: by what it costs and how often runs fail."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

from fornax.mesh import hosts

__all__ = ["Interval", "young"]

_RECENT = 20


def young(cost: float, mtbf: float) -> float:
    """Seconds between copies that lose the least: Young, CACM 17(9), 1974, sqrt(2 C M).

    Args:
      cost: seconds that training stands still for one.
      mtbf: mean seconds between failures of the whole run.
    """
    return math.sqrt(2 * cost * mtbf)


class Interval:
    """The steps after which one tier keeps the state.

    All processes call its methods at the same steps. Process 0 measures and computes, the others
    follow.
    """

    def __init__(
        self,
        mtbf: float,
        *,
        most: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is due before `begin`.

        Args:
          mtbf: mean seconds between failures of the whole run.
          most: seconds between two copies at most.
          clock: seconds, never going back.
        """
        self._mtbf, self._most, self._clock = mtbf, most, clock
        self.steps = 1
        """Steps between the last copy and the next."""
        self._next = 0
        self._timed: tuple[float, int] | None = None  # when training continued, after which step
        self._began = 0.0
        self._step_seconds: deque[float] = deque(maxlen=_RECENT)

    def begin(self, step: int) -> None:
        """The run resumes after `step`; the first copy is of the second step from there, when one
        was made that did not compile."""
        self._next = step + 2
        self._timed = None

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is to be kept; called after each step."""
        if self._timed is None:
            self._timed = self._clock(), step
        return step >= self._next

    def put_off(self, step: int, steps: int) -> None:
        """Keep nothing for this many steps after `step`."""
        self._next = step + steps

    def start(self, step: int) -> None:
        """The state after `step`, of which all work is done, is being kept from now on."""
        self._began = self._clock()
        if self._timed is not None and step > self._timed[1]:
            took = (self._began - self._timed[0]) / (step - self._timed[1])
            self._step_seconds.append(took)
        self._next = step + self.steps

    def finish(self, step: int, *, least: float = 0.0) -> None:
        """Training continues: agree on the step of the next copy.

        Args:
          step: that of `start`.
          least: seconds to the next copy at least.
        """
        cost = self._clock() - self._began
        self.steps = hosts.decide(lambda: self._steps(cost, least))
        self._next = step + self.steps
        self._timed = self._clock(), step

    def _steps(self, cost: float, least: float) -> int:
        """Steps until the next copy; two, where no step was timed yet."""
        if not self._step_seconds:
            return 2
        seconds = max(least, min(young(cost, self._mtbf), self._most))
        step = max(statistics.median(self._step_seconds), 1e-6)
        return max(1, math.ceil(least / step), round(seconds / step))
