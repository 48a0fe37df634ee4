"""What a compilation shows while it works: its phase and seconds, on standard error."""

import sys
import time
from typing import Protocol, TextIO

__all__ = ["Lines", "Progress", "Quiet", "choose"]


class Progress(Protocol):
    """Shows which phase a compilation is in."""

    def phase(self, what: str) -> None:
        """Another phase begins, such as `train_step: compiling`."""
        ...

    def tick(self) -> None:
        """A second or so has passed."""
        ...

    def close(self) -> None:
        """It is over, one way or the other."""
        ...


class Quiet:
    """Shows nothing."""

    def phase(self, what: str) -> None:
        """Show nothing."""

    def tick(self) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Show nothing."""


class Lines:
    """A line that counts seconds on a terminal; elsewhere a line for each phase."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        """Write to `stream` (standard error), each line headed by `title`."""
        self._title = title
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._what = ""
        self._begun = time.monotonic()

    def phase(self, what: str) -> None:
        """Finish the last phase's line and begin another."""
        self._finish()
        self._what, self._begun = what, time.monotonic()
        self.tick()

    def tick(self) -> None:
        """Count on."""
        if self._live and self._what:
            self._write(f"\r{self._line()}")

    def close(self) -> None:
        """Finish the last line."""
        self._finish()
        self._what = ""

    def _finish(self) -> None:
        if self._what:
            self._write(f"\r{self._line()}\n" if self._live else f"{self._line()}\n")

    def _line(self) -> str:
        return f"{self._title}  {self._what}  {time.monotonic() - self._begun:.0f} s"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def choose(title: str, *, quiet: bool = False) -> Progress:
    """What to show: lines on standard error, or nothing."""
    return Quiet() if quiet else Lines(title)
