"""One operation, several implementations: who can run a call, who is chosen, why not the others.

An operation describes each call as a small hashable dataclass (shapes, dtypes, options, platform).
Implementations stand in order of preference; each answers a call with None ("I can run it") or with
the reason why it declines. The choice is, in this order:

1. the one named by hand (`implementation=`): it runs, or `KernelError` says why it declines;
2. the fastest one measured (`with autotuning():`, now or earlier) for such a call on this machine;
3. the first in order that does not decline.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import jax

from fornax.config.errors import KernelError
from fornax.kernels import choices, tuning

__all__ = [
    "Call",
    "Implementation",
    "Operation",
    "current_platform",
    "interpreting",
    "target_platform",
]

_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("target", default=None)
_interpreting: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreting", default=False)


class Call(Protocol):
    """What an implementation needs to know of one call; a frozen dataclass, so also a cache key."""

    @property
    def platform(self) -> str: ...


CallT = TypeVar("CallT", bound=Call)


@dataclass(frozen=True)
class Implementation(Generic[CallT]):
    """One way to run an operation."""

    name: str
    run: Callable[..., Any]
    """Takes the operation's arguments, with those it leaves out filled in."""
    declines: Callable[[CallT], str | None]
    """Returns None when it can run the call, otherwise the reason as half a sentence."""


@dataclass(frozen=True)
class Operation(Generic[CallT]):
    """An operation's name and its implementations in order of preference."""

    name: str
    implementations: tuple[Implementation[CallT], ...]
    rehearse: Callable[[CallT, Callable[..., Any]], Callable[[], Any]]
    """(call, an implementation's `run`) to a function that runs it, with gradients, on made-up
    inputs of the call's shapes and returns the arrays."""

    def candidates(self, call: CallT) -> tuple[Implementation[CallT], ...]:
        """Return the implementations that can run `call`, in order of preference."""
        return tuple(i for i in self.implementations if i.declines(call) is None)

    def explain(self, call: CallT) -> dict[str, str]:
        """Return for every implementation "can run it" or the reason why it declines."""
        return {i.name: i.declines(call) or "can run it" for i in self.implementations}

    def choose(self, call: CallT, implementation: str | None = None) -> Implementation[CallT]:
        """Return the implementation that will run `call`.

        Raises:
            KernelError: `implementation` is unknown or declines, or nobody can run the call.
        """
        if implementation is not None:
            return self._by_hand(call, implementation)
        candidates = self.candidates(call)
        if not candidates:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.explain(call).items())
            raise KernelError(f"{self.name}: no implementation can run {call}: {reasons}")
        if len(candidates) > 1 and jax.process_count() == 1:  # processes must not differ
            measured = choices.lookup(self.name, call)
            if measured is None and tuning.wanted() and call.platform == jax.default_backend():
                contestants = {
                    c.name: self.rehearse(call, c.run)
                    for c in candidates
                    if c.name != "reference"  # for tests and curiosity: never chosen for speed
                }
                measured = choices.record(self.name, call, tuning.race(contestants))
            for candidate in candidates:
                if candidate.name == measured:
                    return candidate
        return candidates[0]

    def _by_hand(self, call: CallT, name: str) -> Implementation[CallT]:
        for candidate in self.implementations:
            if candidate.name == name:
                reason = candidate.declines(call)
                if reason is None:
                    return candidate
                able = ", ".join(i.name for i in self.candidates(call)) or "none"
                raise KernelError(
                    f"{self.name}: implementation={name!r} declines this call: {reason}; "
                    f"use one of: {able}, or leave implementation out"
                )
        known = ", ".join(i.name for i in self.implementations)
        raise KernelError(f"{self.name}: implementation={name!r} is unknown; use one of: {known}")


def current_platform() -> str:
    """Return the platform that calls are compiled for: `cpu`, `gpu` or `tpu`."""
    return _target.get() or jax.default_backend()


def interpreting() -> bool:
    """Return whether Pallas kernels are interpreted where they would be compiled."""
    return _interpreting.get()


@contextlib.contextmanager
def target_platform(platform: str, *, interpret: bool = False) -> Iterator[None]:
    """Choose implementations for `platform` inside this block, whatever device is attached.

    For compiling ahead of time, for instance for a TPU from a machine that has none.

    Args:
        platform: `cpu`, `gpu` or `tpu`.
        interpret: run its Pallas kernels on the device at hand, interpreted: slow, to check their
            numbers.

    Raises:
        KernelError: for another name.
    """
    if platform not in ("cpu", "gpu", "tpu"):
        raise KernelError(f"target_platform={platform!r} is unknown; use one of: cpu, gpu, tpu")
    token, other = _target.set(platform), _interpreting.set(interpret)
    try:
        yield
    finally:
        _target.reset(token)
        _interpreting.reset(other)
