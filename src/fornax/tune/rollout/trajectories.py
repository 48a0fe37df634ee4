"""Trajectories of several turns, many at once through one continuous batch.

Environments step in a pool of threads while the turns of others are sampled. A turn's prompt is the
tokens of the turn before and the environment's, so the prefix cache holds most of it.

A batch that turns join as they come gives log-probs whose last bits depend on how fast environments
are. `run_in_parts` has all turns of a part wait for each other instead: bits depend on the part.
"""

import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    Future,
    ThreadPoolExecutor,
    as_completed,
    wait,
)

import numpy as np

from fornax.config.errors import ConfigError, DataError, EngineError
from fornax.tune.rollout.framing import Framing
from fornax.tune.rollout.sampler import PartSampler, Requests, SampleSettings, StreamSampler
from fornax.tune.rollout.types import (
    Completion,
    Environment,
    Limits,
    Message,
    Record,
    ToolSchemas,
    Trajectory,
    Turn,
)

__all__ = ["run_in_parts", "run_trajectories"]

_WORKERS = 16


def run_trajectories(
    sampler: StreamSampler,
    framing: Framing,
    environments: Sequence[Environment],
    records: Sequence[Record],
    settings: SampleSettings,
    seeds: Sequence[int],
    limits: Limits,
    *,
    task_seeds: Sequence[int] | None = None,
) -> list[Trajectory]:
    """Run every trajectory to its end; results are in the order of `environments`.

    A trajectory depends on its record and its seeds alone, not on what else runs or on how long
    environments take.

    Args:
      sampler: draws the model's turns.
      framing: how messages become tokens.
      environments: one for each trajectory.
      records: one for each, given to `reset`.
      settings: of the model's turns; `n` must be 1, `max_tokens` is of one turn.
      seeds: one for each trajectory, for all the model's turns.
      limits: of each trajectory.
      task_seeds: one for each, given to `reset`; None takes `seeds`. Trajectories of one group have
        the same.

    Raises:
      ConfigError: lists of unequal lengths, or `n` above 1.
      EngineError: from the sampler, or a template that cannot continue after the model's tokens. An
        environment that raises, answers what is not an answer, or begins with more than the model
        has room for fails its own trajectory only.
    """
    tasks = _tasks(environments, records, settings, seeds, task_seeds)
    if not tasks:
        return []
    with ThreadPoolExecutor(min(_WORKERS, len(tasks)), "fornax-environment") as pool:
        _Loop(sampler, framing, settings, limits, pool).run(tasks)
    return [task.trajectory() for task in tasks]


def run_in_parts(
    sampler: PartSampler,
    framing: Framing,
    environments: Sequence[Environment],
    records: Sequence[Record],
    settings: SampleSettings,
    seeds: Sequence[int],
    limits: Limits,
    *,
    parts: Sequence[slice],
    task_seeds: Sequence[int] | None = None,
) -> list[Trajectory]:
    """Run every trajectory to its end, with the same bits whatever the speed of anything.

    All trajectories of a part that continue draw their next turn together, beginning with an empty
    cache. Parts do not wait for each other: while environments of one step, another's turns are
    drawn. Where environments repeat, the log-probs do, bit for bit.

    Args:
      sampler: draws the turns, from a thread for each part.
      parts: of the trajectories.
      others: see `run_trajectories`, as for what it raises.
    """
    tasks = _tasks(environments, records, settings, seeds, task_seeds)
    if not tasks:
        return []
    ended = threading.Event()
    with (
        ThreadPoolExecutor(min(_WORKERS, len(tasks)), "fornax-environment") as pool,
        ThreadPoolExecutor(len(parts), "fornax-part") as threads,
    ):
        loops = [
            _Loop(_Turns(sampler, ended), framing, settings, limits, pool, together=True)
            for _ in parts
        ]
        running = [
            threads.submit(loop.run, tasks[part]) for loop, part in zip(loops, parts, strict=True)
        ]
        try:
            for each in as_completed(running):
                each.result()
        finally:
            ended.set()
    return [task.trajectory() for task in tasks]


class _Turns:
    """The requests of a part, all drawn together when they are polled."""

    def __init__(self, sampler: PartSampler, ended: threading.Event) -> None:
        self._sampler, self._ended = sampler, ended
        self._asked: list[tuple[Sequence[int], SampleSettings, int]] = []

    @property
    def max_model_len(self) -> int:
        """See `Requests`."""
        return self._sampler.max_model_len

    def submit(self, prompt: Sequence[int], settings: SampleSettings, seed: int) -> str:
        """See `Requests`."""
        self._asked.append((prompt, settings, seed))
        return str(len(self._asked) - 1)

    def poll(self) -> list[tuple[str, list[Completion]]]:
        """Draw all that was asked."""
        if self._ended.is_set():
            raise EngineError("another part of the round failed")
        prompts, settings, seeds = zip(*self._asked, strict=True)
        self._asked = []
        groups = self._sampler.sample_part(prompts, settings, seeds)
        return [(str(name), group) for name, group in enumerate(groups)]

    def cancel(self, request_id: str) -> None:
        """What was asked together is drawn together, or not at all."""


