"""`RewardPool`: scores of many completions, by functions in processes that may fail."""

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from fornax.config.errors import ConfigError, DataError
from fornax.rewards.slots import STATE_SLOT, WAIT_SECONDS, Loaded, WorkerSlots
from fornax.rewards.spec import RewardSpec, Sample, Score

__all__ = ["RewardPool"]

Answer = tuple[float | None, str, Mapping[str, float]]

_CHUNKS_PER_WORKER = 4
_GRACE_SECONDS = 1.0


class RewardPool:
    """Worker processes with the reward functions loaded; results come in the samples' order.

    What a function does to its process is one failed sample and one line in the log: the process
    is replaced and the others' scores stand.

    Example:
      with RewardPool([RewardSpec(function="my_rewards.py:score")]) as pool:
          [score] = pool.score([Sample("1 + 1 =", " 2", {"answer": "2"})])
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        workers: int | None = None,
        log: str | Path | None = None,
    ) -> None:
        """Start the workers and load the functions.

        Args:
          specs: the rewards; their labels must differ.
          workers: how many processes; None for one per core, at most 4.
          log: file that failures, and what functions print, are appended to; None for standard
            error.

        Raises:
          ConfigError: a function that cannot be used, with near names.
        """
        self.specs = tuple(specs)
        self.names = tuple(spec.label for spec in specs)
        """What metrics call each reward."""
        if not specs:
            raise ConfigError("there is no reward; name one or more functions")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(
                f"two rewards have one name in {', '.join(self.names)}; give each a `name`"
            )
        if workers is not None and workers < 1:
            raise ConfigError(f"workers={workers} must be 1 or more")
        self._slots = WorkerSlots(specs, workers or min(4, os.cpu_count() or 1), log)
        self._lock = threading.Lock()

    def check(self, record: Mapping[str, object], place: str = "the first line") -> None:
        """See that a line of data has the columns the functions need.

        Raises:
          DataError: naming the function and the column.
        """
        for name, function in zip(self.names, self._slots.functions, strict=True):
            lacking = [c for c in function.columns if c not in record]
            if lacking:
                raise DataError(
                    f"{place}: the reward {name} needs the column {', '.join(lacking)}; the line "
                    f"has {', '.join(record) or 'none beside the prompt'}"
                )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Judge samples by every reward; nothing that a function does is raised here."""
        with self._lock:
            answers = _Round(self._slots, list(samples)).collect()
            self._slots.keep_states()
        return [
            self._combine([answers[place][n] for place in range(len(self.specs))])
            for n in range(len(samples))
        ]

    def state(self) -> dict[str, Any]:
        """The state of functions whose module offers get_state and set_state; JSON can hold it."""
        with self._lock:
            if not self._slots.states:
                self._slots.keep_states()
            return {self.names[place]: state for place, state in self._slots.states.items()}

    def restore(self, state: Mapping[str, object]) -> None:
        """Give functions the state they had.

        Raises:
          ConfigError: state of a reward that is not here or keeps none, or that it refuses.
        """
        with self._lock:
            for name, value in state.items():
                place = self.names.index(name) if name in self.names else None
                if place is None or not self._slots.functions[place].has_state:
                    raise ConfigError(
                        f"the saved run has state of the reward {name}, which is not here or has "
                        "no set_state; use the rewards the run began with"
                    )
                self._slots.states[place] = value
                problem = self._slots.set_state(place)
                if problem:
                    raise ConfigError(f"set_state of the reward {name} {problem}")

    def close(self) -> None:
        """End the workers."""
        self._slots.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _combine(self, answers: Sequence[Answer]) -> Score:
        total, parts, notes = 0.0, {}, {}
        each = zip(self.specs, self.names, answers, strict=True)
        for spec, name, (value, problem, counts) in each:
            parts[name] = float("nan") if value is None else value
            parts |= {f"{name}.{count}": number for count, number in counts.items()}
            if problem:
                notes[name] = problem
                total += spec.weight * spec.failure_score
            elif value is not None:
                total += spec.weight * value
        return Score(total, parts, notes)


@dataclass
class _Job:
    """Some samples for one function on one worker."""

    place: int
    """Which function."""
    numbers: list[int]
    """Samples not answered yet, in order."""
    in_turn: bool
    """Whether the worker calls the function for one sample after the other."""
    started: float = 0.0
    """When the call that runs now began, by the monotonic clock."""
    pinned: int | None = None
    """The one worker that may run it: functions with state stay where their state is."""
    fault: str = field(default="", kw_only=True)
    """What is wrong with the call as a whole."""

    def answered(self, number: int, now: float) -> None:
        """Note an answer; in turn, the next call begins with it."""
        self.numbers.remove(number)
        if self.in_turn:
            self.started = now

    def deadline(self, limit: float) -> float:
        """When the call has taken too long; async calls are given time to notice it themselves."""
        return self.started + limit + (0.0 if self.in_turn else _GRACE_SECONDS)

    def blame(self) -> tuple[list[int], list["_Job"]]:
        """After a failure: the samples that caused it, and jobs for those that may be innocent.

        When several calls ran at once, or one call for several samples, each is tried alone.
        """
        if self.in_turn:
            rest = self.numbers[1:]
            again = [_Job(self.place, rest, True, pinned=self.pinned)] if rest else []
            return self.numbers[:1], again
        if len(self.numbers) <= 1:
            return self.numbers, []
        return [], [_Job(self.place, [n], False, pinned=self.pinned) for n in self.numbers]


