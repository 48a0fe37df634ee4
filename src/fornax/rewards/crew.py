"""The worker processes of a pool: replaced when they fail, their functions' state kept."""

import datetime
import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from fornax.rewards.jobs import STATE_SLOT
from fornax.rewards.process import Loaded, Worker
from fornax.rewards.spec import RewardSpec

__all__ = ["Crew"]

_STATE_SECONDS = 10.0


class Crew:
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

    def replace(self, slot: int) -> str:
        """End a worker and start another in its place; say how it ended."""
        how = self.workers[slot].kill()
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
                self.say(f"{self.specs[place].label}: set_state: {problem}")

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
                self.say(f"{self.specs[place].label}: get_state: {problem}; its last state is kept")
                self.replace(STATE_SLOT)
            else:
                self.states[place] = json.loads(state)

    def set_state(self, place: int) -> str:
        """Give a function its last known state; what is wrong, if anything is."""
        if STATE_SLOT in self.loading:
            self.ready(STATE_SLOT)
        request = ("set_state", place, self.states[place])
        return self.workers[STATE_SLOT].ask_state(request, _STATE_SECONDS)[1]

    def say(self, text: str) -> None:
        """Add a line to the log."""
        now = datetime.datetime.now().isoformat(timespec="seconds")
        line = " ".join(f"{now} {text}".split())
        if self._log is not None:
            self._log.write(f"{line}\n")
        else:
            os.write(2, f"{line}\n".encode(errors="replace"))


def _close(workers: list[Worker], log: IO[str] | None) -> None:
    for worker in workers:
        worker.kill()
    if log is not None:
        log.close()
