"""A process that runs tools, as its parent holds it: begun when needed, killed when it hangs."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fornax
from fornax.config.environment import for_child

__all__ = ["ToolProcess"]

_MAIN = (
    "import sys; sys.path.append({root!r}); "
    "from fornax.tune.rollout.tool_worker import main; main()"
)
_LONGEST = 1 << 20
"""Bytes of an answer that are read, at most."""
_LOAD_SECONDS = 120.0


class ToolProcess:
    """One process; one thread at a time calls it."""

    def __init__(self, functions: Sequence[str]) -> None:
        self._functions = list(functions)
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, function: str, arguments: Mapping[str, Any], seconds: float) -> str:
        """The result as text, or `error: …`; what hangs or ends the process costs the process."""
        if self._process is None:
            self._process = _begin()
            # The import of the tools' files does not count against their time.
            problem = self._ask({"load": self._functions}, _LOAD_SECONDS)
            if "error" in problem:
                self.kill()
                return f"error: {problem['error']}"
        answer = self._ask({"function": function, "arguments": arguments}, seconds)
        return f"error: {answer['error']}" if "error" in answer else answer["result"]

    def kill(self) -> None:
        """End the process and what it began."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, str]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = _line(process, seconds)
        except BrokenPipeError:
            line = b""
        if line is not None and line.endswith(b"\n"):
            return json.loads(line)
        self.kill()
        if line is None:
            return {"error": f"took over {seconds:g} s"}
        return {"error": "the tool answered too much, or ended its process"}


def _begin() -> subprocess.Popen[bytes]:
    root = str(Path(fornax.__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN.format(root=root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        env=for_child({"PYTHONUNBUFFERED": "1"}),
    )


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """An answer; without a line's end if the process ended, None if it took too long."""
    assert process.stdout is not None
    until = time.monotonic() + seconds
    found = b""
    while not found.endswith(b"\n") and len(found) < _LONGEST:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return None
        more = os.read(process.stdout.fileno(), 1 << 16)
        if not more:
            break
        found += more
    return found
