"""The clock of a training process: every second of it in one category, written as it goes.

One category runs at a time, so that the categories sum to the wall time by construction.
`fornax.config.goodput` says what the lines are, and sums them up.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import jax

from fornax.config.goodput import CATEGORIES, Category
from fornax.config.jsonl import JsonLines, read_json_lines
from fornax.config.worker_record import WorkerRecord

__all__ = ["Ledger"]

_ANNOTATIONS: Mapping[Category, str] = {"wait_for_data": "input/wait"}
"""What profiles call a category, where it is not its name."""


class Ledger:
    """A clock that is always in one category."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        record: WorkerRecord | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Start the clock, in `initialise`.

        Args:
          clock: seconds, never going back.
          record: told each change of category or step.
          wall: seconds since 1970, read once: the times of lines are those of `clock` from there.
        """
        self._clock = clock
        self._record = record
        self._step = -1
        self._since = clock()
        self._offset = wall() - self._since
        self._category: Category = "initialise"
        self._totals: dict[Category, float] = dict.fromkeys(CATEGORIES, 0.0)
        self._written = dict(self._totals)
        self._written_at = self._since
        self._spans: list[tuple[Category, float]] = []
        self._file: JsonLines | None = None
        self._attempt = 0

    def enter(self, category: Category) -> None:
        """From now on time belongs to `category`."""
        now = self._clock()
        spent = now - self._since
        self._totals[self._category] += spent
        # Steps wait for their data in between: a training run's spans are those of all else.
        kind = "step" if self._category == "wait_for_data" else self._category
        if self._spans and self._spans[-1][0] == kind:
            self._spans[-1] = (kind, self._spans[-1][1] + spent)
        else:
            self._spans.append((kind, spent))
        if self._record is not None and category != self._category:
            self._record.change(category, self._step)
        self._since, self._category = now, category

    def begin(self, step: int, batch: int = -1) -> None:
        """From now on time is spent on the way to `step`.

        Args:
          step: the step.
          batch: the number of its batch; -1 for none.
        """
        self._step = step
        if self._record is not None:
            self._record.set_batch(batch)

    @contextmanager
    def phase(self, category: Category) -> Iterator[None]:
        """Within the block time belongs to `category`, and after it to what ran before; a profile
        shows it."""
        before = self._category
        self.enter(category)
        try:
            with jax.profiler.TraceAnnotation(_ANNOTATIONS.get(category, category)):
                yield
        finally:
            self.enter(before)

    def program(self) -> AbstractContextManager[None]:
        """Around what a program of the devices may block: it waits there for other processes."""
        return nullcontext() if self._record is None else self._record.program()

    def totals(self) -> dict[Category, float]:
        """Seconds a category so far; they sum to the age of the ledger."""
        self.enter(self._category)
        return dict(self._totals)

    def open(self, path: Path, start_step: int, facts: Mapping[str, object] | None = None) -> None:
        """Write from now on to `path`, as a new attempt that starts after `start_step`.

        Args:
          path: the file.
          start_step: steps already done.
          facts: what else its first line says.
        """
        earlier = [r["attempt"] for r in read_json_lines(path)]
        self._attempt = max(earlier, default=0) + 1
        self._file = JsonLines(path)
        now = self._wall(self._clock())
        self._file.write(
            {"attempt": self._attempt, "start_step": start_step, "time": now, **(facts or {})}
        )
        self.flush(start_step)

    def flush(self, step: int, *, after: float = 0.0) -> None:
        """Write what was added since the last flush; `step` is the last step it contains.

        Args:
          step: the step.
          after: write only when the last line is this many seconds old.
        """
        if self._clock() - self._written_at < after:
            return
        totals, spans = self.totals(), self._spans
        self._written_at, self._spans = self._since, []
        if self._file is None:
            return
        added = {c: totals[c] - self._written[c] for c in CATEGORIES}
        self._written = totals
        self._file.write(
            {
                "attempt": self._attempt,
                "step": step,
                "time": self._wall(self._since),
                "seconds": {c: round(s, 6) for c, s in added.items() if s > 0},
                "spans": [[c, round(s, 6)] for c, s in spans if s > 0],
            }
        )

    def rewind(self, step: int, back_to: int, batches: Sequence[int]) -> None:
        """Write that the run goes back from `step` to `back_to` and leaves `batches` out."""
        self.flush(step)
        if self._file is not None:
            self._file.write(
                {
                    "attempt": self._attempt,
                    "rewind_to": back_to,
                    "step": step,
                    "batches": list(batches),
                    "time": self._wall(self._since),
                }
            )

    def close(self, step: int) -> None:
        """Write the rest and close the file."""
        self.flush(step)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _wall(self, now: float) -> float:
        return round(self._offset + now, 6)
