"""Several slices of a DiLoCo run on this machine: each a launch of its own, and where they meet.

A slice is a process with its own controller: what happens in one, its recovery included, is not
business of the others. Its run directory is `slice-K` below the run's.
"""

import contextlib
import importlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from fornax.cluster.devices import host_variables
from fornax.cluster.exchange import Exchange
from fornax.cluster.files import ClusterFiles
from fornax.cluster.messages import CLEAN
from fornax.cluster.signals import signals_to
from fornax.config.jsonl import JsonLines
from fornax.config.worker_process import WorkerProcess, ending, receive

__all__ = ["launch_slices", "run_slice"]

_TICK_SECONDS = 0.1
_STARTS = 4


def launch_slices(
    program: str, words: Callable[[Path], Sequence[str]], run_dir: str | Path, count: int
) -> int:
    """Run the slices of a DiLoCo run to the end; that one is lost does not stop the others.

    What slice 0 prints goes to standard error, that of the others to `launch.log` in their run
    directories. The first Ctrl-C or SIGTERM has all slices stop after their next exchange, at one
    step; the second has each save where it is; the third ends them.

    Args:
      program: `package.module:NAME`, called with words in a process for each slice, which launches
        it; returns its exit code.
      words: given the run directory of a slice, the words.
      run_dir: of the whole run.
      count: how many slices.

    Returns:
      0 when a slice finished the run; 130 or 143 after Ctrl-C or SIGTERM; else the worst exit code.

    Raises:
      ConfigError: when the directory cannot be written.
      ClusterError: when it is in use, or no port is free; see `host_variables`.
    """
    files = ClusterFiles(Path(run_dir).expanduser())
    with files.held(), contextlib.closing(_Slices(files, program, words, count)) as slices:
        return slices.run()


class _Slices:
    """The processes of the slices, and their exchange."""

    def __init__(
        self,
        files: ClusterFiles,
        program: str,
        words: Callable[[Path], Sequence[str]],
        count: int,
    ) -> None:
        self._files, self._program, self._words = files, program, words
        self._shares = host_variables(count, "slices")
        self._events = JsonLines(files.events)
        self._token = secrets.token_hex(16)
        self._exchange = Exchange(slices=count, token=self._token, announce=self._announce)
        self._running: dict[int, WorkerProcess] = {}
        self._starts = dict.fromkeys(range(count), 0)
        self._codes: list[int] = []
        self._signals: list[int] = []
        self._obeyed = 0

    def run(self) -> int:
        """To the end; returns the exit code."""
        self._exchange.start()
        count = len(self._starts)
        self._announce(f"{count} slices meet at {self._exchange.address}", state="forming")
        with signals_to(self._signals):
            for number in self._starts:
                self._start(number)
            while self._running:
                time.sleep(_TICK_SECONDS)
                self._obey()
                for number, process in list(self._running.items()):
                    code = process.poll()
                    if code is not None:
                        self._ended(number, code)
        code = self._code()
        rounds, sent = self._exchange.rounds, self._exchange.bytes
        self._announce(
            f"exit code {code}; {rounds} exchanges, {sent / 1e6:.1f} MB through the exchange",
            state="ended",
            code=code,
            rounds=rounds,
            bytes=sent,
        )
        return code

    def close(self) -> None:
        """End what still runs."""
        for process in self._running.values():
            process.kill()
        self._exchange.close()
        self._events.close()

    def _code(self) -> int:
        if 0 in self._codes:
            return 0
        return 128 + self._signals[0] if self._signals else max(map(abs, self._codes))

    def _start(self, number: int) -> None:
        directory = self._files.run_dir / f"slice-{number}"
        directory.mkdir(parents=True, exist_ok=True)
        variables: dict[str, str | None] = {
            "FORNAX_SLICE": str(number),
            "FORNAX_NUM_SLICES": str(len(self._starts)),
            "FORNAX_EXCHANGE": self._exchange.address,
            "FORNAX_EXCHANGE_TOKEN": self._token,
            **(self._shares[number] if self._shares else {}),
        }
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((directory / "launch.log").open("ab")) if number else None
            self._running[number] = process = WorkerProcess(
                "fornax.cluster.slices:run_slice", log=log, environment=variables
            )
        process.send({"program": self._program, "words": [*self._words(directory)]})
        self._starts[number] += 1

    def _ended(self, number: int, code: int) -> None:
        """Forget a slice's launch, or start it again where it was killed."""
        self._running.pop(number).kill()
        if code < 0 and not self._signals and self._starts[number] < _STARTS:
            self._announce(f"the launch of slice {number} was ended by {ending(code)}; once more")
            self._start(number)
            return
        self._codes.append(code)
        if code not in CLEAN:
            self._announce(f"slice {number} ended with {ending(code)}", slice=number, code=code)

    def _obey(self) -> None:
        while self._obeyed < len(self._signals):
            self._obeyed += 1
            if self._obeyed == 1:
                self._exchange.stop_slices()
                name = signal.Signals(self._signals[0]).name
                self._announce(
                    f"{name}: all slices stop after their next exchange, and save; once more: each "
                    "saves where it is"
                )
            for process in self._running.values():
                if self._obeyed == 2:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGTERM)
                elif self._obeyed > 2:
                    process.kill()

    def _announce(self, text: str, state: str = "running", **facts: object) -> None:
        """A line of events.jsonl and of the terminal; called by the exchange's thread too."""
        record = {"time": round(time.time(), 3), "epoch": 1, "state": state, "why": text}
        self._events.write(record | facts)
        line = f"{time.strftime('%H:%M:%S')}  {text}"
        print(line, file=sys.stderr, flush=True)  # noqa: T201


def run_slice(parent: Connection) -> None:
    """The process of a slice: one launch, whose exit code is its own."""
    job = receive(parent)
    module, _, name = job["program"].partition(":")
    sys.exit(getattr(importlib.import_module(module), name)(job["words"]))
