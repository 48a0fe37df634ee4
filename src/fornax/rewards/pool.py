"""`RewardPool`: scores of many completions, by functions in processes that may fail."""

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from fornax.config.errors import ConfigError, DataError
from fornax.rewards.crew import Crew
from fornax.rewards.jobs import Job, divide
from fornax.rewards.spec import RewardSpec, Sample, Score

__all__ = ["RewardPool"]

Answer = tuple[float | None, str, Mapping[str, float]]


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
        self._crew = Crew(specs, workers or min(4, os.cpu_count() or 1), log)
        self._lock = threading.Lock()

    def check(self, record: Mapping[str, Any], place: str = "the first line") -> None:
        """See that a line of data has the columns the functions need.

        Raises:
          DataError: naming the function and the column.
        """
        for name, function in zip(self.names, self._crew.functions, strict=True):
            lacking = [c for c in function.columns if c not in record]
            if lacking:
                raise DataError(
                    f"{place}: the reward {name} needs the column {', '.join(lacking)}; the line "
                    f"has {', '.join(record) or 'none beside the prompt'}"
                )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Judge samples by every reward; nothing that a function does is raised here."""
        with self._lock:
            answers = _Round(self._crew, list(samples)).collect()
            self._crew.keep_states()
        return [
            self._combine([answers[place][n] for place in range(len(self.specs))])
            for n in range(len(samples))
        ]

    def state(self) -> dict[str, Any]:
        """The state of functions whose module offers get_state and set_state; JSON can hold it."""
        with self._lock:
            if not self._crew.states:
                self._crew.keep_states()
            return {self.names[place]: state for place, state in self._crew.states.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give functions the state they had.

        Raises:
          ConfigError: state of a reward that is not here or keeps none, or that it refuses.
        """
        with self._lock:
            for name, value in state.items():
                place = self.names.index(name) if name in self.names else None
                if place is None or not self._crew.functions[place].has_state:
                    raise ConfigError(
                        f"the saved run has state of the reward {name}, which is not here or has "
                        "no set_state; use the rewards the run began with"
                    )
                self._crew.states[place] = value
                problem = self._crew.set_state(place)
                if problem:
                    raise ConfigError(f"set_state of the reward {name} {problem}")

    def close(self) -> None:
        """End the workers."""
        self._crew.close()

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


class _Round:
    """One call of `score`: samples go out as jobs, answers come back in any order."""

    def __init__(self, crew: Crew, samples: list[Sample]) -> None:
        self._crew = crew
        self._samples = samples
        self._answers: list[list[Answer]] = [[(None, "", {})] * len(samples) for _ in crew.specs]
        self._waiting = deque(divide(crew.functions, len(samples), len(crew.workers)))
        self._running: dict[int, Job] = {}

    def collect(self) -> list[list[Answer]]:
        """The answers, by function and sample."""
        while self._waiting or self._running:
            self._dispatch()
            slots: dict[Any, int] = {
                self._crew.workers[slot].connection: slot
                for slot in (*self._running, *self._crew.loading)
            }
            now = time.monotonic()
            left = [self._deadline(job) - now for job in self._running.values()]
            left += [self._crew.workers[slot].patience for slot in self._crew.loading]
            ready = {slots[found] for found in wait(list(slots), max(0.0, min(left)))}
            for slot in ready | {s for s in self._crew.loading if self._late(s)}:
                if slot in self._crew.loading:
                    self._crew.ready(slot)
                else:
                    self._read(slot)
            now = time.monotonic()
            for slot, job in list(self._running.items()):
                if now >= self._deadline(job) and not self._crew.workers[slot].connection.poll(0):
                    self._lose(slot, f"took over {self._limit(job):g} s")
        return self._answers

    def _limit(self, job: Job) -> float:
        return self._crew.specs[job.place].timeout_seconds

    def _deadline(self, job: Job) -> float:
        return job.deadline(self._limit(job))

    def _late(self, slot: int) -> bool:
        return self._crew.workers[slot].patience <= 0

    def _dispatch(self) -> None:
        """Give each idle worker the first job it may run."""
        for slot, worker in enumerate(self._crew.workers):
            if slot in self._running or slot in self._crew.loading:
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
        job, connection = self._running[slot], self._crew.workers[slot].connection
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
        """Replace a worker that ended or must end, and go on with what it had left."""
        job = self._running.pop(slot)
        how = self._crew.replace(slot)
        self._settle(job, problem or f"ended its process with {how}")

    def _settle(self, job: Job, problem: str) -> None:
        guilty, again = job.blame()
        for number in guilty:
            self._answer(job.place, number, (None, problem, {}))
        self._waiting.extendleft(reversed(again))

    def _answer(self, place: int, number: int, answer: Answer) -> None:
        self._answers[place][number] = answer
        if answer[1]:
            self._crew.say(f"{self._crew.specs[place].label}: sample {number}: {answer[1]}")
