"""The child that compiles: started by `parent.py`, it reads a request and reports events."""

import dataclasses
import importlib
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from fornax.config.errors import FornaxError
from fornax.config.worker_process import receive, send
from fornax.plan.artifact import Artifact, DeviceFact, MemoryFacts
from fornax.plan.compile import dump
from fornax.plan.compile.cache import versions
from fornax.plan.compile.dump import Dumped
from fornax.plan.compile.errors import CompileError, OutOfMemoryError, no_memory, to_mapping
from fornax.plan.compile.request import Job, Lowering
from fornax.plan.topology import Topology, parse_topology

Report = Callable[..., None]
"""Reports an event, its values by name, to the parent."""

_BODY = re.compile(r'("body"\s*:\s*)"[A-Za-z0-9+/=]*"')
_SHOWN = 600
_AT_ONCE = 2


def main(parent: Connection) -> None:
    """Serve one request."""
    request = receive(parent)
    lock = threading.Lock()

    def send_event(**event: object) -> None:
        with lock:
            send(parent, event)

    try:
        _serve(request, send_event)
    except FornaxError as error:
        send_event(event="error", **to_mapping(error))
    except Exception as error:
        send_event(event="error", **to_mapping(_explained(error, request)))


def _serve(request: dict[str, Any], report: Report) -> None:
    report(event="phase", what="starting")
    from fornax import kernels  # starts jax, in the environment that the parent made

    topology = parse_topology(request["topology"])
    module, _, function = request["builder"].partition(":")
    with kernels.target_platform(topology.chip.platform):
        job = Job(topology=topology, devices=_devices(topology), arguments=request["arguments"])
        report(event="phase", what="laying out")
        programs = getattr(importlib.import_module(module), function)(job)
        if request["calls_only"]:
            report(event="calls", calls=_calls(programs, request["programs"], report))
            return
        folders = {name: Path(folder) for name, folder in request["programs"].items()}
        traced = {name: _trace(name, programs[name], report) for name in folders}

        def finish(name: str) -> None:
            found = _compile(name, topology, traced[name], request["options"], folders[name])
            if not isinstance(found, OutOfMemoryError):
                found.save(folders[name])
                report(event="answer", program=name)
                return
            if found.artifact is not None:
                found.artifact.save(folders[name])
            report(event="answer", program=name, error=to_mapping(found))

        report(event="phase", what=f"compiling {' and '.join(folders)}")
        # Most of a compilation runs on one core.
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(finish, folders))


def _trace(name: str, trace: Callable[[], Lowering], report: Report) -> tuple[Lowering, float]:
    """A program lowered, and the seconds it took."""
    report(event="phase", what=f"lowering {name}")
    begun = time.perf_counter()
    return trace(), time.perf_counter() - begun


def _calls(
    programs: Mapping[str, Callable[[], Lowering]], names: Iterable[str], report: Report
) -> list[tuple[str, dict[str, Any], str]]:
    """What the programs ask of the kernels: operation, the call's fields, what was chosen."""
    from fornax import kernels

    with kernels.recording_calls() as found:
        for name in names:
            _trace(name, programs[name], report)
    return [
        (operation, dataclasses.asdict(call), choice.implementation)
        for (operation, call), choice in found.items()
    ]


def _devices(topology: Topology) -> list[jax.Device]:
    if topology.chip.platform != "tpu":
        return list(jax.devices()[: topology.num_devices])
    try:
        return topology.devices()
    except (RuntimeError, ValueError) as error:
        raise CompileError(
            f"the compiler does not know the topology {topology.name}: {_first_line(error)}; "
            "choose a shape that Cloud offers, or upgrade libtpu"
        ) from error