def _tasks(
    environments: Sequence[Environment],
    records: Sequence[Record],
    settings: SampleSettings,
    seeds: Sequence[int],
    task_seeds: Sequence[int] | None,
) -> "list[_Task]":
    """What is to be run, checked."""
    task_seeds = seeds if task_seeds is None else task_seeds
    if settings.n != 1:
        raise ConfigError(
            f"n={settings.n}: give each trajectory an environment of its own, and n=1"
        )
    counts = {len(environments), len(records), len(seeds), len(task_seeds)}
    if len(counts) > 1:
        raise ConfigError(
            f"{len(environments)} environments, {len(records)} records, {len(seeds)} seeds and "
            f"{len(task_seeds)} task seeds; give one of each for every trajectory"
        )
    given = zip(environments, records, seeds, task_seeds, strict=True)
    return [_Task(*each) for each in given]


class _Task:
    """One trajectory in the making."""

    def __init__(self, environment: Environment, record: Record, seed: int, task_seed: int) -> None:
        self.environment = environment
        self.record = record
        self.task_seed = task_seed
        self.seed = seed
        self.messages: list[Message] = []
        self.tools: ToolSchemas = ()
        self.prompt: list[int] = []
        self.parts: list[Completion] = []
        self.length = 0
        self.turns = 0
        self.rewards: dict[str, float] = {}
        self.ended = ""
        self.error = ""

    def tokens(self) -> list[int]:
        """The prompt and all that followed."""
        return [*self.prompt, *(token for part in self.parts for token in part.tokens.tolist())]

    def add(self, part: Completion) -> None:
        """Append a turn of the model or tokens of the environment."""
        self.parts.append(part)
        self.length += len(part)

    def reward(self, rewards: Mapping[str, float]) -> None:
        """Add a turn's rewards."""
        for name, value in rewards.items():
            if not math.isfinite(value):
                raise DataError(f"step returned the reward {name}={value}; it must be finite")
            self.rewards[name] = self.rewards.get(name, 0.0) + float(value)

    def fail(self, error: Exception) -> None:
        """End because the environment raised, or its answer cannot be used."""
        self.ended = "error"
        self.error = f"{type(error).__name__}: {error}"

    def _routed(self, own: Sequence[Completion]) -> np.ndarray | None:
        """The experts of all that the model read: of each turn's own tokens those they were drawn
        with, whatever later turns recomputed."""
        given = [part.routed_experts for part in own if part.routed_experts is not None]
        if not given:
            return None
        rows = np.full(
            (len(self.prompt) + self.length - 1, *given[0].shape[1:]), -1, given[0].dtype
        )
        done = 0
        for part in given:
            rows[done : len(part)] = part[done:]
            done = len(part)
        return rows

    def trajectory(self) -> Trajectory:
        """What became of it."""

        def joined(name: str, dtype: type[np.generic]) -> np.ndarray:
            return np.concatenate([np.empty(0, dtype), *(getattr(p, name) for p in self.parts)])

        own = [part for part in self.parts if part.mask.any()]
        completion = Completion(
            tokens=joined("tokens", np.int32),
            logprobs=joined("logprobs", np.float32),
            versions=joined("versions", np.int32),
            mask=joined("mask", np.int8),
            finish_reason=self.ended,
            text=own[-1].text if own else "",
            seed=self.seed,
            routed_experts=self._routed(own),
        )
        return Trajectory(
            prompt=np.array(self.prompt, np.int32),
            completion=completion,
            rewards=self.rewards,
            turns=self.turns,
            messages=tuple(self.messages),
            error=self.error,
        )


