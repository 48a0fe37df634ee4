"""Stopping well: the first signal asks for a checkpoint and an exit, a second Ctrl-C exits now.

Python runs its handlers between bytecodes of the main thread, which may sit in a compilation for a
minute. The C-level handler writes each signal's number to a pipe at once; a thread reads it there.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType

import jax
from jax.experimental import multihost_utils

__all__ = ["StopSignals", "exit_code"]


def exit_code(stopped_by: int | None) -> int:
    """What a process returns after a clean stop: 0 at the end, else 128 + the signal's number.

    130 after Ctrl-C and 143 after SIGTERM: the run is checkpointed and not finished, so that a
    scheduler that looks at exit codes starts it again.
    """
    return 0 if stopped_by is None else 128 + stopped_by


class StopSignals:
    """Within the block SIGTERM and Ctrl-C only set a request, which the loop reads each step.

    Outside the main thread no handler can be installed; then `request` is the only way in.
    """

    def __init__(
        self,
        announce: Callable[[str], None] | None = None,
        actions: Mapping[int, Callable[[], object]] | None = None,
    ) -> None:
        """Nothing is installed before the block.

        Args:
          announce: shows a line of text.
          actions: by the number of another signal, what is done when it comes, in a thread.
        """
        self._actions = dict(actions or {})
        self._announce = announce or (lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201
        self._signal: int | None = None
        self._read = self._write = -1
        self._previous: dict[int, object] = {}
        self._previous_wakeup = -1
        self._thread: threading.Thread | None = None
        self._many = jax.process_count() > 1

    def __enter__(self) -> "StopSignals":
        """Install the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # With several processes SIGTERM belongs to jax's preemption service, which all ask.
        mine = (signal.SIGINT,) if self._many else (signal.SIGINT, signal.SIGTERM)
        for number in (*mine, *self._actions):
            self._previous[number] = signal.signal(number, lambda *_: None)
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the previous handlers back."""
        if self._thread is None:
            return
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyrefly: ignore[bad-argument-type]
        os.close(self._write)
        self._thread.join()
        os.close(self._read)
        self._thread = None

    def request(self, number: int) -> None:
        """Ask for a stop as if signal `number` had arrived."""
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            _show_cursor()
            os._exit(exit_code(signal.SIGINT))
        if self._signal is None or number == signal.SIGINT:
            self._announce(_message(number))
            self._signal = number
            if self._many and number == signal.SIGINT:
                os.kill(os.getpid(), signal.SIGTERM)

    def stopped_by(self, step: int) -> int | None:
        """The signal that asked for a stop after `step`, the same in every process; or None."""
        if not self._many:
            return self._signal
        if not multihost_utils.reached_preemption_sync_point(step):
            return None
        return self._signal or signal.SIGTERM

    def _watch(self) -> None:
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if action := self._actions.get(number):
                    action()
                elif number in self._previous:
                    self.request(number)


def _show_cursor() -> None:
    """The bar hides it, and nothing of Python's runs after `os._exit`."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")


def _message(number: int) -> str:
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    again = "; Ctrl-C again exits now" if number == signal.SIGINT else ""
    return f"{name}: finishing this step and saving a checkpoint{again}"
