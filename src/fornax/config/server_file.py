"""`server.jsonl`: what a server did, a line every few seconds, for `fornax ui` to read.

    {"time": 1763683200.0, "kind": "serve", "model": "llama", "running": 3, "waiting": 0, ...}

Every line says `kind` and `model`; numbers are of the moment or of the time since the line before.
The last line of a server that was told to stop has `"stopped": true`. Beyond 4 MB the older half of
the lines goes.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fornax.config.errors import ConfigError
from fornax.config.files import write_whole
from fornax.config.jsonl import append_json_line, keep_json_lines

__all__ = ["SERVER_FILE", "recording_server"]

SERVER_FILE = "server.jsonl"
_SECONDS = 2.0
_MOST_BYTES = 4 << 20

Row = Mapping[str, Any]


@contextlib.contextmanager
def recording_server(
    run_dir: Path | None, kind: str, model: str, row: Callable[[float], Row]
) -> Iterator[None]:
    """Write lines while the block runs, in the running event loop.

    Args:
      run_dir: where; made if it is not there. None: nothing is written.
      kind: `serve` or `host`.
      model: what it serves.
      row: called in the loop with the seconds since the line before; the line's own values.

    Raises:
      ConfigError: the directory cannot be made or written.
    """
    if run_dir is None:
        yield
        return
    path = run_dir / SERVER_FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        path.touch()
        keep_json_lines(path, lambda _: True)  # without the line that a kill tore
    except OSError as error:
        raise ConfigError(
            f"cannot write the run directory {run_dir}: {error.strerror or error}; choose another "
            "with --run-dir, or make this one writable"
        ) from error
    file = _ServerFile(path, {"kind": kind, "model": model}, row)
    task = asyncio.get_running_loop().create_task(file.write_often())
    try:
        yield
    finally:
        task.cancel()
        file.write(stopped=True)


class _ServerFile:
    def __init__(self, path: Path, who: Row, row: Callable[[float], Row]) -> None:
        self._path, self._who, self._row = path, who, row
        self._written_at = time.monotonic()

    async def write_often(self) -> None:
        self.write()
        while True:
            await asyncio.sleep(_SECONDS)
            self.write()

    def write(self, **facts: object) -> None:
        """A line; a disk that refuses it costs the line alone."""
        now = time.monotonic()
        since, self._written_at = now - self._written_at, now
        with contextlib.suppress(OSError):
            if self._path.stat().st_size > _MOST_BYTES:
                lines = self._path.read_bytes().splitlines(keepends=True)
                write_whole(self._path, b"".join(lines[len(lines) // 2 :]))
        line = {**self._who, **self._row(since), **facts}
        with contextlib.suppress(OSError):
            append_json_line(self._path, line)
