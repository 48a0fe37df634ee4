"""Worker processes: asked with a deadline, killed when they hang, gone when their parent is.

A worker runs `package.module:NAME(connection)` in a session of its own; the connection carries
frames of bytes, JSON unless both sides choose otherwise. What it prints goes to its log.
"""

import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from fornax.config.environment import for_child

__all__ = [
    "WorkerProcess",
    "ending",
    "has_room",
    "last_line",
    "receive",
    "run_worker",
    "send",
]

_MAIN = (
    "import sys; sys.path.append({root!r}); "
    "from fornax.config.worker_process import run_worker; run_worker({target!r}, {channel}, {held})"
)
_LONGEST = 1 << 30
_GRACE_SECONDS = 5.0
_TAIL = 4000


class WorkerProcess:
    """A process as its parent holds it; it is killed when nobody holds it any more."""

    def __init__(
        self,
        target: str,
        *,
        log: IO[Any] | None = None,
        environment: Mapping[str, str | None] = MappingProxyType({}),
        inherit: Sequence[int] = (),
    ) -> None:
        """Start the process.

        Args:
          target: `package.module:NAME`, called there with its end of the connection.
          log: file for standard output and standard error; None is this process's standard error.
          environment: changes to this process's environment; None leaves a variable out.
          inherit: file descriptors that it has too, under the same numbers.
        """
        ours, theirs = socket.socketpair()
        held, lifeline = os.pipe()
        self.connection = Connection(ours.detach())
        root = str(Path(__file__).parents[2])
        program = _MAIN.format(root=root, target=target, channel=theirs.fileno(), held=held)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=2 if log is None else log,
                stderr=None if log is None else log,
                pass_fds=(theirs.fileno(), held, *inherit),
                start_new_session=True,  # Ctrl-C reaches the parent only, which ends the worker
                env=for_child({"PYTHONUNBUFFERED": "1", **environment}),
            )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(held)
            theirs.close()
        self._end = weakref.finalize(self, _end, self._process, lifeline)

    @property
    def pid(self) -> int:
        """The process's number, which is also its group's."""
        return self._process.pid

    def ask(self, message: object, seconds: float, *, longest: int = _LONGEST) -> Any:
        """Send a message as JSON and return the answer.

        Raises:
          TimeoutError: there is none after this many seconds.
          EOFError: the process ended, or answered more than `longest` bytes.
        """
        self.send(message)
        return self.receive(seconds, longest=longest)

    def send(self, message: object) -> None:
        """Send a message as JSON; that the process ended is noticed by `receive`."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send(self.connection, message)

    def receive(self, seconds: float | None = None, *, longest: int = _LONGEST) -> Any:
        """The next message from JSON.

        Raises:
          TimeoutError: there is none after this many seconds.
          EOFError: the process ended, or sent what is not a message of at most `longest` bytes.
        """
        try:
            if not self.connection.poll(seconds):
                raise TimeoutError
            return json.loads(self.connection.recv_bytes(longest))
        except TimeoutError:
            raise
        except (EOFError, OSError, ValueError) as error:
            raise EOFError(str(error)) from None

    def poll(self) -> int | None:
        """The exit code of a process that ended; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """The exit code of a process that closed its connection; it is killed if it lives on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_SECONDS)
        return self.kill()

    def kill(self) -> int:
        """End the process and what it began; its exit code, -SIGKILL where this ended it."""
        self._end()
        return self._process.wait()

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _end(process: subprocess.Popen[bytes], lifeline: int) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()
    os.close(lifeline)


def ending(code: int) -> str:
    """An exit code in words: `exit status 1`, `SIGKILL`."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def last_line(log: IO[bytes]) -> str:
    """The last line that is not empty of a process's log, `nothing` where there is none."""
    log.flush()
    log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "nothing")


def run_worker(target: str, channel: int, held: int) -> None:
    """Run a worker's function in its process.

    Args:
      target: `package.module:NAME`.
      channel: file descriptor of the connection to the parent.
      held: read end of a pipe that only the parent holds open.
    """
    _end_with_parent(held)
    module, _, name = target.partition(":")
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        getattr(importlib.import_module(module), name)(Connection(channel))


def _end_with_parent(held: int) -> None:
    """Have the kernel end this process and its group when the parent's end closes.

    On Linux by SIGKILL, which also ends a process that is stopped (SIGSTOP); elsewhere by SIGIO.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    if sys.platform == "linux":
        fcntl.fcntl(held, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(held, fcntl.F_SETOWN, -os.getpgrp())
    flags = fcntl.fcntl(held, fcntl.F_GETFL)
    fcntl.fcntl(held, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    try:
        if os.read(held, 1) == b"":  # it was gone before the kernel was asked to tell
            os._exit(1)
    except BlockingIOError:
        pass


def send(connection: Connection, message: object) -> None:
    """Send a message as JSON, from a worker."""
    connection.send_bytes(json.dumps(message).encode())


def has_room(connection: Connection) -> bool:
    """Whether a short message can be sent without waiting for the reader."""
    return bool(select.select([], [connection], [], 0)[1])


def receive(connection: Connection) -> Any:
    """The parent's next message; EOFError where it will send no more."""
    return json.loads(connection.recv_bytes())
