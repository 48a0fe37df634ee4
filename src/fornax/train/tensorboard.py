"""TensorBoard's event files. A module of its own: the package behind it is slow to import."""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import RecordWriter

from fornax.config.files import is_full
from fornax.config.jsonl import refused
from fornax.train.metrics import Record, numbers

__all__ = ["TensorBoard"]

# Classes that protobuf makes at run time, where no type checker sees them.
Event: Any = event_pb2.Event  # pyrefly: ignore[missing-attribute]
SessionLog: Any = event_pb2.SessionLog  # pyrefly: ignore[missing-attribute]
Summary: Any = summary_pb2.Summary  # pyrefly: ignore[missing-attribute]


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
        values = [Summary.Value(tag=name, simple_value=x) for name, x in numbers(record)]
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
        the file may end in the middle of one: the next goes to another file."""
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
