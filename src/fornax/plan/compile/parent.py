"""Compiling programs: those that the cache has not, in a child process whose progress is shown."""

import contextlib
import dataclasses
import importlib.util
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TextIO

from fornax.config import environment
from fornax.config.worker_process import WorkerProcess, ending, last_line
from fornax.plan.artifact import Artifact
from fornax.plan.compile import cache as cache_folder
from fornax.plan.compile.errors import (
    CompileError,
    MissingCompilerError,
    OutOfMemoryError,
    from_mapping,
)
from fornax.plan.compile.request import Request
from fornax.plan.format import format_gib
from fornax.plan.topology import Topology

LIMIT_SECONDS = 4 * 3600.0
"""After which a compiler is taken to hang; the largest recipes take an hour of a slow core."""


class Progress:
    """A line that counts seconds on a terminal; elsewhere a line for each phase."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        """Write to `stream` (standard error), each line headed by `title`."""
        self._title = title
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._what = ""
        self._begun = time.monotonic()

    def phase(self, what: str) -> None:
        """Finish the last phase's line and begin another."""
        self._finish()
        self._what, self._begun = what, time.monotonic()
        self.tick()

    def tick(self) -> None:
        """Count on."""
        if self._live and self._what:
            self._write(f"\r{self._line()}")

    def close(self) -> None:
        """Finish the last line."""
        self._finish()
        self._what = ""

    def _finish(self) -> None:
        if self._what:
            self._write(f"\r{self._line()}\n" if self._live else f"{self._line()}\n")

    def _line(self) -> str:
        return f"{self._title}  {self._what}  {time.monotonic() - self._begun:.0f} s"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def compile_programs(
    request: Request,
    topology: Topology,
    *,
    cache: bool = True,
    progress: Progress | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> list[Artifact]:
    """The programs of a request: from the cache, the rest from a child.

    Raises:
      OutOfMemoryError: for the first that does not fit.
      MissingCompilerError: when libtpu is not installed.
      CompileError: when the compiler refuses a program, dies, or takes longer than the limit.
      FornaxError: whatever the builder raised: its own class and message.
    """
    found: dict[str, Artifact | OutOfMemoryError] = {}
    for name in request.programs if cache else ():
        answer = cache_folder.find(request, topology, name)
        if answer is not None:
            found[name] = answer
    missing = tuple(name for name in request.programs if name not in found)
    if missing and not any(isinstance(answer, OutOfMemoryError) for answer in found.values()):
        asked = dataclasses.replace(request, programs=missing)
        shown = progress or Progress(topology.name)
        for name, answer in _compile_in_child(
            asked, topology, progress=shown, limit_seconds=limit_seconds
        ):
            found[name] = answer
            if cache:
                cache_folder.keep(request, topology, name, answer)
    artifacts = []
    for answer in (found[name] for name in request.programs if name in found):
        if isinstance(answer, OutOfMemoryError):
            raise answer
        artifacts.append(answer)
    return artifacts


def traced_calls(
    request: Request, topology: Topology, *, progress: Progress | None = None
) -> list[tuple[str, dict[str, Any], str]]:
    """What the programs of a request ask of the kernels; traced in a child, not compiled.

    Args:
      request: the programs.
      topology: where they would run: TPUs, or a CPU or GPU of this machine.
      progress: where it is shown how far the child is.

    Returns:
      For each distinct call that leaves the choice open: the operation's name, the fields of the
      call, and the implementation chosen today.

    Raises:
      MissingCompilerError: for TPUs, when libtpu is not installed.
      CompileError: when the child dies, or takes too long.
      FornaxError: whatever the builder raised: its own class and words.
    """
    if topology.chip.platform == "tpu":
        _require_compiler(topology)
    shown = progress or Progress(topology.name)
    told = _told(request, topology, progress=shown, limit_seconds=LIMIT_SECONDS, calls_only=True)
    return [tuple(each) for event, _ in told for each in event["calls"]]


def _compile_in_child(
    request: Request, topology: Topology, *, progress: Progress, limit_seconds: float
) -> Iterator[tuple[str, Artifact | OutOfMemoryError]]:
    """Compile a request's programs one after the other, yielding each with its answer.

    Raises:
      MissingCompilerError: when libtpu is not installed.
      CompileError: when the compiler refuses a program, dies, or takes longer than the limit.
      FornaxError: whatever the builder raised: its own class and words.
    """
    _require_compiler(topology)
    told = _told(request, topology, progress=progress, limit_seconds=limit_seconds)
    for event, folder in told:
        yield event["program"], _answer(event, folder / event["program"])


def _told(
    request: Request,
    topology: Topology,
    *,
    progress: Progress,
    limit_seconds: float,
    calls_only: bool = False,
) -> Iterator[tuple[dict[str, Any], Path]]:
    """What a child that serves a request tells, each with the folder that has its programs."""
    with contextlib.ExitStack() as stack:
        stack.callback(progress.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fornax-plan-")))
        log = stack.enter_context((folder / "stderr").open("w+b"))
        child = stack.enter_context(
            WorkerProcess(
                "fornax.plan.compile.worker:main", log=log, environment=_environment(topology)
            )
        )
        waiting = dict.fromkeys(request.programs)
        child.send(
            {
                **request.to_mapping(),
                "topology": topology.name,
                "programs": {name: str(folder / name) for name in waiting},
                "calls_only": calls_only,
            }
        )
        deadline = time.monotonic() + limit_seconds
        for event in _events(child, progress, deadline):
            match event["event"]:
                case "phase":
                    progress.phase(event["what"])
                case "error":
                    raise from_mapping(event)
                case "answer":
                    del waiting[event["program"]]
                    yield event, folder
                case "calls":
                    waiting.clear()
                    yield event, folder
        if waiting:
            what = _death(child, log, deadline, limit_seconds)
            verb = "tracing" if calls_only else "compiling"
            raise CompileError(f"{verb} {' and '.join(waiting)} for {topology.name} {what}")


def _require_compiler(topology: Topology) -> None:
    if topology.chip.platform == "gpu":
        raise MissingCompilerError(
            f"there is no compiler for {topology.name} without such a GPU; use the predicted plan"
        )
    if topology.chip.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise MissingCompilerError(
            f"compiling for {topology.name} needs the TPU compiler, libtpu, which is not here; "
            "it runs on any Linux x86-64 machine: pip install 'fornax-ai[tpu]'"
        )


def _environment(topology: Topology) -> Mapping[str, str | None]:
    """What is set before jax starts in the child."""
    if topology.chip.platform == "cpu":
        return environment.virtual_cpus(topology.num_devices)
    if topology.chip.platform == "gpu":
        return {}
    return environment.tpu_compiler(topology.accelerator)


def _events(child: WorkerProcess, progress: Progress, deadline: float) -> Iterator[dict[str, Any]]:
    """What the child says until it is done, dead or late."""
    while time.monotonic() < deadline:
        try:
            yield child.receive(0.5)
        except TimeoutError:
            progress.tick()
        except EOFError:
            return


def _answer(event: Mapping[str, Any], folder: Path) -> Artifact | OutOfMemoryError:
    if "error" not in event:
        return Artifact.load(folder)
    error = from_mapping(event["error"])
    assert isinstance(error, OutOfMemoryError)
    if (folder / "artifact.json").is_file():
        error.artifact = Artifact.load(folder)
    return error


def _death(child: WorkerProcess, log: IO[bytes], deadline: float, limit_seconds: float) -> str:
    """How a child ended that did not finish."""
    if time.monotonic() >= deadline:
        return (
            f"took longer than {limit_seconds:g} s and was stopped; run it again where a core is "
            "idle or faster, or plan with --predicted, which compiles nothing"
        )
    code = child.wait()
    if code == -signal.SIGKILL:
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return (
            "was killed from outside (SIGKILL), most likely for want of memory: it had taken up "
            f"to {format_gib(most)}; free some memory or use a larger machine"
        )
    if code < 0:
        return f"ended with {ending(code)}; the compiler said: {last_line(log)}"
    return f"ended with exit code {code}; it said: {last_line(log)}"
