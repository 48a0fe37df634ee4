"""Captures of a run's steps: those that its config names, those it is asked for, one in this many.

Every process captures the same steps. While one runs each step is awaited before the next begins,
so that a step's operations lie inside it. Without a capture nothing of this is to be noticed.
"""

import math
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax

from fornax.config.errors import ProfileError
from fornax.config.run_requests import Request, answer, pending
from fornax.mesh import hosts
from fornax.profile import Capture, CaptureOptions
from fornax.train.config import ProfileConfig
from fornax.train.goodput import Ledger
from fornax.train.run_dir import RunDirectory

__all__ = ["Captures", "Inbox"]

_MOST_SECONDS = 600.0
"""Of one capture; its size is bounded besides."""
_LOOK_SECONDS = 1.0
_MOST_TURNS = 1000


@dataclass(frozen=True, kw_only=True)
class _Running:
    capture: Capture | None
    """None: the profiler did not start in this process."""
    first: int
    last: int
    request: Request | None
    continuous: bool


@dataclass(kw_only=True)
class Captures:
    """When a capture begins and ends. A profiler that fails costs the capture, not the run."""

    config: ProfileConfig
    directory: RunDirectory
    log: Callable[[str], None]
    """Shows a line of text, in the first process."""
    ledger: Ledger
    _asked: deque[tuple[int, Request | None]] = field(default_factory=deque)
    _running: _Running | None = None

    def __post_init__(self) -> None:
        """Read the window once: every step asks."""
        self._window = self.config.window

    def ask(self, steps: int, request: Request | None) -> None:
        """Capture this many steps as soon as no other capture runs; None where another process
        answers."""
        self._asked.append((steps, request))

    @property
    def running(self) -> bool:
        """Whether steps are being captured."""
        return self._running is not None

    def due(self, step: int) -> bool:
        """Whether a capture is to begin with `step`."""
        if self._running is not None:
            return False
        window, every = self._window, self.config.every
        begins = window is not None and step == window[0]
        return begins or bool(self._asked) or (every is not None and step % every == 0)

    def begin(self, step: int) -> None:
        """Begin the capture that is due with `step`, in all processes; nothing is in flight on the
        devices."""
        window, last, request, continuous = self._window, step, None, False
        if window is not None and step == window[0]:
            last = window[1]
        elif self._asked:
            steps, request = self._asked.popleft()
            last = step + steps - 1
        else:
            continuous = True
        now = hosts.decide(lambda: time.strftime("%Y_%m_%d_%H_%M_%S"))
        # Padded, so that names are in order within a second too.
        name = f"{now}_step_{step:08}" + (f"_to_{last:08}" if last > step else "")
        options = CaptureOptions(seconds=_MOST_SECONDS, folder=name)
        capture = Capture(self._folder(continuous=continuous), options)
        try:
            with self.ledger.phase("profile"):
                capture.start()
        except ProfileError as error:
            self._failed(request, f"steps {step} to {last} are not captured: {error}")
            capture = request = None
        self._running = _Running(
            capture=capture, first=step, last=last, request=request, continuous=continuous
        )

    def end(self, step: int, *, early: bool = False) -> None:
        """End the capture that runs if `step` was its last, or with `early` whatever it was."""
        running = self._running
        if running is None or (step < running.last and not early):
            return
        self._running = None
        if running.capture is None:
            return
        steps = f"steps {running.first} to {step}"
        try:
            with self.ledger.phase("profile"):
                folder = running.capture.stop()
        except ProfileError as error:
            self._failed(running.request, f"the capture of {steps} is lost: {error}")
            return
        if running.continuous and jax.process_index() == 0:
            self._prune()
        if running.request is not None:
            result = {"directory": str(folder), "steps": [running.first, step]}
            answer(running.request, result=result)
        if not running.continuous:
            self.log(f"{steps} are captured: fornax profile show {folder}")

    def close(self, step: int) -> None:
        """End the capture that runs, and refuse those that were asked for; the run stands there."""
        self.end(step, early=True)
        while self._asked:
            _, request = self._asked.popleft()
            if request is not None:
                answer(request, error=f"the run ended at step {step}, before the capture began")

    def _folder(self, *, continuous: bool) -> Path:
        out = self.config.out
        folder = self.directory.profile if out is None else Path(out).expanduser()
        return folder / "continuous" if continuous else folder

    def _failed(self, request: Request | None, why: str) -> None:
        if request is not None:
            answer(request, error=why)
        self.log(f"{why}. Training continues")

    def _prune(self) -> None:
        """Delete the oldest of the continuous captures, all but this many and this much."""
        parent = self._folder(continuous=True) / "plugins" / "profile"
        folders = sorted(path for path in parent.iterdir() if path.is_dir())
        kept = 0
        for number, folder in enumerate(reversed(folders)):
            kept += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if number and (number >= self.config.keep or kept > self.config.keep_mib << 20):
                shutil.rmtree(folder, ignore_errors=True)


@dataclass(kw_only=True)
class Inbox:
    """What the run is asked for by files (`config/run_requests.py`): about once a second the first
    process looks, and all receive the same before the same step."""

    directory: Path
    log: Callable[[str], None]
    """Shows a line of text, in the first process."""
    _met: set[Path] = field(default_factory=set)
    """Those that were taken: one whose answer cannot be written is not taken again."""
    _looked: float = -math.inf
    _turn: int = 0
    _next_turn: int = 0
    _unreadable: bool = False

    def __post_init__(self) -> None:
        """Refuse what was asked before the run began."""
        if jax.process_index() == 0:
            for request in self._pending():
                answer(request, error="the run did not run when this was asked; ask again")

    def take(self, turn: int) -> list[tuple[str, int, Request | None]]:
        """What was asked since: its kind, a profile's steps (else 0), and in the first process the
        request, to be answered.

        Args:
          turn: counts the calls, alike in all processes.
        """
        if jax.process_count() == 1:
            now = time.monotonic()
            if now - self._looked < _LOOK_SECONDS:
                return []
            self._looked = now
            found = self._valid()
            return [(r.kind or "", r.values.get("steps", 0), r) for r in found]
        if turn < self._next_turn:
            return []
        found: list[Request] = []

        def look() -> tuple[list[tuple[str, int]], int]:
            found.extend(self._valid())
            asked = [(each.kind or "", each.values.get("steps", 0)) for each in found]
            return asked, self._turns_until_next(turn)

        asked, wait = hosts.decide(look)
        self._next_turn = turn + wait
        requests = found or [None] * len(asked)
        return [(kind, steps, r) for (kind, steps), r in zip(asked, requests, strict=True)]

    def _turns_until_next(self, turn: int) -> int:
        """How many turns take about a second, from those since the last look."""
        now = time.monotonic()
        spent, turns = now - self._looked, turn - self._turn
        self._looked, self._turn = now, turn
        if not turns or not math.isfinite(spent):
            return 1
        # Not many times as many as before: the first steps compile, later ones may be slower.
        return max(1, min(int(turns * _LOOK_SECONDS / max(spent, 1e-9)), 4 * turns, _MOST_TURNS))

    def _valid(self) -> list[Request]:
        found = []
        for request in self._pending():
            self._met.add(request.path)
            if request.error is not None:
                answer(request, error=request.error)
            else:
                found.append(request)
        return found

    def _pending(self) -> list[Request]:
        try:
            return [each for each in pending(self.directory) if each.path not in self._met]
        except OSError as error:
            if not self._unreadable:
                self._unreadable = True
                self.log(
                    f"cannot read {self.directory / 'requests'}: {error.strerror or error}; the "
                    "run continues, and nothing can be asked of it by files"
                )
            return []
