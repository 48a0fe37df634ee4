"""What a launched run shows: rank 0's output, one progress bar, and a line per event."""

import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from fornax.cluster.files import ClusterFiles
from fornax.config.text import read_yaml

__all__ = ["Bar", "Terminal"]

_NOISE = re.compile(r"\[Gloo\] |[IWE]\d{4} [\d:.]+ ")
_PROGRESS = re.compile(r"step \d+/\d+  ")
_REFRESH_SECONDS = 0.2


class Bar(Protocol):
    """A progress bar; `fornax.train`'s is one."""

    def start(self, step: int, total: int, unit: str) -> None:
        """Show it at `step` of `total`."""
        ...

    def update(self, record: Mapping[str, Any], seconds_left: float) -> None:
        """Move it; `record` is a line of the metrics."""
        ...

    def log(self, text: str) -> None:
        """Show a line above it."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class Terminal:
    """Follows the files of a run; without a bar every line of rank 0's goes to standard error."""

    def __init__(self, files: ClusterFiles, bar: Bar | None = None) -> None:
        """Show what is new from now on."""
        self._files = files
        self._bar = bar
        self._log = _Tail(files.log(0))
        self._metrics = _Tail(files.run_dir / "metrics.jsonl")
        self._record: dict[str, Any] = {}
        self._total = 0
        self._shown_at = 0.0

    def announce(self, text: str) -> None:
        """An event."""
        self._follow()
        self._say(f"{time.strftime('%H:%M:%S')}  {text}")

    def tick(self, step: int) -> None:
        """Show what came since; `step` is what all ranks have entered."""
        if time.monotonic() - self._shown_at < _REFRESH_SECONDS:
            return
        self._shown_at = time.monotonic()
        self._follow()
        if self._bar is not None and step >= 0:
            self._draw(self._bar, step)

    def close(self) -> None:
        """Show the rest, and leave the terminal as it was."""
        self._follow()
        if self._bar is not None:
            if self._record:
                self._draw(self._bar, self._record["step"])
            self._bar.close()

    def _follow(self) -> None:
        for line in self._log.lines():
            if not _NOISE.match(line) and not (self._bar and _PROGRESS.match(line)):
                self._say(line)

    def _draw(self, bar: Bar, step: int) -> None:
        for line in self._metrics.lines():
            self._record = json.loads(line)
        if not self._record:
            return
        if not self._total:
            self._total = _steps(self._files.run_dir / "config.yaml")
            rate = next((key for key in self._record if key.endswith("_per_second")), "tokens_")
            bar.start(step, self._total, rate.partition("_")[0])
        done = max(step - 1, self._record["step"])
        left = (self._total - done) * self._record.get("step_seconds", 0.0)
        bar.update({**self._record, "step": done}, left)

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.log(line)
        else:
            print(line, file=sys.stderr, flush=True)  # noqa: T201


class _Tail:
    """The whole lines that a file gets; one that shrinks was trimmed, and is read on at its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def lines(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                return self._new(file)
        except FileNotFoundError:
            return []

    def _new(self, file: IO[bytes]) -> list[str]:
        size = file.seek(0, 2)
        if size < self._at:
            self._at, self._rest = size, b""
        file.seek(self._at)
        new = self._rest + file.read()
        self._at = file.tell()
        *whole, self._rest = new.split(b"\n")
        return [line.decode(errors="replace") for line in whole]


def _steps(config: Path) -> int:
    """The steps of a run, of the config that it saved."""
    return int(read_yaml(config.read_text(encoding="utf-8"), str(config))[0]["steps"])
