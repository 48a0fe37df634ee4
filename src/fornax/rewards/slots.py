"""The worker processes of a pool: replaced when they fail, their functions' state kept."""

import datetime
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple

from fornax.config.errors import ConfigError
from fornax.config.worker_process import WorkerProcess, ending
from fornax.rewards.spec import RewardSpec

__all__ = ["STATE_SLOT", "WAIT_SECONDS", "Loaded", "WorkerSlots"]

STATE_SLOT = 0
"""The worker that runs functions with state: those of one module share theirs."""

WAIT_SECONDS = 1.0
"""Longest wait at a time: of a stop of the machine, no more is counted against a worker."""
_LOAD_SECONDS = 120.0
_STATE_SECONDS = 10.0


class Loaded(NamedTuple):
    """What a worker says of a function it loaded."""

    batched: bool
    is_async: bool
    has_state: bool
    columns: tuple[str, ...]


class Worker:
    """One process with every function loaded; `connection` carries pickles."""

    def __init__(self, specs: Sequence[RewardSpec], log: IO[str] | None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fornax-rewards-"))
        self._folder.chmod(0o711)  # a sandbox inside may run as another user
        self._process = WorkerProcess(
            "fornax.rewards.worker:main", log=log, environment={"TMPDIR": str(self._folder)}
        )
        self.connection: Connection = self._process.connection
        self.connection.send(list(specs))
        self.started = time.monotonic()
        """When it was started; later by the time that is not counted."""

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def load_seconds_left(self) -> float:
        """Seconds left to load the functions."""
        return max(0.0, self.started + _LOAD_SECONDS - time.monotonic())

    def wait_ready(self, specs: Sequence[RewardSpec]) -> list[Loaded]:
        """Wait until the functions are loaded.

        Raises:
          ConfigError: one cannot be used.
        """
        began = time.monotonic()
        try:
            while not self.connection.poll(longest := min(self.load_seconds_left, WAIT_SECONDS)):
                if not longest:
                    raise ConfigError(
                        f"the reward files took over {_LOAD_SECONDS:g} s to import; do slow work "
                        "in the function's first call"
                    )
                self.started += max(0.0, time.monotonic() - began - longest)
                began = time.monotonic()
            answer = self.connection.recv()
        except (EOFError, OSError):
            named = ", ".join(spec.function for spec in specs)
            raise ConfigError(
                f"the process that imports {named} ended with {ending(self._process.wait())}; run "
                "python -c 'import ...' on the file to see why"
            ) from None
        if answer[0] == "unusable":
            raise ConfigError(answer[2])
        return [Loaded(*one) for one in answer[1]]

    def send(self, *request: object) -> None:
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
            return None, f"ended its process with {self.end(closed=True)}"
        return state, problem

    def end(self, *, closed: bool = False) -> str:
        """End the process and what it began; say how it ended.

        Args:
          closed: whether it closed its connection, so that it ends by itself.
        """
        code = self._process.wait() if closed else self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        return ending(code)


class WorkerSlots:
    """Workers by their slots, and a log of what goes wrong."""

    def __init__(self, specs: Sequence[RewardSpec], count: int, log: str | Path | None) -> None:
        """Start `count` workers and wait until they have loaded the functions.

        Raises:
          ConfigError: a function that cannot be used.
        """
        self.specs = tuple(specs)
        self.states: dict[int, Any] = {}
        """Last known state of each function that has one."""
        self.loading: set[int] = set()
        """Slots whose worker was replaced and is not ready yet."""
        self._log: IO[str] | None = None
        if log is not None:
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            self._log = Path(log).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.workers = [Worker(self.specs, self._log) for _ in range(count)]
        self.close = weakref.finalize(self, _close, self.workers, self._log)
        try:
            loaded = [worker.wait_ready(self.specs) for worker in self.workers]
        except BaseException:
            self.close()
            raise
        self.functions: list[Loaded] = loaded[0]

    def replace(self, slot: int, *, closed: bool = False) -> str:
        """End a worker and start another in its place; say how it ended."""
        how = self.workers[slot].end(closed=closed)
        self.workers[slot] = Worker(self.specs, self._log)
        self.loading.add(slot)
        return how

    def ready(self, slot: int) -> None:
        """Take in a replaced worker that has loaded its functions; waits until it has."""
        self.workers[slot].wait_ready(self.specs)
        self.loading.discard(slot)
        for place in self.states if slot == STATE_SLOT else ():
            problem = self.set_state(place)
            if problem:
                self.write(f"{self.specs[place].label}: set_state: {problem}")

    def keep_states(self) -> None:
        """Ask functions for their state, to give it back when their worker is replaced."""
        for place, function in enumerate(self.functions):
            if not function.has_state:
                continue
            if STATE_SLOT in self.loading:
                self.ready(STATE_SLOT)
            request = ("get_state", place, None)
            state, problem = self.workers[STATE_SLOT].ask_state(request, _STATE_SECONDS)
            if state is None:
                label = self.specs[place].label
                self.write(f"{label}: get_state: {problem}; its last state is kept")
                self.replace(STATE_SLOT)
            else:
                self.states[place] = json.loads(state)

    def set_state(self, place: int) -> str:
        """Give a function its last known state; what is wrong, if anything is."""
        if STATE_SLOT in self.loading:
            self.ready(STATE_SLOT)
        request = ("set_state", place, self.states[place])
        return self.workers[STATE_SLOT].ask_state(request, _STATE_SECONDS)[1]

    def write(self, text: str) -> None:
        """Add a line to the log."""
        now = datetime.datetime.now().isoformat(timespec="seconds")
        line = " ".join(f"{now} {text}".split())
        if self._log is not None:
            self._log.write(f"{line}\n")
        else:
            os.write(2, f"{line}\n".encode(errors="replace"))


def _close(workers: list[Worker], log: IO[str] | None) -> None:
    for worker in workers:
        worker.end()
    if log is not None:
        log.close()
