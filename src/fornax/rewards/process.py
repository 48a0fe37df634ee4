"""A worker process as its parent holds it: started, spoken to, killed."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple

import fornax
from fornax.config.environment import for_child
from fornax.config.errors import ConfigError
from fornax.rewards.spec import RewardSpec

__all__ = ["Loaded", "Worker"]

_LOAD_SECONDS = 120.0
_MAIN = (
    "import sys; sys.path.append({root!r}); "
    "from fornax.rewards.worker import main; main({channel}, {lifeline})"
)


class Loaded(NamedTuple):
    """What a worker says of a function it loaded."""

    batched: bool
    is_async: bool
    has_state: bool
    columns: tuple[str, ...]


class Worker:
    """One process with every function loaded."""

    def __init__(self, specs: Sequence[RewardSpec], output: IO[str] | None) -> None:
        ours, theirs = socket.socketpair()
        reads, self._lifeline = os.pipe()
        root = str(Path(fornax.__file__).parent.parent)
        self._folder = Path(tempfile.mkdtemp(prefix="fornax-rewards-"))
        self._folder.chmod(0o711)  # a sandbox inside may run as another user
        with theirs:
            program = _MAIN.format(root=root, channel=theirs.fileno(), lifeline=reads)
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if output is None else output,
                stderr=None if output is None else output,
                pass_fds=(theirs.fileno(), reads),
                start_new_session=True,
                env=for_child({"PYTHONUNBUFFERED": "1", "TMPDIR": str(self._folder)}),
            )
        os.close(reads)
        self.connection = Connection(ours.detach())
        self.connection.send(list(specs))
        self._started = time.monotonic()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def patience(self) -> float:
        """Seconds left to load the functions."""
        return max(0.0, self._started + _LOAD_SECONDS - time.monotonic())

    def wait_ready(self, specs: Sequence[RewardSpec]) -> list[Loaded]:
        """Wait until the functions are loaded.

        Raises:
          ConfigError: one cannot be used.
        """
        try:
            if not self.connection.poll(self.patience):
                raise ConfigError(
                    f"the reward files took over {_LOAD_SECONDS:g} s to import; do slow work in "
                    "the function's first call"
                )
            answer = self.connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            named = ", ".join(spec.function for spec in specs)
            raise ConfigError(
                f"the process that imports {named} ended with {ending(code)}; run "
                "python -c 'import ...' on the file to see why"
            ) from None
        if answer[0] == "unusable":
            raise ConfigError(answer[2])
        return [Loaded(*one) for one in answer[1]]

    def send(self, *request: Any) -> None:
        """Send a request; a dead process is noticed where its answer is read."""
        try:
            self.connection.send(request)
        except (BrokenPipeError, ConnectionResetError):
            return

    def ask_state(self, request: tuple, timeout: float) -> tuple[str | None, str]:
        """Ask for or set the state of a function; its answer and what is wrong."""
        self.send(*request)
        try:
            if not self.connection.poll(timeout):
                return None, f"took over {timeout:g} s"
            _, state, problem = self.connection.recv()
        except (EOFError, OSError):
            return None, f"ended its process with {self.kill()}"
        return state, problem

    def kill(self) -> str:
        """End the process and what it began; say how it had ended."""
        code = self._process.poll()
        if code is None and self.connection.poll(0):  # it may be ending at this moment
            try:
                code = self._process.wait(0.05)
            except subprocess.TimeoutExpired:
                code = None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        ended = self._process.wait()
        if self._lifeline >= 0:
            self.connection.close()
            os.close(self._lifeline)
            self._lifeline = -1
            shutil.rmtree(self._folder, ignore_errors=True)
        return ending(ended if code is None else code)


def ending(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
