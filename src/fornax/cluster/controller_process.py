"""The controller as a process of the launch, and another in its place when it is lost.

The launch itself does little that could fail: it has the terminal and the signals, and holds the
files of the agents' memory open. When the controller is killed or crashes, the kernel ends agents
and workers with it; the launch says so, waits until they are gone, and starts another controller,
whose agents take the memory up.
"""

import contextlib
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fornax.cluster.attempts import Attempts
from fornax.cluster.files import CONTROLLER, ClusterFiles
from fornax.cluster.kept_memory import KeptMemory
from fornax.cluster.signals import signals_to
from fornax.cluster.terminal import Terminal
from fornax.cluster.verdict import lost_controller
from fornax.config import errors, worker_record
from fornax.config.errors import ClusterError, FornaxError
from fornax.config.jsonl import JsonLines, append_json_line, read_json_lines
from fornax.config.worker_process import WorkerProcess, has_room, send

__all__ = ["ControllerProcesses", "ToLaunch"]

_MARK = "FORNAX_LAUNCH"
"""A variable of the environment that all have which a controller started; nobody reads it there."""
_TICK_SECONDS = 0.1
_PRUNE_SECONDS = 1.0
_LIFELINE_SECONDS = 10.0
_GONE_SECONDS = 30.0


class ControllerProcesses:
    """Those of one launch, one after the other."""

    def __init__(self, order: dict[str, Any], files: ClusterFiles, terminal: Terminal) -> None:
        """Start nothing yet.

        Args:
          order: what `fornax.cluster.launch.control` is sent; its job's hosts become those that
            the run needs.
          files: of the run, which the caller holds.
          terminal: shows what happens.
        """
        self._order, self._files, self._terminal = order, files, terminal
        self._memory = KeptMemory()
        self._attempts = Attempts()
        self._signals: list[int] = []
        self._mark = secrets.token_hex(8)
        self._step = -1
        self._pruned_at = 0.0

    def run(self) -> int:
        """Run to the end; returns the exit code of the command.

        Raises:
          FornaxError: that of a controller; `ClusterError` when they are lost again and again.
        """
        with signals_to(self._signals), contextlib.closing(self._memory):
            while True:
                kept = {str(rank): place for rank, place in self._memory.places().items()}
                with self._files.controller.open("ab") as log:
                    process = WorkerProcess(CONTROLLER, log=log, environment={_MARK: self._mark})
                with process:
                    process.send({**self._order, "kept": kept})
                    code = self._follow(process)
                    ended = process.wait() if code is None else 0
                if code is not None:
                    return code
                if (code := self._lost(process.pid, ended)) is not None:
                    return code

    def _follow(self, process: WorkerProcess) -> int | None:
        """Do what a controller says until it ends; the exit code, None where it was lost.

        Raises:
          FornaxError: that it ended with.
        """
        passed, ready, noted = 0, False, False
        while True:
            message: Mapping[str, Any] = {"kind": "nothing"}
            try:
                with contextlib.suppress(TimeoutError):
                    message = process.receive(_TICK_SECONDS)
            except EOFError:
                return None
            match message["kind"]:
                case "ready":
                    ready = True
                case "say":
                    self._terminal.announce(message["text"])
                case "step":
                    self._step = message["step"]
                case "ended":
                    return message["code"]
                case "error":
                    raise _rebuilt(message)
                case "wanted":
                    self._order["job"]["hosts"] = message["hosts"]
                    if not noted:
                        noted = True
                        self._note(process.pid)
                case _:
                    self._keep(message)
            self._terminal.tick(self._step)
            if time.monotonic() - self._pruned_at > _PRUNE_SECONDS:
                self._pruned_at = time.monotonic()
                self._memory.prune()
            if self._signals and not ready:  # nothing trains that could be saved
                return 128 + self._signals[0]
            for number in self._signals[passed:]:
                process.send({"kind": "signal", "number": number})
                passed += 1

    def _keep(self, message: Mapping[str, Any]) -> None:
        """What another controller will need."""
        match message["kind"]:
            case "memory":
                given = (message[name] for name in ("rank", "agent", "files", "programs"))
                self._memory.hold(*given)
            case "settled":
                self._memory.settle(message["agents"], message["hosts"], message["step"])

    def _note(self, pid: int) -> None:
        """Say which process a controller is, for `status` and drills, once there are its events."""
        why = f"the controller is process {pid}"
        with contextlib.suppress(OSError):
            append_json_line(self._files.events, {"epoch": 0, "controller": pid, "why": why})

    def _lost(self, pid: int, code: int) -> int | None:
        """Say that a controller was lost, and wait until all that it started is gone.

        Returns:
          The exit code where the run was asked to stop, None where another controller is to come.

        Raises:
          ClusterError: when there is no use in one, or something is not gone.
        """
        verdict = lost_controller(pid, code)
        entered = self._entered()
        events = read_json_lines(self._files.events)
        began = [e["step"] for e in events if e.get("state") == "running" and "step" in e]
        facts = {"rank": None, "kind": verdict.kind, "entered": entered, "pid": pid}
        self._enter("teardown", verdict.text, **facts)
        self._wait_until_gone()
        if self._signals:
            self._enter("ended", "a fault while stopping", code=128 + self._signals[0])
            return 128 + self._signals[0]
        if began:
            self._attempts.begin(began[-1])
            self._attempts.reach(entered)
        if why := self._attempts.fail(verdict):
            self._enter("ended", why, code=1)
            raise ClusterError(
                f"{why}. Look at {self._files.controller}, fix it, and run the same command "
                "again: it resumes from the newest checkpoint"
            )
        return None

    def _entered(self) -> int:
        """The newest step that all workers of a lost controller have entered; -1 for none."""
        states = map(worker_record.read, self._files.records().values())
        return min((s.entered_step for s in states if s is not None and s.pid), default=-1)

    def _wait_until_gone(self) -> None:
        """The kernel ends agents with the controller, and workers with their agents; those that it
        does not is ended here, as two must not write into one memory.

        Raises:
          ClusterError: when one is there still.
        """
        began, mark = time.monotonic(), f"{_MARK}={self._mark}".encode()
        while left := _marked(mark):
            waited = time.monotonic() - began
            if waited > _GONE_SECONDS:
                raise ClusterError(
                    f"processes {', '.join(map(str, left))} of the run do not end, though its "
                    "controller did; end them, and run the same command again"
                )
            if waited > _LIFELINE_SECONDS:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _enter(self, state: str, why: str, **facts: object) -> None:
        """A change of state that no controller is there to say."""
        epoch = max((e["epoch"] for e in read_json_lines(self._files.events)), default=0)
        event = {"time": round(time.time(), 3), "epoch": epoch, "state": state, "why": why}
        with contextlib.closing(JsonLines(self._files.events)) as events:
            events.write({**event, **facts})
        self._terminal.announce(f"epoch {epoch}  {state}: {why}")