class _Loop:
    """Moves tasks between the engine and their environments until all have ended."""

    def __init__(
        self,
        sampler: Requests,
        framing: Framing,
        settings: SampleSettings,
        limits: Limits,
        pool: ThreadPoolExecutor,
        *,
        together: bool = False,
    ) -> None:
        """With `together` turns are drawn when no environment steps any more."""
        self._sampler, self._framing, self._pool = sampler, framing, pool
        self._settings, self._limits, self._together = settings, limits, together
        self._sampling: dict[str, _Task] = {}
        self._stepping: dict[Future, _Task] = {}

    def run(self, tasks: Sequence[_Task]) -> None:
        """Until all have ended; their environments are closed."""
        try:
            self._run(tasks)
        finally:
            self._stop()
            for task in tasks:
                getattr(task.environment, "close", lambda: None)()

    def _run(self, tasks: Sequence[_Task]) -> None:
        for task in tasks:
            begun = self._pool.submit(task.environment.reset, task.record, task.task_seed)
            self._stepping[begun] = task
        until = ALL_COMPLETED if self._together else FIRST_COMPLETED
        while self._sampling or self._stepping:
            # With nothing to draw there is nothing to do but wait for an environment.
            limit = 0 if self._sampling and not self._together else None
            answered = wait(self._stepping, limit, until).done if self._stepping else ()
            for future in sorted(answered, key=lambda each: tasks.index(self._stepping[each])):
                self._environment_done(self._stepping.pop(future), future)
            if self._sampling:
                for name, completions in self._sampler.poll():
                    self._turn_sampled(self._sampling.pop(name), completions[0])

    def _stop(self) -> None:
        """Leave nothing queued."""
        for name in self._sampling:
            self._sampler.cancel(name)
        for future in self._stepping:
            future.cancel()

    def _environment_done(self, task: _Task, future: Future) -> None:
        error = future.exception()
        if error is not None:
            if not isinstance(error, Exception):
                raise error
            task.fail(error)
            return
        try:
            if task.turns:
                self._take_step(task, future.result())
            else:
                self._begin(task, future.result())
        except DataError as error:
            task.fail(error)

    def _begin(self, task: _Task, messages: object) -> None:
        """Begin with what `reset` returned."""
        task.messages = _messages(messages, "reset")
        task.tools = tuple(task.environment.tools)
        task.prompt = self._framing.prompt(task.messages, task.tools)
        if self._room(task) < 1:
            raise DataError(
                f"reset returned messages of {len(task.prompt)} tokens, which leave no room for an "
                f"answer in a window of {self._sampler.max_model_len}; shorten them, or raise "
                "max_length"
            )
        self._submit(task)

    def _take_step(self, task: _Task, turn: object) -> None:
        """Continue with what `step` returned."""
        if not isinstance(turn, Turn):
            raise DataError(f"step returned a {type(turn).__name__}; it must return a Turn")
        answers = _messages(turn.messages, "step")
        task.reward(turn.rewards)
        if turn.done:
            task.messages += answers
            task.ended = "done"
        elif task.turns >= self._limits.max_turns:
            task.ended = "turns"
        else:
            self._continue(task, answers)

    def _continue(self, task: _Task, answers: Sequence[Message]) -> None:
        last = int(task.parts[-1].tokens[-1])
        added = self._framing.continuation(task.messages, answers, task.tools, last)
        task.messages += answers
        if self._room(task) <= len(added):
            task.ended = "length"  # the model would not get to answer: it need not see them
            return
        count = len(added)
        task.add(
            Completion(
                tokens=np.array(added, np.int32),
                logprobs=np.zeros(count, np.float32),
                versions=np.full(count, -1, np.int32),
                mask=np.zeros(count, np.int8),
                finish_reason="",
                text="",
                seed=task.seed,
            )
        )
        self._submit(task)

    def _room(self, task: _Task) -> int:
        """Tokens that may still come."""
        whole = self._sampler.max_model_len - len(task.prompt)
        return min(whole, self._limits.max_tokens) - task.length

    def _submit(self, task: _Task) -> None:
        most = min(self._settings.max_tokens, max(self._room(task), 1))
        settings = dataclasses.replace(
            self._settings, max_tokens=most, min_tokens=min(self._settings.min_tokens, most)
        )
        self._sampling[self._sampler.submit(task.tokens(), settings, task.seed)] = task

    def _turn_sampled(self, task: _Task, completion: Completion) -> None:
        task.add(completion)
        task.turns += 1
        message = self._framing.message(completion)
        task.messages.append(message)
        if completion.truncated:
            task.ended = "length"
        else:
            self._stepping[self._pool.submit(task.environment.step, message)] = task


def _messages(given: object, method: str) -> list[Message]:
    """An environment's messages, checked.

    Raises:
      DataError: saying what it is instead.
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise DataError(f"{method} returned a {type(given).__name__}; it must return messages")
    for each in given:
        if not (isinstance(each, Mapping) and isinstance(each.get("role"), str)):
            raise DataError(
                f"{method} returned {each!r:.80}, which is not a message: it has no role"
            )
    return list(given)
