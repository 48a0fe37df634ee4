"""Where rounds come from: drawn with the newest weights, or ahead, while the one before trains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from fornax.tune.rl.collect import Collector
from fornax.tune.rl.rollouts import Collected, from_arrays, to_arrays
from fornax.tune.rollout import AsyncRollouts, Sampler

__all__ = ["Ahead", "OnPolicy"]

Current = Callable[[], nnx.Module]


@dataclass(kw_only=True)
class OnPolicy:
    """Each round is drawn when it is asked for, with the weights of that moment."""

    collector: Collector
    sampler: Callable[[nnx.Module], Sampler]
    """The model before the first round to a sampler of it."""
    weights: Callable[[nnx.Module], Any]
    """The model to what `Sampler.update` takes."""
    _sampler: Sampler | None = None
    _current: Current | None = None
    _step: int = 0

    def follow(self, step: int, current: Current) -> None:
        """See `Source.follow`."""
        self._step, self._current = step, current

    def take(self, number: int) -> Collected:
        """See `Source.take`."""
        assert self._current is not None
        model = self._current()
        if self._sampler is None:
            self._sampler = self.sampler(model)
        self._sampler.update(self.weights(model), self._step)
        return self.collector(self._sampler, number)

    def state(self) -> dict[str, Any]:
        """See `Source.state`."""
        return {"collector": self.collector.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Source.restore`."""
        self.collector.restore(state["collector"])

    def close(self) -> None:
        """End the sampler and the rewards."""
        self.collector.close()
        if self._sampler is not None:
            self._sampler.close()


@dataclass(kw_only=True)
class Ahead:
    """The next round is drawn in a thread while this one is trained on, with older weights."""

    collector: Collector
    sampler: Callable[[nnx.Module], Sampler]
    weights: Callable[[nnx.Module], Any]
    steps_per_round: int
    _rollouts: AsyncRollouts[Collected] | None = None
    _sampler: Sampler | None = None
    _pending: Mapping[str, Any] | None = None

    def follow(self, step: int, current: Current) -> None:
        """See `Source.follow`: the thread gets the weights where a round begins."""
        if self._rollouts is None:
            self._start(current())
        assert self._rollouts is not None
        self._rollouts.follow(step, lambda: self.weights(current()))

    def take(self, number: int) -> Collected:
        """See `Source.take`."""
        assert self._rollouts is not None
        return self._rollouts.take(number)

    def state(self) -> dict[str, Any]:
        """See `Source.state`; a round being drawn is waited for."""
        pending = self._pending if self._rollouts is None else self._rollouts.state()
        return {"pending": pending or {}, "collector": self.collector.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Source.restore`."""
        self.collector.restore(state["collector"])
        self._pending = state["pending"]

    def close(self) -> None:
        """End the thread, the sampler and the rewards."""
        if self._rollouts is not None:
            self._rollouts.close()
        self.collector.close()
        if self._sampler is not None:
            self._sampler.close()

    def _start(self, model: nnx.Module) -> None:
        self._sampler = self.sampler(model)
        self._rollouts = AsyncRollouts(
            self._sampler,
            self.collector,
            save=to_arrays,
            load=from_arrays,
            updates_per_batch=self.steps_per_round,
            max_staleness=self.steps_per_round,
        )
        if self._pending:
            self._rollouts.restore(self._pending)
