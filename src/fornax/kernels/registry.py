"""One operation, several implementations: who can run a call, who is chosen, why not the others.

An operation describes each call as a small hashable dataclass (shapes, dtypes, options, platform).
Implementations stand in order of preference; each answers a call with None ("I can run it") or with
the reason why it declines. The choice is, in this order:

1. the one named by hand (`implementation=`): it runs, or `KernelError` says why it declines;
2. the fastest one measured (`with autotuning():`, now or earlier) for such a call on this machine,
   unless the first in order keeps the bits of a row (`steady`);
3. the first in order that does not decline.

One that is deprecated is taken by hand, with a warning, or where no other can run the call.

`with recording_choices()` collects what was chosen, and why what is preferred was not: the trainer,
the server and the planner print one such line for each kernel. `with recording_calls()` collects
the calls themselves, to be measured.

What this module knows of is in `operations()`; `register` adds a user's own operation to it, and
`Operation.add` an implementation to any.
"""

import contextlib
import contextvars
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Literal, Protocol, TypeVar

import jax

from fornax.config.errors import KernelError
from fornax.kernels import choices, tuning

__all__ = [
    "Call",
    "Choice",
    "Implementation",
    "Operation",
    "Support",
    "Work",
    "current_platform",
    "interpreting",
    "operations",
    "recording_calls",
    "recording_choices",
    "register",
    "target_platform",
]

Support = Literal["tested", "compiled", "lowered"]
"""What the tests do with an implementation on a platform: run it there, compile it with the
platform's compiler, or only lower it. What was timed there is for the tuner to say."""
_SUPPORT: Mapping[str, Support] = {"cpu": "tested", "tpu": "compiled", "gpu": "lowered"}

_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("target", default=None)
_interpreting: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreting", default=False)


class Call(Protocol):
    """What an implementation needs to know of one call; a frozen dataclass, so also a cache key."""

    @property
    def platform(self) -> str: ...


CallT = TypeVar("CallT", bound=Call)


@dataclass(frozen=True)
class Work:
    """What a call must do at least, with the gradients that its benchmark makes."""

    flops: float
    """Multiplications and additions of its products; what a mask hides is not counted."""
    bytes: float
    """Of its inputs and results, each moved once."""
    dtype: str
    """Of the operands of its products."""


@dataclass(frozen=True)
class Implementation(Generic[CallT]):
    """One way to run an operation."""

    name: str
    run: Callable[..., Any]
    """Takes the operation's arguments, with those it leaves out filled in."""
    declines: Callable[[CallT], str | None]
    """Returns None when it can run the call, otherwise the reason as half a sentence."""
    platform: str | None = None
    """The one platform it runs on: `cpu`, `gpu` or `tpu`; None for any."""
    alone: bool = True
    """Whether one device can run its share of a call; what cannot is not measured, and taken by its
    place in the order."""
    steady: bool = False
    """Whether a row's result has the same bits whatever other rows a call has. Where it is the
    first that can run, none that was measured faster takes its place, for that may be so at some
    numbers of rows alone."""
    on: tuple[str, ...] = ()
    """Where it is supported, of `cpu`, `gpu` and `tpu`; empty: on its platform, or on all three."""
    deprecated: str = ""
    """What to use in its place, where a later release removes it."""

    @property
    def support(self) -> Mapping[str, Support]:
        """By platform, what the tests do with it there; a platform that is missing is declined."""
        everywhere = tuple(_SUPPORT) if self.platform is None else (self.platform,)
        return {platform: _SUPPORT[platform] for platform in self.on or everywhere}

    def reason(self, call: CallT) -> str | None:
        """Return None when it can run `call`, otherwise the reason as half a sentence."""
        if self.platform not in (None, call.platform):
            return f"it runs on {self.platform}, not on {call.platform}"
        return self.declines(call)


@dataclass(frozen=True)
class Choice:
    """Which implementation runs one operation, and why those before it in order do not."""

    operation: str
    implementation: str
    declined: tuple[tuple[str, str], ...] = ()
    """Name and reason of those that are preferred to it on the call's platform."""

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.declined)
        chosen = f"{self.operation}: {self.implementation}"
        return f"{chosen} ({reasons})" if reasons else chosen


