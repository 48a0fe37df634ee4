"""One step off: the next rollouts are made in a thread while the trainer learns from the last.

What was made depends on weights and numbers alone, never on which of the two was faster: rollouts
are made under the weights of one version from beginning to end, and whether they are too old is
decided by counting versions.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from fornax.config.errors import ConfigError
from fornax.tune.rollout.sampler import Sampler

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
        """
        if updates_per_batch < 1:
            raise ConfigError(f"updates_per_batch={updates_per_batch} must be 1 or more")
        if max_staleness < 0:
            raise ConfigError(f"max_staleness={max_staleness} must be 0 or more")
        self._sampler, self._make, self._save, self._load = sampler, make, save, load
        self._updates, self._most, self._when_stale = updates_per_batch, max_staleness, when_stale
        self._params: Callable[[], Any] | None = None
        self._version = -1
        self._sampler_version: int | None = None
        self._next: int | None = None
        self._needed_at = 0
        self._pending: _Pending[T] | None = None
        self.discarded = 0
        """Batches made in vain."""
        self.waited = 0.0
        """Seconds that `take` waited for batches."""

    def follow(self, version: int, params: Callable[[], Any]) -> None:
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
        began = time.monotonic()
        pending, self._pending, self._next = self._pending, None, None
        if pending is not None:
            pending.wait()
        if pending is None or pending.index != index:
            value = self._make_now(index)
        elif self._version - pending.version > self._most:
            self.discarded += 1
            value = self._make_now(index)
        else:
            value = pending.value()
        self.waited += time.monotonic() - began
        self._next, self._needed_at = index + 1, self._version + self._updates
        self._begin_if_allowed()
        return value

    def state(self) -> dict[str, np.ndarray]:
        """The batch made ahead, waited for; a resumed run takes it as if nothing had happened."""
        pending = self._pending
        numbers = [-1 if self._next is None else self._next, self._needed_at]
        if pending is None:
            return {"numbers": np.array([*numbers, -1, -1], np.int64)}
        pending.wait()
        value = self._save(pending.value())
        found = {f"batch/{name}": np.asarray(array) for name, array in value.items()}
        found["numbers"] = np.array([*numbers, pending.index, pending.version], np.int64)
        return found

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from a `state`."""
        self._stop()
        following, self._needed_at, index, version = np.asarray(state["numbers"]).tolist()
        self._next = None if following < 0 else following
        if index >= 0:
            arrays = {
                name.removeprefix("batch/"): array
                for name, array in state.items()
                if name.startswith("batch/")
            }
            self._pending = _Pending(index, version, lambda: self._load(arrays))
            self._pending.run()

    def close(self) -> None:
        """Stop what is being made; the sampler is not closed."""
        self._stop()

    def _stop(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending.done:
            getattr(self._sampler, "interrupt", lambda: None)()
            pending.wait()
            self._sampler_version = None  # the next update ends the interruption

    def _begin_if_allowed(self) -> None:
        if self._next is None or self._pending is not None or self._params is None:
            return
        if self._most == 0:
            return
        if self._when_stale == "wait" and self._needed_at - self._version > self._most:
            return
        self._update()
        index, self._next = self._next, None
        self._pending = _Pending(index, self._version, lambda: self._make(self._sampler, index))
        self._pending.start()

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

    def start(self) -> None:
        """Make it in a thread."""
        self._thread = threading.Thread(target=self.run, name="fornax-rollouts", daemon=True)
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
