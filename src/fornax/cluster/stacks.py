"""The Python stacks of a worker: written by itself on SIGUSR1, or read out of its memory by py-spy.

A process that is held by SIGSTOP runs no handler. py-spy, of the extra `[cluster]`, reads it from
outside and leaves it as it is, where the kernel lets it: as root, or where it may trace others.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["ask", "py_spy", "read"]

_WRITE_SECONDS = 0.5
_POLL_SECONDS = 0.05
_READ_SECONDS = 5.0


def ask(pid: int, path: Path) -> str:
    """What a process that handles SIGUSR1 with faulthandler adds to its file; empty when there is
    none."""
    before = path.stat().st_size
    os.kill(pid, signal.SIGUSR1)
    until = time.monotonic() + _WRITE_SECONDS
    size = before
    while time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        grown = path.stat().st_size
        if grown > before and grown == size:
            break
        size = grown
    with path.open("rb") as file:
        file.seek(before)
        return file.read().decode("utf-8", errors="replace")


def py_spy() -> str | None:
    """The path of py-spy: that of this environment, or one on PATH; None where there is none."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def read(pid: int) -> tuple[str, str]:
    """The stacks of a process as faulthandler writes them, its main thread's last; and why there
    are none. One that is not stopped may move meanwhile."""
    tool = py_spy()
    if tool is None:
        return "", "shows no stack: py-spy, which reads stopped processes, is not installed"
    words = [tool, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_READ_SECONDS, check=True
        )
        threads = sorted(json.loads(done.stdout), key=lambda each: each["os_thread_id"] == pid)
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split())
        return "", f"shows no stack: py-spy may not or cannot read the process: {said:.200}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return "", f"shows no stack: py-spy failed: {error}"
    return "\n".join(map(_thread, threads)), ""


def _thread(thread: dict) -> str:
    name = f' "{thread["thread_name"]}"' if thread["thread_name"] else ""
    frames = [
        f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}'
        for frame in thread["frames"]
    ]
    head = f"Thread {thread['os_thread_id']}{name} (most recent call first):"
    return "\n".join([head, *frames])
