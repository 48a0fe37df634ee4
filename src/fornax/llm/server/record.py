"""One request as the access log has it: a line of JSON."""

import json
import logging
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Send

__all__ = ["Record", "configure_logging", "log_access"]

_access = logging.getLogger("fornax.llm.access")


@dataclass(slots=True)
class Record:
    """What is known of a request; routes add to `fields`."""

    id: str
    method: str
    path: str
    client: str
    send: Send
    """The connection itself, past what wraps a response's start."""
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    """499 when the client went away first."""
    handler: str = "none"
    """The route's path, as the metrics name it."""
    fields: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """The log's line."""
        seconds = time.monotonic() - self.started
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": self.id,
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(seconds, 4),
            **{name: value for name, value in self.fields.items() if value is not None},
        }
        return json.dumps(entry, ensure_ascii=False, separators=(",", ":"))


def log_access(record: Record) -> None:
    """Write the line."""
    _access.info("%s", record.line())


def configure_logging() -> None:
    """Access log to standard output as it is, everything else to standard error with its level."""
    plain = logging.StreamHandler(sys.stdout)
    plain.setFormatter(logging.Formatter("%(message)s"))
    _access.handlers[:] = [plain]
    _access.propagate = False
    _access.setLevel(logging.INFO)
    others = logging.StreamHandler(sys.stderr)
    others.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("fornax", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [others]
        logger.propagate = False
        logger.setLevel(logging.INFO)