def _divide(functions: Sequence[Loaded], count: int, workers: int) -> list[_Job]:
    """The jobs for `count` samples.

    A function called for one sample at a time has its samples in chunks, async ones in one chunk
    for each worker, batched ones and those with state all at once.
    """
    jobs = []
    for place, function in enumerate(functions):
        in_turn = not (function.batched or function.is_async)
        if function.has_state or function.batched:
            size = count
        elif function.is_async:
            size = -(-count // workers)
        else:
            size = min(64, -(-count // (workers * _CHUNKS_PER_WORKER)))
        pinned = STATE_SLOT if function.has_state else None
        for first in range(0, count, max(1, size)):
            numbers = list(range(first, min(count, first + size)))
            jobs.append(_Job(place, numbers, in_turn, pinned=pinned))
    return jobs


class _Round:
    """One call of `score`: samples go out as jobs, answers come back in any order."""

    def __init__(self, slots: WorkerSlots, samples: list[Sample]) -> None:
        self._slots = slots
        self._samples = samples
        self._answers: list[list[Answer]] = [[(None, "", {})] * len(samples) for _ in slots.specs]
        self._waiting = deque(_divide(slots.functions, len(samples), len(slots.workers)))
        self._running: dict[int, _Job] = {}

    def collect(self) -> list[list[Answer]]:
        """The answers, by function and sample."""
        while self._waiting or self._running:
            self._dispatch()
            slots: dict[Any, int] = {
                self._slots.workers[slot].connection: slot
                for slot in (*self._running, *self._slots.loading)
            }
            now = time.monotonic()
            left = [self._deadline(job) - now for job in self._running.values()]
            left += [self._slots.workers[s].load_seconds_left for s in self._slots.loading]
            longest = max(0.0, min(*left, WAIT_SECONDS))
            ready = {slots[found] for found in wait(list(slots), longest)}
            self._pass_over(time.monotonic() - now - longest)
            for slot in ready | {s for s in self._slots.loading if self._late(s)}:
                if slot in self._slots.loading:
                    self._slots.ready(slot)
                else:
                    self._read(slot)
            now = time.monotonic()
            for slot, job in list(self._running.items()):
                late = now >= self._deadline(job)
                if late and not self._slots.workers[slot].connection.poll(0):
                    self._lose(slot, f"took over {self._limit(job):g} s")
        return self._answers

    def _pass_over(self, stopped: float) -> None:
        """Count no seconds for which this process, and so perhaps the workers, stood still."""
        if stopped > 0:
            for job in self._running.values():
                job.started += stopped
            for slot in self._slots.loading:
                self._slots.workers[slot].started += stopped

    def _limit(self, job: _Job) -> float:
        return self._slots.specs[job.place].timeout_seconds

    def _deadline(self, job: _Job) -> float:
        return job.deadline(self._limit(job))

    def _late(self, slot: int) -> bool:
        return self._slots.workers[slot].load_seconds_left <= 0

    def _dispatch(self) -> None:
        """Give each idle worker the first job it may run."""
        for slot, worker in enumerate(self._slots.workers):
            if slot in self._running or slot in self._slots.loading:
                continue
            for job in self._waiting:
                if job.pinned is None or job.pinned == slot:
                    break
            else:
                continue
            self._waiting.remove(job)
            self._running[slot] = job
            worker.send("run", job.place, [(n, self._samples[n]) for n in job.numbers])
            job.started = time.monotonic()

    def _read(self, slot: int) -> None:
        """Take the messages that lie ready from one worker."""
        job, connection = self._running[slot], self._slots.workers[slot].connection
        try:
            while connection.poll(0):
                kind, *rest = connection.recv()
                if kind == "done":
                    number, answer = rest
                    job.answered(number, time.monotonic())
                    self._answer(job.place, number, answer)
                elif kind == "fault":
                    job.fault = rest[0]
                else:
                    del self._running[slot]
                    if job.fault:
                        self._settle(job, job.fault)
                    return
        except (EOFError, OSError):
            self._lose(slot, "")

    def _lose(self, slot: int, problem: str) -> None:
        """Replace a worker that ended or must end, and continue with what it had left."""
        job = self._running.pop(slot)
        how = self._slots.replace(slot, closed=not problem)
        self._settle(job, problem or f"ended its process with {how}")

    def _settle(self, job: _Job, problem: str) -> None:
        guilty, again = job.blame()
        for number in guilty:
            self._answer(job.place, number, (None, problem, {}))
        self._waiting.extendleft(reversed(again))

    def _answer(self, place: int, number: int, answer: Answer) -> None:
        self._answers[place][number] = answer
        if answer[1]:
            self._slots.write(f"{self._slots.specs[place].label}: sample {number}: {answer[1]}")
