"""Where metrics go: `metrics.jsonl` always, TensorBoard and Weights & Biases when asked for.

A record is a flat dict of one step: `step`, `time` (Unix seconds) and numbers. In `metrics.jsonl`
every logged step stands exactly once, over all kills and resumes: a resumed run first drops the
lines of steps after its checkpoint, then writes them again.
"""

import contextlib
import importlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import RecordWriter

from fornax.config.errors import ConfigError
from fornax.config.files import is_full
from fornax.config.jsonl import JsonLines, keep_json_lines, read_json_lines, refused
from fornax.train.config import WandbConfig

__all__ = ["MetricsFile", "Sink", "TensorBoard", "Wandb", "read_metrics"]

Record = Mapping[str, Any]

# Classes that protobuf makes at run time, where no type checker sees them.
Event: Any = event_pb2.Event  # pyrefly: ignore[missing-attribute]
SessionLog: Any = event_pb2.SessionLog  # pyrefly: ignore[missing-attribute]
Summary: Any = summary_pb2.Summary  # pyrefly: ignore[missing-attribute]


class Sink(Protocol):
    """Something that takes records."""

    def write(self, record: Record) -> None:
        """Take the record of one step."""
        ...

    def rewind(self, step: int) -> None:
        """Forget the records of steps after `step`: they come again."""
        ...

    def close(self) -> None:
        """Write out what is buffered."""
        ...


class MetricsFile:
    """`metrics.jsonl`: one line a logged step, flushed, each step once."""

    def __init__(self, path: Path, start_step: int) -> None:
        """Open for appending after dropping the lines of steps after `start_step`."""
        self._open(path, start_step)

    def _open(self, path: Path, step: int) -> None:
        keep_json_lines(path, lambda record: record["step"] <= step)
        self._lines = JsonLines(path)

    def write(self, record: Record) -> None:
        """Append the record."""
        self._lines.write(record)

    def rewind(self, step: int) -> None:
        """Drop the lines of steps after `step`."""
        self.close()
        self._open(self._lines.path, step)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_metrics(path: Path) -> list[dict[str, object]]:
    """The records of a `metrics.jsonl` in order of steps."""
    return read_json_lines(path)


class TensorBoard:
    """Event files; steps after `start_step` of an earlier attempt are hidden by the new ones.

    tensorboardX's own writer hands events to a thread. When that dies, of a full disk for example,
    its queue fills and training waits for ever; so events are written here, at once.
    """

    def __init__(self, directory: Path, start_step: int, flush_seconds: float = 20.0) -> None:
        """Open a new event file in `directory`.

        Raises:
          FornaxError: when the disk refuses.
        """
        self._directory, self._files = directory, 0
        self._flush_seconds, self._flushed_at = flush_seconds, -float("inf")
        self._writer: RecordWriter | None = None
        self._open()
        self.rewind(start_step)

    def write(self, record: Record) -> None:
        """Write each number under its name; readers see it within `flush_seconds`.

        Raises:
          FornaxError: when the disk refuses.
        """
        values = [Summary.Value(tag=name, simple_value=x) for name, x in _numbers(record)]
        summary = Summary(value=values)
        self._write(Event(wall_time=record["time"], step=record["step"], summary=summary))

    def rewind(self, step: int) -> None:
        """Have readers hide what was written of steps after `step`.

        Raises:
          FornaxError: when the disk refuses.
        """
        purge = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=step + 1, session_log=purge))

    def close(self) -> None:
        """Flush and close.

        Raises:
          FornaxError: when the disk refuses.
        """
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            raise refused(self._path, error) from error

    def _open(self) -> None:
        """Begin a file."""
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._path = self._directory / (f"{name}.{self._files}" if self._files else name)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter(str(self._path))
        except OSError as error:
            if self._files and is_full(error):
                return
            raise refused(self._path, error) from error
        self._files += 1
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def _write(self, event: Event) -> None:
        """Write an event. Those that find a full disk are lost, as metrics.jsonl has them all, and
        the file may end amid one: the next goes to another file."""
        if self._writer is None:
            self._open()
        if self._writer is None:
            return
        try:
            self._writer.write(event.SerializeToString())
            if time.monotonic() - self._flushed_at >= self._flush_seconds:
                self._writer.flush()
                self._flushed_at = time.monotonic()
        except OSError as error:
            if not is_full(error):
                raise refused(self._path, error) from error
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None


class Wandb:
    """A Weights & Biases run, named by the run directory so that a resume continues it."""

    def __init__(self, config: WandbConfig, run_dir: Path, resolved: Mapping[str, object]) -> None:
        """Start or continue the run.

        Raises:
          ConfigError: when the `wandb` package is not installed.
        """
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                "log.wandb is set and the package `wandb` is not installed; install "
                "`fornax-ai[wandb]`, or remove log.wandb"
            ) from error
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or run_dir.name,
            id=config.name or run_dir.name,
            resume="allow",
            mode=config.mode,
            dir=str(run_dir),
            config=dict(resolved),
        )

    def write(self, record: Record) -> None:
        """Log the numbers at their step."""
        self._run.log(dict(_numbers(record)), step=record["step"])

    def rewind(self, step: int) -> None:
        """Nothing: the service keeps what was logged first, and warns of the steps that follow."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _numbers(record: Record) -> Sequence[tuple[str, float]]:
    return [
        (name, float(value))
        for name, value in record.items()
        if name not in ("step", "time") and isinstance(value, int | float)
    ]
