"""Rounds ahead: the next rollouts are made in a thread while the trainer learns from the last.

What was made depends on weights and numbers alone, never on which of the two was faster: rollouts
are made under the weights of one version from beginning to end, and whether they are too old is
decided by counting versions.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, Literal, TypeVar

import numpy as np

from fornax.config.errors import ConfigError
from fornax.tune.rollout.sampler import Sampler, Weights

__all__ = ["AsyncRollouts"]

T = TypeVar("T")


class AsyncRollouts(Generic[T]):
    """Makes batches of rollouts 0, 1, 2, … ahead of their use, within a bound of staleness.

    The trainer's thread calls `follow` before each optimizer step and `take` for each batch; in
    between the sampler belongs to the thread in here.

    Example:
      rollouts = AsyncRollouts(sampler, collect, save=to_arrays, load=from_arrays)
      for step in range(steps):
          rollouts.follow(step, lambda: params)
          params = train(params, rollouts.take(step))
    """

    def __init__(
        self,
        sampler: Sampler,
        make: Callable[[Sampler, int], T],
        *,
        save: Callable[[T], Mapping[str, np.ndarray]],
        load: Callable[[Mapping[str, np.ndarray]], T],
        updates_per_batch: int = 1,
        max_staleness: int = 1,
        when_stale: Literal["wait", "discard"] = "wait",
        ahead: int = 1,
    ) -> None:
        """Nothing is made yet.

        Args:
          sampler: draws completions; gets its weights here.
          make: (sampler, number of the batch) to a batch. It runs in the thread.
          save: a batch as arrays, for a checkpoint.
          load: what `save` took apart.
          updates_per_batch: optimizer steps that a batch is used for.
          max_staleness: versions that the weights of a batch may be behind when it is taken; 0
            makes each batch when it is taken.
          when_stale: `wait` begins a batch no sooner than the bound allows. `discard` begins it at
            once, and makes it again where it turns out too old.
          ahead: batches that are made ahead of the one taken, one after the other; above 1 the
            sampler must hold a version for each (`at`, as `RemoteSampler` has).
        """
        if updates_per_batch < 1:
            raise ConfigError(f"updates_per_batch={updates_per_batch} must be 1 or more")
        if max_staleness < 0:
            raise ConfigError(f"max_staleness={max_staleness} must be 0 or more")
        if ahead > 1 and (when_stale == "discard" or not hasattr(sampler, "at")):
            raise ConfigError(
                f"ahead={ahead} takes when_stale='wait' and a sampler that holds several versions, "
                f"which {type(sampler).__name__} with when_stale={when_stale!r} is not; use 1"
            )
        self._sampler, self._make, self._save, self._load = sampler, make, save, load
        self._ahead = ahead
        self._updates, self._most, self._when_stale = updates_per_batch, max_staleness, when_stale
        self._params: Callable[[], Weights] | None = None
        self._version = -1
        self._sampler_version: int | None = None
        self._next: int | None = None
        self._needed_at = 0
        self._pending: deque[_Pending[T]] = deque()
        self.discarded = 0
        """Batches made in vain."""

    def follow(self, version: int, params: Callable[[], Weights]) -> None:
        """Take note of the trainer's weights, and begin the next batch if it may begin.

        Args:
          version: of the weights: optimizer steps done.
          params: gives them, in a form that the sampler's `update` knows. Called here and in
            `take`, or not at all.
        """
        self._version, self._params = version, params
        self._begin_if_allowed()

    def take(self, index: int) -> T:
        """Batch number `index`, to be trained on with the weights of the last `follow`.

        Raises:
          Exception: what making it raised.
        """
        pending = self._pending.popleft() if self._pending else None
        if pending is not None:
            pending.wait()
        if pending is None or pending.index != index:
            self._stop()
            value = self._make_now(index)
        elif self._version - pending.version > self._most:
            self.discarded += 1
            value = self._make_now(index)
        else:
            value = pending.value()
        self._next = index + 1 + len(self._pending)
        self._needed_at = self._version + self._updates * (1 + len(self._pending))
        self._begin_if_allowed()
        return value

    def state(self) -> dict[str, np.ndarray]:
        """The batch made ahead, waited for; a resumed run takes it as if nothing had happened."""
        numbers = [-1 if self._next is None else self._next, self._needed_at]
        found: dict[str, np.ndarray] = {}
        for place, pending in enumerate(self._pending):
            pending.wait()
            value = self._save(pending.value())
            found |= {f"batch{place or ''}/{name}": np.asarray(x) for name, x in value.items()}
            numbers += [pending.index, pending.version]
        found["numbers"] = np.array(numbers, np.int64)
        return found

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Resume from a `state`."""
        self._stop()
        following, self._needed_at, *made = np.asarray(state["numbers"]).tolist()
        self._next = None if following < 0 else following
        for place, (index, version) in enumerate(zip(made[::2], made[1::2], strict=True)):
            if index < 0:
                continue
            prefix = f"batch{place or ''}/"
            arrays = {k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)}
            pending = _Pending(index, version, lambda arrays=arrays: self._load(arrays))
            pending.run()
            self._pending.append(pending)

    def close(self) -> None:
        """Stop what is being made; the sampler is not closed."""
        self._stop()

    def _stop(self) -> None:
        unfinished = [each for each in self._pending if not each.done]
        self._pending.clear()
        if unfinished:
            getattr(self._sampler, "interrupt", lambda: None)()
            for each in unfinished:
                each.wait()
            self._sampler_version = None  # the next update ends the interruption

    def _begin_if_allowed(self) -> None:
        if self._next is None or self._params is None or self._most == 0:
            return
        while len(self._pending) < self._ahead:
            if self._when_stale == "wait" and self._needed_at - self._version > self._most:
                return
            self._update()
            index, version = self._next, self._version
            at = getattr(self._sampler, "at", None)
            sampler = self._sampler if at is None else at(version)
            made = functools.partial(self._make, sampler, index)
            before = self._pending[-1] if self._pending else None
            self._pending.append(_Pending(index, version, made))
            self._pending[-1].start(before)
            self._next, self._needed_at = index + 1, self._needed_at + self._updates

    def _make_now(self, index: int) -> T:
        self._update()
        return self._make(self._sampler, index)

    def _update(self) -> None:
        """Give the sampler the trainer's weights; nothing may be in the making."""
        if self._params is None:
            raise ConfigError("there are no weights to make rollouts with; call follow first")
        if self._sampler_version != self._version:
            self._sampler.update(self._params(), self._version)
            self._sampler_version = self._version


class _Pending(Generic[T]):
    """A batch in the making, or made."""

    def __init__(self, index: int, version: int, make: Callable[[], T]) -> None:
        self.index = index
        self.version = version
        self._make: Callable[[], T] | None = make
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether it is made, or failed."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, before: "_Pending[T] | None") -> None:
        """Make it in a thread, after the one before it."""

        def run() -> None:
            if before is not None:
                before.wait()
            self.run()

        self._thread = threading.Thread(target=run, name="fornax-rollouts", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Make it here."""
        assert self._make is not None, "it is made once"
        make, self._make = self._make, None
        try:
            self._value.append(make())
        except BaseException as error:  # raised again in the thread that takes it
            self._error = error

    def wait(self) -> None:
        """Until it is made or failed."""
        if self._thread is not None:
            self._thread.join()

    def value(self) -> T:
        """The batch; raises what making it raised."""
        if self._error is not None:
            raise self._error
        return self._value[0]