def _compile(
    name: str,
    topology: Topology,
    traced: tuple[Lowering, float],
    given: dict,
    folder: Path,
) -> Artifact | OutOfMemoryError:
    program, lower_seconds = traced
    begun = time.perf_counter()
    written = folder / "dump"

    def attempt(*, lines: bool) -> jax.stages.Compiled | OutOfMemoryError:
        options = dict(given)
        if topology.chip.platform == "tpu":
            options |= dump.options(written, lines=lines)
        try:
            return program.lowered.compile(compiler_options=options or None)
        except Exception as error:
            found = no_memory(str(error), name, topology.name)
            if found is None:
                raise
            return found

    found = attempt(lines=False)
    seconds = (lower_seconds, time.perf_counter() - begun)
    platform = topology.chip.platform
    text = None if isinstance(found, OutOfMemoryError) else _text(found, platform)
    if text is None and platform == "tpu":
        shutil.rmtree(written, ignore_errors=True)
        found = attempt(lines=True)  # what the compiler writes down is all that there is
    compiled, refused = (None, found) if isinstance(found, OutOfMemoryError) else (found, None)
    dumped = dump.read(written)
    shutil.rmtree(written, ignore_errors=True)
    if text is None:
        text = "" if dumped is None else dumped.hlo
    if refused is None:
        return _artifact(name, topology, program, seconds, text, compiled, dumped)
    if dumped is not None:
        refused.artifact = _artifact(name, topology, program, seconds, text, None, dumped)
        refused.used = max(refused.used, dumped.total)
    return refused


def _artifact(
    name: str,
    topology: Topology,
    program: Lowering,
    seconds: tuple[float, float],
    text: str,
    compiled: jax.stages.Compiled | None,
    dumped: Dumped | None,
) -> Artifact:
    """What is known of a program that was compiled, or (None) refused for its memory."""
    used = _used_arguments(program)
    return Artifact(
        program=name,
        topology=topology.name,
        mesh=dict(program.mesh.shape),
        devices=tuple(map(_device, program.mesh.devices.flat)),
        arguments=tuple(a for i, a in enumerate(program.arguments) if i in used),
        memory=_memory(compiled, dumped),
        hlo=_BODY.sub(r'\1""', text),
        versions=versions(),
        lower_seconds=seconds[0],
        compile_seconds=seconds[1],
        notes=program.notes,
    )


def _text(compiled: jax.stages.Compiled, platform: str) -> str | None:
    """The optimized program; None where jaxlib cannot read what libtpu made, which writes it down.

    Raises:
      Exception: what reading raised on any other platform, where nothing else has the text.
    """
    try:
        return compiled.as_text() or ""
    except Exception as error:
        if platform != "tpu":
            raise
        sys.stderr.write(f"jaxlib cannot read the compiled program: {error}\n")
        return None


def _used_arguments(program: Lowering) -> set[int]:
    """Numbers of the arguments that the program reads: the others are never sent to a device."""
    arguments = getattr(program.lowered, "_lowering").compile_args  # noqa: B009
    kept = arguments.get("kept_var_idx")
    return set(range(len(program.arguments))) if kept is None else set(kept)


def _device(device: jax.Device) -> DeviceFact:
    return DeviceFact(
        coords=tuple(getattr(device, "coords", None) or (device.id,)),
        core=getattr(device, "core_on_chip", 0) or 0,
        slice=getattr(device, "slice_index", 0) or 0,
    )


def _memory(compiled: jax.stages.Compiled | None, dumped: Dumped | None) -> MemoryFacts:
    stats = None if compiled is None else compiled.memory_analysis()

    def size(name: str) -> int:
        return int(getattr(stats, name, 0) or 0)

    hosted = ("argument", "output", "temp")
    found = MemoryFacts(
        arguments=size("argument_size_in_bytes"),
        outputs=size("output_size_in_bytes"),
        aliased=size("alias_size_in_bytes"),
        temporaries=size("temp_size_in_bytes"),
        code=size("generated_code_size_in_bytes"),
        host=sum(size(f"host_{kind}_size_in_bytes") for kind in hosted),
    )
    if dumped is None:
        return found
    if stats is not None:
        return dataclasses.replace(found, temporaries=dumped.temporaries)
    return dataclasses.replace(
        found,
        arguments=dumped.arguments,
        outputs=dumped.outputs,
        aliased=dumped.aliased,
        temporaries=dumped.temporaries,
    )


def _explained(error: Exception, request: dict[str, Any]) -> FornaxError:
    """An error of jax or of the compiler as one paragraph; the traceback goes to standard error."""
    import traceback

    traceback.print_exception(error)
    programs = " and ".join(request["programs"])
    return CompileError(
        f"{programs} cannot be compiled for {request['topology']}: {type(error).__name__}: "
        f"{_first_line(error)}"
    )


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
