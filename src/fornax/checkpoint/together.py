"""A save that several processes make together: none waits for one that failed in it, or is gone.

Orbax has a process wait for the others until its timeout, minutes later. Here a file in the shared
directory says that no process has failed, and under `fornax launch` the worker's record that none
is gone; what waits looks at both.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import jax

from fornax.config import worker_record
from fornax.config.errors import CheckpointError, DiskFullError, GroupLostError
from fornax.mesh import hosts

__all__ = ["SavingTogether", "ended", "meet", "raise_anywhere"]

_SAVING = "fornax-saving"
_LOOK_SECONDS = 0.2

T = TypeVar("T")


class SavingTogether:
    """The file of one directory, and what waits meanwhile."""

    def __init__(self, directory: Path) -> None:
        """Nothing is written before `begin`."""
        self._file = directory / _SAVING
        self.left_waiting = False
        """Whether a thread of this process still waits, in Orbax, for one that failed."""

    def begin(self) -> None:
        """Process 0, before a save: it has failed nowhere.

        Raises:
          OSError: when the file cannot be written.
        """
        if jax.process_count() > 1:
            self._file.touch()

    def end(self) -> None:
        """It is done, or has failed in this process: the others need not wait."""
        with suppress(OSError):
            self._file.unlink()

    def run(self, call: Callable[[], T], step: int) -> T:
        """What `call` returns, which may wait for the other processes; not for one that failed.

        Raises:
          DiskFullError: when another process failed, which says why.
          GroupLostError: when another process is gone.
        """
        if jax.process_count() == 1:
            return call()
        result: Future[T] = Future()

        def follow() -> None:
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=follow, name="orbax", daemon=True).start()
        while not ended(result):
            if not self._file.exists():
                self.left_waiting = True
                raise DiskFullError(f"saving step {step} stopped, as another process failed in it")
        return result.result()


def ended(result: Future[T]) -> bool:
    """Whether there is a result, after waiting for it for a moment.

    Raises:
      GroupLostError: when another process is gone, so that it may never come.
    """
    if wait_for([result], _LOOK_SECONDS).done:
        return True
    record = worker_record.current()
    if record is not None and record.is_asked_to_leave():
        raise GroupLostError("another process of the run is gone, and the save is not complete")
    return False


def meet(name: str, timeout_seconds: int) -> None:
    """Return once every process came; from any thread, as it asks jax's coordinator only."""
    if jax.process_count() == 1:
        return
    from orbax.checkpoint import multihost

    wait = multihost.get_barrier_sync_fn()
    wait(key=name, timeout_ms=timeout_seconds * 1000)


def raise_anywhere(failure: str | None, *, full: bool = False) -> None:
    """Raise in every process what failed in any of them; `full`: for want of room."""
    said = hosts.gather(None if failure is None else [failure, full])
    if len(said) == 1 and failure is not None:
        raise CheckpointError(failure)
    named = [f"process {n}: {each[0]}" for n, each in enumerate(said) if each is not None]
    if named:
        kind = DiskFullError if all(each is None or each[1] for each in said) else CheckpointError
        raise kind(" ".join(dict.fromkeys(named)))
