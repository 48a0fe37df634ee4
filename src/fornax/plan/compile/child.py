"""The parent of a compilation: starts the child, shows its progress, passes on its errors."""

import contextlib
import importlib.util
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fornax.config import environment
from fornax.plan.artifact import Artifact
from fornax.plan.bytes import show_bytes
from fornax.plan.compile.errors import (
    CompileError,
    MissingCompilerError,
    OutOfMemoryError,
    from_mapping,
)
from fornax.plan.compile.progress import Progress
from fornax.plan.compile.request import Request
from fornax.plan.topology import Topology

__all__ = ["compile_in_child"]

_COMMAND = (sys.executable, "-m", "fornax.plan.compile.worker")
_TAIL = 4000


def compile_in_child(
    request: Request, topology: Topology, *, progress: Progress, limit_seconds: float
) -> Iterator[tuple[str, Artifact | OutOfMemoryError]]:
    """Compile a request's programs one after the other, yielding each with its answer.

    Raises:
      MissingCompilerError: when libtpu is not installed.
      CompileError: when the compiler refuses a program, dies, or takes longer than the limit.
      FornaxError: whatever the builder raised: its own class and words.
    """
    _require_compiler(topology)
    with contextlib.ExitStack() as stack:
        stack.callback(progress.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fornax-plan-")))
        log = stack.enter_context((folder / "stderr").open("w+b"))
        child = subprocess.Popen(
            _COMMAND,
            env=environment.for_child(_environment(topology)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches the parent only, which ends the child
        )
        stack.callback(_end, child)
        folders = {program: folder / program for program in request.programs}
        _ask(child, request, topology, folders)
        deadline = time.monotonic() + limit_seconds
        for event in _events(child, progress, deadline):
            match event["event"]:
                case "phase":
                    progress.phase(event["what"])
                case "error":
                    raise from_mapping(event)
                case "answer":
                    name = event["program"]
                    yield name, _answer(event, folders[name])
                    folders.pop(name)
        if folders:
            what = _death(child, log, deadline, limit_seconds)
            raise CompileError(f"compiling {' and '.join(folders)} for {topology.name} {what}")


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
    return environment.tpu_compiler(_accelerator(topology))


def _accelerator(topology: Topology) -> str:
    """Cloud's name for a slice: generations with two cores a chip count cores."""
    chips = topology.num_chips // topology.slices
    name = "v5litepod" if topology.chip.name == "v5e" else topology.chip.name
    return f"{name}-{chips * (2 if topology.chip.torus == 3 else 1)}"


def _ask(child: Any, request: Request, topology: Topology, folders: Mapping[str, Path]) -> None:
    told = {
        **request.to_mapping(),
        "topology": topology.name,
        "programs": {name: str(path) for name, path in folders.items()},
    }
    with contextlib.suppress(BrokenPipeError):  # it died at once: told with its exit code
        child.stdin.write(json.dumps(told).encode() + b"\n")
        child.stdin.flush()


def _events(child: Any, progress: Progress, deadline: float) -> Iterator[dict[str, Any]]:
    """What the child says until it is done, dead or late."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in child.stdout:
            lines.put(line)
        lines.put(b"")

    threading.Thread(target=read, daemon=True).start()
    while time.monotonic() < deadline:
        try:
            line = lines.get(timeout=0.5)
        except queue.Empty:
            progress.tick()
            continue
        if not line:
            return
        yield json.loads(line)


def _answer(event: Mapping[str, Any], folder: Path) -> Artifact | OutOfMemoryError:
    if "error" not in event:
        return Artifact.load(folder)
    error = from_mapping(event["error"])
    assert isinstance(error, OutOfMemoryError)
    if (folder / "artifact.json").is_file():
        error.artifact = Artifact.load(folder)
    return error


def _death(child: Any, log: Any, deadline: float, limit_seconds: float) -> str:
    """How a child ended that did not finish."""
    if time.monotonic() >= deadline:
        return f"took longer than {limit_seconds:g} s and was stopped; give it more time"
    code = child.wait()
    if code == -signal.SIGKILL:
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return (
            "was killed from outside (SIGKILL), most likely for want of memory: it had taken up "
            f"to {show_bytes(most)}; free some memory or use a larger machine"
        )
    if code < 0:
        return f"ended with {signal.Signals(-code).name}; the compiler said: {_tail(log)}"
    return f"ended with exit code {code}; it said: {_tail(log)}"


def _tail(log: Any) -> str:
    log.flush()
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _TAIL))
    lines = log.read().decode(errors="replace").strip().splitlines()
    told = [line.strip() for line in lines if line.strip()]
    return told[-1] if told else "nothing"


def _end(child: Any) -> None:
    """Leave no process behind, whatever happened."""
    for stream in (child.stdin, child.stdout):
        with contextlib.suppress(BrokenPipeError, OSError):
            stream.close()
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()
