"""Compiled programs: all made before the engine is ready, any made later counted and named."""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from fornax import kernels
from fornax.config.host_memory import trim_heap
from fornax.llm.stats import Readiness

__all__ = ["ProgramCache"]

_log = logging.getLogger("fornax.llm")


class ProgramCache:
    """Programs by key; each compiled once, ahead of time where it was announced."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fornax-compile")
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}
        self._futures: dict[Hashable, Future] = {}
        self._makers: dict[Hashable, Callable[[], jax.stages.Compiled]] = {}
        self._lock = threading.Lock()
        self._began = self._done_at = time.monotonic()
        self._done = 0
        self._choices: set[kernels.Choice] = set()
        self.late: list[str] = []
        """Programs compiled on demand, drained by the engine."""

    def announce(self, key: Hashable, make: Callable[[], jax.stages.Compiled]) -> None:
        """Say how a program is compiled; `compile_all` will do it."""
        self._makers[key] = make

    def compile_all(self) -> None:
        """Begin compiling everything announced, in the background, in the order announced."""
        self._began = time.monotonic()
        for key, make in self._makers.items():
            if key not in self._futures:
                # With the caller's choices: a target platform, autotuning.
                inside = contextvars.copy_context()
                self._futures[key] = self._pool.submit(inside.run, self._make, key, make)

    def readiness(self) -> Readiness:
        """How far compiling is."""
        total, done = len(self._futures), self._done
        left = None
        if done:
            left = (self._done_at - self._began) / done * (total - done)
        return Readiness(done=done, total=max(total, 1), seconds_left=left)

    def wait(self) -> None:
        """Return when all are compiled.

        Raises:
          Exception: what compiling one of them raised.
        """
        for future in list(self._futures.values()):
            future.result()
        self._pool.shutdown(wait=False)

    def get(self, key: Hashable) -> jax.stages.Compiled:
        """The program, compiled now if it was not announced or has not had its turn."""
        program = self._compiled.get(key)
        if program is None:
            if key in self._futures:
                return self._futures[key].result()
            _log.warning("compiling %s although the engine was ready", key)
            self.late.append(str(key))
            program = self._make(key, self._makers[key])
        return program

    def close(self) -> None:
        """Drop what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, key: Hashable, make: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
        with kernels.recording_choices() as made:
            program = make()
        with self._lock:
            for choice in made.keys() - self._choices:
                self._choices.add(choice)
                _log.info("kernel %s", choice)
            self._compiled[key] = program
            self._done += 1
            self._done_at = time.monotonic()
            last = self._done == len(self._futures)
        if last:
            trim_heap()  # what the compiler leaves
        return program
