"""Draws requests as they come, from one thread: prepares, batches steps, decodes, tells.

The thread alone touches the device. Callers submit from anywhere and are called back on the thread.
"""

import collections
import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from fornax.config.errors import ConfigError, EngineError, FornaxError
from fornax.diffusion.pipelines import ImageRequest, Job, Pipeline, plan
from fornax.diffusion.server.slots import Programs, Slots, kind_of
from fornax.llm.stats import Readiness

__all__ = ["Done", "Drawing", "Engine", "Failed", "Observer", "Partial", "Told"]

_log = logging.getLogger(__name__)
_IDLE = 0.5
"""Seconds after which an idle thread looks whether it should end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """An image on its way: what the network claims at a step."""

    image: int
    """Which of the request's images."""
    index: int
    """How many partial images of it came before."""
    pixels: np.ndarray
    """uint8 [H, W, C]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """An image."""

    image: int
    pixels: np.ndarray
    """uint8 [H, W, C]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without its images."""

    error: Exception


Told = Partial | Done | Failed


class Observer:
    """Called by the thread about what it does; the metrics are one."""

    def step(self, rows: int, width: int, seconds: float) -> None:
        """A step of `rows` rows in a program of `width`."""

    def waiting(self, requests: int, rows: int) -> None:
        """Requests that wait, rows that run."""

    def finished(self, outcome: str, seconds: float, queued: float) -> None:
        """A request ended (`done`, `cancelled`, `failed`), this long after it came, having waited
        `queued` seconds of them."""


@dataclasses.dataclass(eq=False)
class Drawing:
    """A request in the engine."""

    request: ImageRequest
    partials: int
    """Partial images of each image."""
    tell: Callable[[Told], None]
    """Called on the engine's thread."""
    cancelled: bool = False
    """Set by the caller when it needs no more of it; its slots are free before the next step."""
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    started: float | None = None
    left: int = 0
    """Images still to come."""
    told: dict[int, int] = dataclasses.field(default_factory=dict)
    """Partial images sent, by image."""


@dataclasses.dataclass(eq=False)
class _Waiting:
    drawing: Drawing
    job: Job
    row: int