_record: contextvars.ContextVar[dict[Choice, None] | None] = contextvars.ContextVar(
    "record", default=None
)
_calls: contextvars.ContextVar[dict[tuple[str, Any], Choice] | None] = contextvars.ContextVar(
    "calls", default=None
)
_operations: dict[str, "Operation[Any]"] = {}


@contextlib.contextmanager
def recording_choices() -> Iterator[dict[Choice, None]]:
    """Collect the choices of the calls made, or traced, inside this block, in order.

    Operations with one implementation beside the reference have nothing to choose from.

    Yields:
        The distinct choices as keys, filled as they are made.
    """
    found: dict[Choice, None] = {}
    token = _record.set(found)
    try:
        yield found
    finally:
        _record.reset(token)


@contextlib.contextmanager
def recording_calls() -> Iterator[dict[tuple[str, Any], Choice]]:
    """Collect the calls made, or traced, inside this block that leave the choice open.

    Yields:
        By operation's name and call, in order, what was chosen, filled as calls are made.
    """
    found: dict[tuple[str, Any], Choice] = {}
    token = _calls.set(found)
    try:
        yield found
    finally:
        _calls.reset(token)


@dataclass(eq=False)
class Operation(Generic[CallT]):
    """An operation's name and its implementations in order of preference."""

    name: str
    implementations: tuple[Implementation[CallT], ...]
    benchmark: Callable[[CallT, Callable[..., Any]], Callable[[], Any]]
    """(call, an implementation's `run`) to a function that runs it, with gradients, on made-up
    inputs of the call's shapes and returns the arrays."""
    refusal: Callable[[CallT], str] | None = None
    """The error's text for a call that nobody can run; None lists each reason."""
    work: Callable[[CallT], Work] | None = None
    """What a call must do at least; None where that is not counted."""
    call: type[CallT] | None = None
    """The class that describes its calls, which another process makes again from its fields."""

    def add(self, implementation: Implementation[CallT], *, before: str | None = None) -> None:
        """Give the operation another implementation, in this process.

        Programs that are compiled already keep theirs.

        Args:
            implementation: of a name that the operation does not have.
            before: the one that it is preferred to; None: all.

        Raises:
            KernelError: the name is taken, or there is none of the name `before`.
        """
        names = [one.name for one in self.implementations]
        if implementation.name in names:
            raise KernelError(
                f"{self.name} has an implementation {implementation.name!r} already; choose "
                f"another name than {', '.join(names)}"
            )
        if before is not None and before not in names:
            raise KernelError(
                f"{self.name}: before={before!r} is unknown; use one of: {', '.join(names)}"
            )
        place = 0 if before is None else names.index(before)
        ordered = [*self.implementations]
        ordered.insert(place, implementation)
        self.implementations = tuple(ordered)

    def candidates(self, call: CallT) -> tuple[Implementation[CallT], ...]:
        """Return the implementations that can run `call`, in order of preference."""
        return tuple(i for i in self.implementations if i.reason(call) is None)

    def explain(self, call: CallT) -> dict[str, str]:
        """Return for every implementation "can run it" or the reason why it declines."""
        return {i.name: i.reason(call) or "can run it" for i in self.implementations}

    def choose(self, call: CallT, implementation: str | None = None) -> Implementation[CallT]:
        """Return the implementation that will run `call`, and record the choice.

        Raises:
            KernelError: `implementation` is unknown or declines, or nobody can run the call.
        """
        if implementation is not None:
            chosen, choice = self._by_hand(call, implementation), Choice(self.name, implementation)
        else:
            chosen, choice = self._best(call)
        record = _record.get()
        if record is not None and self._has_several:
            record[choice] = None
        calls = _calls.get()
        if calls is not None and implementation is None:
            calls[self.name, call] = choice
        return chosen

    @property
    def _has_several(self) -> bool:
        return sum(one.name != "reference" for one in self.implementations) > 1

    def choice(self, call: CallT) -> Choice:
        """Return what `choose` would choose for `call`, and why; measures and records nothing.

        Raises:
            KernelError: nobody can run the call.
        """
        return self._best(call, measure=False)[1]

    def _best(self, call: CallT, *, measure: bool = True) -> tuple[Implementation[CallT], Choice]:
        candidates = self.candidates(call)
        if not candidates and self.refusal is not None:
            raise KernelError(self.refusal(call))
        if not candidates:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.explain(call).items())
            raise KernelError(f"{self.name}: no implementation can run {call}: {reasons}")
        # For tests and curiosity: never chosen for speed.
        able = tuple(c for c in candidates if c.name != "reference") or candidates
        able = tuple(c for c in able if not c.deprecated) or able
        measured = self._measured(call, able, measure=measure)
        working = [c for c in able if c.name not in measured.failures] or able
        best = next((c for c in working if c.name == measured.chosen), working[0])
        return best, Choice(self.name, best.name, self._declined(call, best, measured))

    def _measured(
        self, call: CallT, able: tuple[Implementation[CallT], ...], *, measure: bool
    ) -> choices.Kept:
        """Return what is known of the speed of `able`, measuring where that is wanted."""
        first = able[0]
        able = (
            tuple(one for one in able if one.alone)
            if first.alone and not first.steady
            else (first,)
        )
        if len(able) == 1 or (call.platform == "tpu" and not measure):
            return choices.Kept()  # a planner must not take the TPU from its compiler
        if jax.process_count() > 1 or call.platform != jax.default_backend():
            return choices.Kept()  # processes must not differ
        found = choices.lookup(self.name, call)
        if found is None and measure and tuning.wanted():
            contestants = {c.name: functools.partial(self.benchmark, call, c.run) for c in able}
            found = choices.record(self.name, call, *tuning.race(self.name, contestants))
        return found or choices.Kept()

    def _declined(
        self, call: CallT, best: Implementation[CallT], measured: choices.Kept
    ) -> tuple[tuple[str, str], ...]:
        found = []
        for one in self.implementations:
            if one is best:
                break
            if one.platform in (None, call.platform):
                failure = measured.failures.get(one.name)
                slower = "slower when measured" if failure is None else f"failed: {failure}"
                old = f"deprecated: use {one.deprecated}" if one.deprecated else None
                found.append((one.name, one.reason(call) or old or slower))
        return tuple(found)

    def _by_hand(self, call: CallT, name: str) -> Implementation[CallT]:
        for candidate in self.implementations:
            if candidate.name == name:
                reason = candidate.reason(call)
                if reason is None:
                    self._warn_of_end(candidate)
                    return candidate
                able = ", ".join(i.name for i in self.candidates(call)) or "none"
                raise KernelError(
                    f"{self.name}: implementation={name!r} declines this call: {reason}; "
                    f"use one of: {able}, or leave implementation out"
                )
        known = ", ".join(i.name for i in self.implementations)
        raise KernelError(f"{self.name}: implementation={name!r} is unknown; use one of: {known}")

    def _warn_of_end(self, chosen: Implementation[CallT]) -> None:
        if chosen.deprecated:
            warnings.warn(
                f"{self.name}: implementation={chosen.name!r} is deprecated and a later release "
                f"removes it; use {chosen.deprecated}",
                FutureWarning,
                stacklevel=2,
            )


def register(operation: Operation[CallT]) -> Operation[CallT]:
    """Let `fornax kernels` list, measure and tune an operation; returns it.

    Raises:
        KernelError: another operation has the name, or the class of its calls is not given.
    """
    if operation.call is None:
        raise KernelError(
            f"{operation.name} is measured in a process of its own, which makes its calls from "
            "their fields; give Operation(call=...), the dataclass that describes them"
        )
    if _operations.setdefault(operation.name, operation) is not operation:
        raise KernelError(
            f"there is an operation {operation.name!r} already; choose another name than "
            f"{', '.join(_operations)}"
        )
    return operation


def operations() -> Mapping[str, "Operation[Any]"]:
    """Every operation with a choice of implementations, by name."""
    return MappingProxyType(_operations)


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
        interpret: run its Pallas kernels on the present device, interpreted: slow, to check their
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
