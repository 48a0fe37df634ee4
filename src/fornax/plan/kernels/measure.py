"""Timing the implementations of a call in a child process, which one that crashes ends alone."""

import functools
import importlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import IO, Any

from fornax.config.errors import KernelError
from fornax.config.worker_process import WorkerProcess, ending, last_line, receive, send
from fornax.plan.kernels.calls import KernelCall

__all__ = ["LIMIT_SECONDS", "Measurement", "measure"]

LIMIT_SECONDS = 120.0
_STARTS_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How fast one call is."""

    call: KernelCall
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of each implementation that ran, with gradients where the operation has any."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """The error of each that raised, crashed or took too long."""
    declined: Mapping[str, str] = field(default_factory=dict)
    """Why the others of this platform were not measured."""
    flops: float = 0.0
    """Of the products that the call cannot do without."""
    bytes: float = 0.0
    """Of inputs and results, each moved once; 0 where the operation does not count them."""
    dtype: str = ""
    """Of the operands of its products."""

    @property
    def fastest(self) -> str | None:
        """The implementation to choose; None where none ran."""
        return min(self.seconds, key=lambda name: self.seconds[name], default=None)


def measure(
    calls: Iterable[KernelCall],
    *,
    keep: bool,
    modules: Sequence[str] = (),
    limit_seconds: float = LIMIT_SECONDS,
) -> Iterator[Measurement]:
    """Time every implementation that can run each call, on one device of this machine.

    They take turns in one child process. One that raises, ends the process or exceeds the limit
    has lost; the others are then measured without it.

    Args:
      calls: for this machine's platform.
      keep: whether later processes on this machine choose by what is measured.
      modules: imported in the child, for operations and implementations that they add.
      limit_seconds: that one turn of one implementation may take, its compilation included.

    Raises:
      KernelError: the child does not start, or has no such operation.
    """
    child: _Child | None = None
    with tempfile.TemporaryFile() as log:
        try:
            for call in calls:
                failed: dict[str, str] = {}
                found = None
                while found is None:
                    child = child or _Child(log, modules)
                    found = child.measure(call, failed, keep=keep, limit_seconds=limit_seconds)
                    if found is None:
                        child = None
                yield found
        finally:
            if child is not None:
                child.close()


class _Child:
    def __init__(self, log: IO[bytes], modules: Sequence[str]) -> None:
        self._log = log
        self._process = WorkerProcess("fornax.plan.kernels.measure:serve", log=log)
        self._process.send(list(modules))
        try:
            answer = self._process.receive(_STARTS_SECONDS)
        except (EOFError, TimeoutError) as error:
            self.close()
            late = isinstance(error, TimeoutError)
            why = f"not within {_STARTS_SECONDS:g} s" if late else last_line(log)
            raise KernelError(
                f"the process that measures kernels did not start: {why}; run it on a machine that "
                "is idle, with Fornax importable"
            ) from None
        if problem := answer.get("problem"):
            self.close()
            raise KernelError(problem)

    def measure(
        self, call: KernelCall, failed: dict[str, str], *, keep: bool, limit_seconds: float
    ) -> Measurement | None:
        """Measure a call; None when the process ended, why is then in `failed`."""
        asked = {"operation": call.operation, "fields": dict(call.fields)}
        self._process.send({**asked, "failed": failed, "keep": keep})
        begun = None
        while True:
            try:
                told = self._process.receive(limit_seconds)
            except TimeoutError:
                self.close()
                failure = f"took longer than {limit_seconds:g} s and was stopped"
            except EOFError:
                failure = f"ended its process: {ending(self._process.wait())}"
            else:
                if "problem" in told:
                    raise KernelError(told["problem"])
                if "begins" not in told:
                    return Measurement(call=call, **told)
                begun = told["begins"]
                continue
            if begun is None:
                raise KernelError(
                    f"the process that measures kernels died: {failure}; it said: "
                    f"{last_line(self._log)}"
                )
            failed[begun] = failure
            return None

    def close(self) -> None:
        self._process.kill()


def serve(parent: Connection) -> None:
    """The child: imports what is named, then measures call after call."""
    from fornax import kernels

    problem = _import(receive(parent))
    send(parent, {"problem": problem})
    while not problem:
        asked = receive(parent)
        operation = kernels.operations().get(asked["operation"])
        if operation is None:
            known = ", ".join(kernels.operations())
            problem = f"there is no operation {asked['operation']!r}; there are {known}"
            send(parent, {"problem": problem})
            return
        send(parent, _measured(operation, asked, lambda name: send(parent, {"begins": name})))


def _import(modules: Sequence[str]) -> str:
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            return (
                f"importing {name} failed: {type(error).__name__}: {error}; name a module that "
                "Python finds (PYTHONPATH) and that registers operations or implementations"
            )
    return ""


def _measured(
    operation: Any, asked: Mapping[str, Any], begins: Callable[[str], object]
) -> dict[str, Any]:
    from fornax.kernels import choices, tuning

    call = operation.call(**asked["fields"])
    failed = dict(asked["failed"])
    able = [
        one
        for one in operation.candidates(call)
        if one.alone and one.name != "reference" and one.name not in failed
    ]
    contestants = {one.name: functools.partial(operation.benchmark, call, one.run) for one in able}
    seconds, failures = tuning.race(operation.name, contestants, begins=begins)
    failures = {**failed, **failures}
    if asked["keep"]:
        choices.record(operation.name, call, seconds, failures)
    work = None if operation.work is None else operation.work(call)
    return {
        "seconds": seconds,
        "failures": failures,
        "declined": {
            one.name: one.reason(call) or "it cannot be measured on one device"
            for one in operation.implementations
            if one.platform in (None, call.platform)
            and one.name not in (*seconds, *failures, "reference")
        },
        **({} if work is None else vars(work)),
    }