class _Batch:
    """The rows of one kind: those in slots, those that wait for one."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.rows: dict[int, tuple[Drawing, int]] = {}
        self.waiting: collections.deque[_Waiting] = collections.deque()


class Engine:
    """A pipeline that draws for many at once."""

    def __init__(
        self, pipeline: Pipeline, *, widths: Sequence[int] = (4,), observer: Observer | None = None
    ):
        """An engine that does not run yet.

        Args:
          pipeline: what draws.
          widths: rows of the compiled programs. One: an image is the same bit for bit whatever else
            is drawn. More: a request alone runs in the narrowest, and its last bits may differ from
            those it has in company.
          observer: told of steps and requests.

        Raises:
          ConfigError: no width, or one below 1.
        """
        if not widths or min(widths) < 1:
            raise ConfigError(f"widths={tuple(widths)}; give one or more, each at least 1")
        self.pipeline = pipeline
        self.slots = max(widths)
        self._widths = tuple(widths)
        self._programs = Programs(pipeline)
        self._observer = observer or Observer()
        self._arrivals: queue.SimpleQueue[Drawing | None] = queue.SimpleQueue()
        self._batches: dict[Hashable, _Batch] = {}
        self._thread = threading.Thread(target=self._run, name="fornax-diffusion", daemon=True)
        self._ending = False
        self._warm: list[ImageRequest] = []
        self._warmed = 0
        self._began = 0.0
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self.num_unfinished = 0
        """Requests that wait or run."""

    def start(self, warm: Sequence[ImageRequest] = ()) -> None:
        """Run, after requests that compile what others need."""
        self._warm, self._began = list(warm), time.monotonic()
        self._thread.start()

    def readiness(self) -> Readiness:
        """How many of `start`'s requests ran."""
        done, total = self._warmed, len(self._warm)
        left = (time.monotonic() - self._began) / done * (total - done) if done else None
        return Readiness(done, total, left)

    def error(self) -> Exception | None:
        """Why the thread ended, if it was not told to."""
        return self._error

    def shutdown(self) -> None:
        """End the thread; what runs fails."""
        self._ending = True
        self._arrivals.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def submit(
        self, request: ImageRequest, tell: Callable[[Told], None], *, partials: int = 0
    ) -> Drawing:
        """Draw a request; `tell` is called on the engine's thread.

        Raises:
          EngineError: the engine ended.
        """
        drawing = Drawing(request, partials, tell)
        with self._lock:
            if self._error is not None or self._ending:
                raise EngineError("the engine ended; start the server again")
            self.num_unfinished += 1
        self._arrivals.put(drawing)
        return drawing

    def _run(self) -> None:
        try:
            for request in self._warm:
                self._draw_alone(request)
                self._warmed += 1
            while not self._ending:
                self._arrive()
                self._fill()
                for kind in list(self._batches):
                    self._advance(kind)
        except Exception as error:
            _log.exception("the engine failed")
            self._error = error
        finally:
            self._end()

    def _draw_alone(self, request: ImageRequest) -> None:
        job = plan(self.pipeline, request)
        slots = Slots(self._programs, job, self._widths)
        for width in self._widths:
            for slot in range(width):
                slots.join(slot, job, 0)
            while not slots.advance():
                pass
            self.pipeline.images(slots.latent(0))
            for slot in range(width):
                slots.leave(slot)

    def _arrive(self) -> None:
        """Prepare what came, no more than one batch of it ahead; wait where nothing runs."""
        batches = self._batches.values()
        idle = not any(batch.rows or batch.waiting for batch in batches)
        with contextlib.suppress(queue.Empty):
            while idle or sum(len(batch.waiting) for batch in batches) < self.slots:
                drawing = self._arrivals.get(timeout=_IDLE if idle else None, block=idle)
                idle = False
                if drawing is not None:
                    self._prepare(drawing)

    def _prepare(self, drawing: Drawing) -> None:
        if drawing.cancelled:
            self._finish(drawing, "cancelled")
            return
        try:
            job = plan(self.pipeline, drawing.request)
            kind = kind_of(job)
            if kind not in self._batches:
                self._batches[kind] = _Batch(Slots(self._programs, job, self._widths))
        except Exception as error:
            self._fail(drawing, error)
            return
        drawing.left = drawing.request.count
        for row in range(drawing.left):
            self._batches[kind].waiting.append(_Waiting(drawing, job, row))

    def _fill(self) -> None:
        """Free the slots of who left, give them to who waits; drop what nobody is in."""
        for kind, batch in list(self._batches.items()):
            for slot, (drawing, _) in list(batch.rows.items()):
                if drawing.cancelled:
                    self._leave(batch, slot)
                    self._finish(drawing, "cancelled")
            for waiting in [each for each in batch.waiting if each.drawing.cancelled]:
                batch.waiting.remove(waiting)
                self._finish(waiting.drawing, "cancelled")
            for slot in batch.slots.free:
                if not batch.waiting:
                    break
                self._join(batch, slot, batch.waiting.popleft())
            if not batch.rows and not batch.waiting:
                del self._batches[kind]
        rows = sum(len(batch.rows) for batch in self._batches.values())
        requests = {id(each.drawing) for b in self._batches.values() for each in b.waiting}
        self._observer.waiting(len(requests), rows)

    def _join(self, batch: _Batch, slot: int, waiting: _Waiting) -> None:
        drawing = waiting.drawing
        try:
            batch.slots.join(slot, waiting.job, waiting.row)
        except FornaxError as error:
            self._fail(drawing, error)
            return
        drawing.started = drawing.started or time.monotonic()
        batch.rows[slot] = (drawing, waiting.row)

    def _advance(self, kind: Hashable) -> None:
        batch = self._batches[kind]
        if not batch.rows:
            return
        began = time.monotonic()
        ended = batch.slots.advance()
        rows = len(batch.rows)
        self._observer.step(rows, batch.slots.width(rows), time.monotonic() - began)
        for slot, (drawing, image) in list(batch.rows.items()):
            if drawing.cancelled:
                continue
            try:
                if slot in ended:
                    pixels = self.pipeline.images(batch.slots.latent(slot))[0]
                    self._leave(batch, slot)
                    drawing.left -= 1
                    if not drawing.left:  # before its client can ask
                        self._finish(drawing, "done")
                    self._tell(drawing, Done(image, pixels))
                elif (index := self._due(batch, slot, drawing, image)) is not None:
                    pixels = self.pipeline.images(batch.slots.claim(slot))[0]
                    self._tell(drawing, Partial(image, index, pixels))
            except Exception as error:
                self._fail(drawing, error)

    def _due(self, batch: _Batch, slot: int, drawing: Drawing, image: int) -> int | None:
        """The number of the partial image that a row still has to send, if any."""
        made, steps = batch.slots.step_of(slot)
        told = drawing.told.get(image, 0)
        if told >= drawing.partials or made * (drawing.partials + 1) < (told + 1) * steps:
            return None
        drawing.told[image] = told + 1
        return told

    def _leave(self, batch: _Batch, slot: int) -> None:
        batch.slots.leave(slot)
        del batch.rows[slot]

    def _fail(self, drawing: Drawing, error: Exception) -> None:
        """End a request; its rows leave as those of a cancelled one do."""
        if not drawing.cancelled:
            drawing.cancelled = True
            self._finish(drawing, "failed")
            self._tell(drawing, Failed(error))

    def _tell(self, drawing: Drawing, what: Told) -> None:
        """Call back; a client that cannot be reached any more has left."""
        try:
            drawing.tell(what)
        except Exception:
            _log.debug("a request's caller is gone", exc_info=True)
            drawing.cancelled = True

    def _finish(self, drawing: Drawing, outcome: str) -> None:
        """Count a request that ended, once."""
        if drawing.left < 0:
            return
        drawing.left = -1
        now = time.monotonic()
        queued = (drawing.started or now) - drawing.arrived
        with self._lock:
            self.num_unfinished -= 1
        self._observer.finished(outcome, now - drawing.arrived, queued)

    def _end(self) -> None:
        error = EngineError("the engine ended before the image was done")
        with self._lock:
            self._ending = True
        for batch in self._batches.values():
            for drawing, _ in batch.rows.values():
                self._fail(drawing, error)
            for waiting in batch.waiting:
                self._fail(waiting.drawing, error)
        while not self._arrivals.empty():
            if (drawing := self._arrivals.get_nowait()) is not None:
                self._fail(drawing, error)
        self._batches.clear()
