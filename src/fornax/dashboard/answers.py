"""The answers of the interface: what each address says, from the store of runs."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from fornax import __version__
from fornax.dashboard import views
from fornax.dashboard.captures import CaptureFound, find_capture
from fornax.dashboard.configs import difference
from fornax.dashboard.numbers import Query
from fornax.dashboard.runs import Found, Summary
from fornax.dashboard.samples import ORDERS, Order, SampleFiles
from fornax.dashboard.series import AXES, Axis
from fornax.dashboard.store import RunStore

__all__ = ["Answers", "NotFoundError", "RefusedError"]

_MOST_CURVES = 5000
_REST, _MOST_MADE = 10.0, 32
_FEWEST_POINTS, _MOST_POINTS = 10, 20_000

Json = dict[str, Any]


class NotFoundError(Exception):
    """There is no such thing; the text says what there is."""


class RefusedError(Exception):
    """A question that makes no sense; the text says why."""


class Answers:
    """Answers by their parts of the address. Methods may be called from any thread."""

    def __init__(self, store: RunStore) -> None:
        """Answers about the runs of a store."""
        self.store = store
        self._samples = SampleFiles(store.folder)
        self._views: dict[str, Callable[[Found, Json], Json | None]] = {
            "names": lambda run, _: self._names(run),
            "samples": self._samples_of,
            "goodput": self._seldom(lambda run: views.goodput(store.folder, run)),
            "events": lambda run, q: views.events(store.folder, run, q["limit"]),
            "server": self._seldom(lambda run: views.server(store.folder, run)),
            "data": lambda run, _: views.data(store.folder, run, self._summary(run.id)),
            "memory": lambda run, _: views.memory(store.folder, run, self._summary(run.id)),
            "images": lambda run, q: views.images(store.folder, run, q["offset"], q["limit"]),
            "quantization": lambda run, _: views.quantization(store.folder, run),
        }

    def about(self, *, control: bool, token: bool) -> Json:
        """What this server is."""
        return {
            "version": __version__,
            "folder": self.store.folder.root.rpartition("/")[2],
            "control": control,
            "token": token,
        }

    def runs(self) -> Json:
        """The list."""
        free, total = self.store.disk()
        lines = list(self.store.runs().values())
        disk = {"free": free, "total": total}
        return {"runs": lines, "truncated": self.store.truncated, "disk": disk}

    def run(self, name: str) -> Found:
        """A run by its name.

        Raises:
          NotFoundError: there is none.
        """
        found = self.store.find(name)
        if found is None:
            raise NotFoundError(f"there is no run {name[:200]!r}; /api/runs lists those there are")
        return found

    def part(self, path: str, query: Json) -> Any:
        """What is under `/api/runs/`: a run, or a part of it.

        Raises:
          NotFoundError: there is no such run or part.
          RefusedError: for a value that cannot be.
        """
        self.store.look()
        name, _, part = path.rpartition("/")
        if self.store.find(path) is None and name and part in self._views:
            return self._views[part](self.run(name), query)
        run, summary = self.run(path), self._summary(path)
        found = views.details(self.store, run, summary)
        numbers = self.store.numbers.known(path)
        skipped = {"junk": numbers.tail.junk, "huge": numbers.tail.huge} if numbers else None
        return {**self._line(path), **found, "skipped": skipped}

    def capture(self, name: str, capture: str) -> CaptureFound:
        """A capture of a run.

        Raises:
          NotFoundError: there is no such run, or it has no such capture.
        """
        found = find_capture(self.store.folder, self.run(name), capture)
        if found is None:
            raise NotFoundError(
                f"the run {name[:200]!r} has no capture {capture[:200]!r} below profile/"
            )
        return found

    def _summary(self, name: str) -> Summary:
        with self._there(name):
            return self.store.summary(name)

    def _line(self, name: str) -> Json:
        with self._there(name):
            return self.store.line(name)

    @contextlib.contextmanager
    def _there(self, name: str) -> Iterator[None]:
        """Around what a run that goes meanwhile has not."""
        try:
            yield
        except KeyError:
            raise NotFoundError(f"the run {name[:200]!r} has just gone") from None

    def _seldom(self, view: Callable[[Found], Json]) -> Callable[[Found, Json], Json]:
        """A view that is made again only when ten times of what it took have passed."""
        made: dict[str, tuple[float, float, Json]] = {}

        def seldom(run: Found, _: Json) -> Json:
            began = time.monotonic()
            at, took, found = made.get(run.id, (-math.inf, 0.0, {}))
            if began - at > _REST * took:
                found = view(run)
                now = time.monotonic()
                made[run.id] = (now, now - began, found)
                while len(made) > _MOST_MADE:
                    made.pop(next(iter(made)), None)
            return found

        return seldom

    def _names(self, run: Found) -> Json:
        table = self.store.numbers.whole(run.id, run.path / "metrics.jsonl").table
        rows = []
        for name in table.names():
            values, steps = table.values(name), table.x(name, "step")
            row = {
                "name": name,
                "count": len(values),
                "first_step": float(steps[0]),
                "last_step": float(steps[-1]),
                "last": float(values[-1]),
            }
            rows.append(row)
        return {"names": rows, "x": table.axes(), "axes": {"tokens": table.counter()}}

    def _samples_of(self, run: Found, query: Json) -> Json:
        order = query["order"]
        if order not in ORDERS:
            raise RefusedError(f"order={order[:50]!r} is none of {', '.join(ORDERS)}")
        return self._samples.find(
            run.path / "samples.jsonl",
            step=query["step"],
            prompt=query["prompt"],
            search=query["search"],
            order=cast("Order", order),
            offset=query["offset"],
            limit=query["limit"],
        )

    def series(
        self,
        runs: Sequence[str],
        names: Sequence[str],
        axis: str,
        points: int,
        begin: float | None,
        end: float | None,
    ) -> bytes:
        """Curves, as JSON.

        Raises:
          NotFoundError: one of the runs is not there.
          RefusedError: for a value that cannot be.
        """
        if axis not in AXES:
            raise RefusedError(f"x={axis[:50]!r} is none of {', '.join(AXES)}")
        if not _FEWEST_POINTS <= points <= _MOST_POINTS:
            raise RefusedError(f"points={points} must be {_FEWEST_POINTS} to {_MOST_POINTS}")
        if not runs or not names:
            raise RefusedError("series need at least one run= and one name=")
        if len(runs) * len(names) > _MOST_CURVES:
            raise RefusedError(f"at most {_MOST_CURVES} curves at once; ask for fewer")
        queries = [
            (
                Query(name, metric, cast("Axis", axis), points, begin, end),
                self.run(name).path / "metrics.jsonl",
            )
            for name in runs
            for metric in names
        ]
        return b'{"series":' + self.store.numbers.series(queries) + b"}"

    def diff(self, runs: Sequence[str]) -> Json:
        """Where configs differ.

        Raises:
          NotFoundError: one of the runs is not there.
          RefusedError: for fewer than two runs.
        """
        if not 2 <= len(runs) <= 100:
            raise RefusedError("a difference needs 2 to 100 run=")
        for name in runs:
            self.run(name)
        configs = [self._summary(name).config for name in runs]
        return {"runs": list(runs), "keys": difference(configs)}
