"""The server's log: what happens, on standard error; requests, on standard output.

A line a request is written by a thread of its own, several at a time, so that a request pays for
little more than its place in a queue.
"""

import datetime
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TextIO

from fornax.config.background import BackgroundQueue
from fornax.config.errors import ServingCode, ServingError
from fornax.serving.events import Outcome, Refusal, StateChange
from fornax.serving.types import InferRequest, InferResult

__all__ = ["AccessLog", "StateLog", "configure_logging"]

Format = Literal["text", "json"]

_log = logging.getLogger("fornax.serving")
_OK = "OK"
_MOST = 1024
"""Characters of a field of a line: clients choose them, and many lines may wait."""


def configure_logging(form: Format, level: str) -> None:
    """Send the log of Fornax and of its HTTP server to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if form == "json" else _TextLines())
    for name in ("fornax", "uvicorn", "grpc", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == "fornax" else logging.WARNING)


class StateLog:
    """Logs models' changes of state; `changed` is a listener of `Events`."""

    def __init__(self) -> None:
        self.failed: set[tuple[str, str]] = set()
        """Versions that could not be served when last tried."""
        self._before: dict[tuple[str, str], str] = {}

    def changed(self, change: StateChange) -> None:
        """A version entered a state; one that fails to load is an error."""
        key = (change.name, change.version)
        before = self._before.get(key, "LOADING")
        failed = change.state == "UNAVAILABLE" and before == "LOADING"
        self._before[key] = change.state
        if failed:
            self.failed.add(key)
        else:
            self.failed.discard(key)
        what = f"{change.name} {change.version}".strip()
        words = f"{what}: {change.state.lower()}"
        if change.seconds:
            words += f" after {change.seconds:.1f} s"
        if change.reason:
            words += f": {change.reason}"
        fields = {
            "model": change.name,
            "version": change.version,
            "state": change.state,
            "reason": change.reason or None,
        }
        level = logging.ERROR if failed else logging.INFO
        _log.log(level, "%s", words, extra={"fields": fields})


class _TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = f"{_stamp(record.created)} {record.levelname.lower()} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _json(fields)


class AccessLog:
    """Lines of requests. `finished` and `refused` are listeners of `Events`."""

    def __init__(
        self,
        *,
        which: Literal["errors", "all"],
        form: Format,
        write: Callable[[str], object] | None = None,
    ):
        """`write` takes whole lines; None: standard output."""
        self._all = which == "all"
        self._line = _json if form == "json" else _words
        self._write = write or _Stdout(sys.stdout)
        self._queue = BackgroundQueue(self._lines, "fornax-access-log")

    def finished(self, request: InferRequest, outcome: Outcome) -> None:
        """A request that a model was asked for has its answer or its error."""
        answered = isinstance(outcome, InferResult)
        if answered and not self._all:
            return
        now = time.monotonic()
        first = next(iter(request.inputs.values()), None)
        line: dict[str, object] = {
            "id": request.id[:_MOST],
            "request_id": request.request_id,
            "model": request.model[:_MOST],
            "version": request.version[:_MOST],
            "function": request.function[:_MOST],
            "rows": first.shape[0] if first is not None and first.ndim else None,
            "seconds": now - request.received if request.received else None,
        }
        if isinstance(outcome, InferResult):
            timing = outcome.timing
            line |= {
                "version": outcome.version,
                "function": outcome.function,
                "code": _OK,
                "queue_us": timing.queue // 1000,
                "compute_us": (timing.compute_input + timing.compute_infer + timing.compute_output)
                // 1000,
            }
        else:
            line |= {
                "code": _code(outcome).name,
                "error": str(outcome)[:_MOST] or type(outcome).__name__,
            }
        self._queue.add((time.time(), line))

    def refused(self, refusal: Refusal) -> None:
        """A protocol refused a request."""
        line: dict[str, object] = {
            "id": refusal.id[:_MOST],
            "request_id": refusal.request_id,
            "model": refusal.model[:_MOST],
            "protocol": refusal.protocol,
            "code": refusal.code.name,
            "error": refusal.message[:_MOST],
        }
        self._queue.add((time.time(), line))

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._queue.close()

    def _lines(self, entries: Sequence[tuple[float, Mapping[str, object]]]) -> None:
        lines = []
        for when, entry in entries:
            said = {key: value for key, value in entry.items() if value != ""}
            lines.append(self._line({"time": _stamp(when), **said}))
        if left_out := self._queue.take_left_out():
            lines.append(self._line({"time": _stamp(time.time()), "left_out": left_out}))
        self._write("\n".join(lines) + "\n")


class _Stdout:
    """Writes until nobody reads: a log that cannot be written must not stop the server."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._broken = False

    def __call__(self, text: str) -> None:
        if self._broken:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._broken = True
            _log.error("the access log cannot be written any more: %s", error)


def _code(error: BaseException) -> ServingCode:
    """What became of a request, by its error."""
    if isinstance(error, ServingError):
        return error.code
    is_cancel = type(error).__name__ == "CancelledError"
    return ServingCode.CANCELLED if is_cancel else ServingCode.INTERNAL


def _stamp(seconds: float) -> str:
    when = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json(fields: Mapping[str, object]) -> str:
    shown = {
        key: round(value, 6) if isinstance(value, float) else value
        for key, value in fields.items()
        if value is not None
    }
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":"), default=str)


def _words(fields: Mapping[str, object]) -> str:
    words = []
    for key, value in fields.items():
        if value is None:
            continue
        text = f"{value:.6f}" if isinstance(value, float) else str(value)
        plain = text.isprintable() and " " not in text and '"' not in text
        words.append(text if key == "time" else f"{key}={text if plain else json.dumps(text)}")
    return " ".join(words)
