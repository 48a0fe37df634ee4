"""Batches that a run does not train on: the list in its directory, and the stream without them.

A batch is named by its number in the training stream, from 0, the same as in `data.skip_steps`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fornax.config.errors import ConfigError
from fornax.config.files import write_whole
from fornax.config.jsonl import read_json_lines, refused
from fornax.config.spikes import DrillConfig
from fornax.train.task import Batches, Described

__all__ = ["NumberedBatches", "Rewind", "SkipList"]

Rows = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """One line of `spikes.jsonl`: a spike, and what was done about it."""

    step: int
    """The step that was one."""
    batch: int
    """The number of its batch."""
    metric: str
    """`loss` or `grad_norm`."""
    value: float | None
    """None where it was not finite."""
    median: float | None
    limit: float | None
    skipped: list[int]
    """The batches that it put on the skip list."""
    back_to: int
    """The step that the run went back to."""
    source: str
    """What it went back to: `memory`, `checkpoint` or `start`."""
    time: float
    """Unix seconds."""

    def __str__(self) -> str:
        """What is done, in words."""
        many = "es" if len(self.skipped) > 1 else ""
        numbers = ", ".join(map(str, self.skipped))
        where = {"memory": " (in memory)", "checkpoint": " (a checkpoint)", "start": ""}
        return f"back to step {self.back_to}{where[self.source]}, without batch{many} {numbers}"


class SkipList:
    """The rewinds of a run and the batches that they took out, kept in `spikes.jsonl`."""

    def __init__(self, rewinds: Iterable[Rewind] = (), batches: Iterable[int] = ()) -> None:
        """The batches of `rewinds`, and further ones that a checkpoint lists."""
        self.rewinds = list(rewinds)
        self.batches = {n for rewind in self.rewinds for n in rewind.skipped} | set(batches)

    @classmethod
    def read(cls, path: Path) -> "SkipList":
        """The list of a run directory; empty where it has none.

        Raises:
          ConfigError: when the file is not one of ours.
        """
        try:
            return cls(Rewind(**line) for line in read_json_lines(path))
        except TypeError as error:
            raise ConfigError(
                f"{path} is not a list of rewinds ({error}); put the file of this run back, or "
                "delete it: each checkpoint has the list of its own"
            ) from error

    def add(self, rewind: Rewind) -> None:
        """Take one more rewind up."""
        self.rewinds.append(rewind)
        self.batches.update(rewind.skipped)

    def write(self, path: Path) -> None:
        """Replace the file, so that it outlasts a kill and a power cut.

        Raises:
          FornaxError: when the disk refuses.
        """
        text = "".join(json.dumps(asdict(rewind)) + "\n" for rewind in self.rewinds)
        try:
            write_whole(path, text, durable=True)
        except OSError as error:
            raise refused(path, error) from error

    def contradicts(self, metadata: Mapping[str, Any]) -> bool:
        """Whether a checkpoint, by its metadata, was trained on a batch that is on the list."""
        known, position = set(metadata.get("skipped_batches", ())), metadata.get("batches", 0)
        return any(number < position for number in self.batches - known)


class NumberedBatches(Iterator[Rows]):
    """A training stream that knows the number of each batch and passes those on the list over.

    Args:
      inner: the stream.
      skip: the list; what is added to it later counts too.
      left_out: ranges (start, stop) of numbers that `inner` leaves out by itself.
      drill: batches to spoil.
    """

    def __init__(
        self,
        inner: Batches,
        skip: SkipList,
        left_out: Sequence[tuple[int, int]] = (),
        drill: DrillConfig | None = None,
    ) -> None:
        self._inner, self._left_out = inner, tuple(left_out)
        self.skip = skip
        self._drill = drill or DrillConfig()
        self.position = 0
        """The number that follows on the last batch given or passed over."""

    @property
    def upcoming(self) -> int:
        """The number of the next batch that is given."""
        numbers = _counted_from(self.position)
        return next(n for n in numbers if n not in self.skip.batches and not self._is_left_out(n))

    def __next__(self) -> Rows:
        rows, number = self._following()
        while number in self.skip.batches:
            rows, number = self._following()
        return _spoiled(rows, number, self._drill)

    def _following(self) -> tuple[Rows, int]:
        rows = next(self._inner)
        number = self.position
        while self._is_left_out(number):
            number += 1
        self.position = number + 1
        return rows, number

    def _is_left_out(self, number: int) -> bool:
        return any(start <= number < stop for start, stop in self._left_out)

    def neighbours(self, number: int, *, before: int, after: int) -> list[int]:
        """`number` and those of the nearest batches before and after it that are trained on."""
        down = self._nearest(range(number - 1, -1, -1), before)
        up = self._nearest(_counted_from(number + 1), after)
        return [*sorted(down), number, *up]

    def _nearest(self, numbers: Iterable[int], count: int) -> list[int]:
        found: list[int] = []
        for number in numbers:
            if len(found) == count:
                break
            if number not in self.skip.batches and not self._is_left_out(number):
                found.append(number)
        return found

    def state(self) -> dict[int, dict]:
        """The position of the stream, of this host's virtual shards."""
        return self._inner.state()

    def restore(
        self, state: dict[int, dict], position: int, *, allow_changes: bool = False
    ) -> None:
        """Go to where `state`, the parts of all hosts, was taken, before batch `position`."""
        self._inner.restore(state, allow_changes=allow_changes)
        self.position = position

    def describe(self) -> dict[str, Any]:
        """What the stream is of, JSON-able; empty of one that does not say."""
        return dict(self._inner.describe()) if isinstance(self._inner, Described) else {}

    def close(self) -> None:
        """Stop reading ahead."""
        self._inner.close()


def _counted_from(number: int) -> Iterator[int]:
    while True:
        yield number
        number += 1


def _spoiled(rows: Rows, number: int, drill: DrillConfig) -> Rows:
    if number in drill.nan:
        return _without_a_number(rows)
    if number in drill.noise:
        return _with_random_targets(rows, number)
    return rows


def _without_a_number(rows: Rows) -> Rows:
    name = next((k for k, x in rows.items() if np.issubdtype(x.dtype, np.floating)), None)
    if name is None:
        raise ConfigError(
            f"spikes.drill.nan: the batches of this task ({', '.join(rows)}) have no array of "
            "floating-point numbers; use spikes.drill.noise"
        )
    spoiled = rows[name].copy()
    spoiled[...] = np.nan
    return {**rows, name: spoiled}


def _with_random_targets(rows: Rows, number: int) -> Rows:
    if "targets" not in rows:
        raise ConfigError(
            f"spikes.drill.noise: the batches of this task ({', '.join(rows)}) have no `targets`; "
            "use spikes.drill.nan"
        )
    targets = rows["targets"]
    low, high = targets.min(), targets.max() + 1
    drawn = np.random.default_rng(number).integers(low, high, targets.shape, targets.dtype)
    return {**rows, "targets": drawn}