class ToLaunch:
    """A controller's way to its launch, which may be held (Ctrl-Z): nothing waits for that."""

    def __init__(self, launch: Connection) -> None:
        """Say nothing yet."""
        self._launch = launch
        self._waiting: deque[Mapping[str, object]] = deque()
        self._step: int | None = None

    def say(self, text: str) -> None:
        """Have a line shown."""
        self.tell({"kind": "say", "text": text})

    def tick(self, step: int) -> None:
        """Say which step all ranks have entered, where it is another; many times a second."""
        self._send()
        if step != self._step and not self._waiting:
            self._step = step
            self.tell({"kind": "step", "step": step})

    def tell(self, message: Mapping[str, object]) -> None:
        """Send a message once there is room."""
        self._waiting.append(message)
        self._send()

    def end(self, message: Mapping[str, object]) -> None:
        """Send the last message, and all before it."""
        for each in [*self._waiting, message]:
            send(self._launch, each)

    def _send(self) -> None:
        while self._waiting and has_room(self._launch):
            send(self._launch, self._waiting.popleft())


def _rebuilt(message: Mapping[str, Any]) -> FornaxError:
    return getattr(errors, message["error"])(message["text"])


def _marked(mark: bytes) -> list[int]:
    """The processes that have a variable in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(bytes(1)):
                found.append(int(entry.name))
    return found
