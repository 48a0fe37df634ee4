"""What a machine offers to Fornax, each finding with its problem and fix where something is off."""

import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fornax import __version__
from fornax.config import FornaxError, environment

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_DISTRIBUTION = "fornax-ai"
_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report; `fix` is empty where all is well."""

    name: str
    value: str
    problem: str = ""
    fix: str = ""
    fatal: bool = False


def examine() -> list[Finding]:
    """Look at everything; takes the second or two in which jax starts."""
    parts: tuple[Callable[[], Iterable[Finding]], ...] = (
        _versions,
        _devices,
        _processes,
        _compiler,
        _tpu_compiler,
        _cores,
        _memory,
        _disks,
        _extras,
    )
    return [finding for part in parts for finding in part()]


def _versions() -> Iterator[Finding]:
    yield Finding(name="fornax", value=__version__)
    yield Finding(
        name="python", value=f"{platform.python_version()} on {platform.platform(terse=True)}"
    )
    bounds = {each.name: each.specifier for each in _requirements(_DISTRIBUTION)}
    for package in _PACKAGES:
        version = _installed(package)
        bound = bounds.get(package, SpecifierSet())
        if version is None:
            yield Finding(
                name=package,
                value="missing",
                problem="it is not installed",
                fix=f"pip install '{package}{bound}'",
                fatal=True,
            )
        elif not bound.contains(version, prereleases=True):
            yield Finding(
                name=package,
                value=version,
                problem=f"{version} is outside {bound}",
                fix=f"pip install '{package}{bound}'",
                fatal=True,
            )
        else:
            yield Finding(name=package, value=version)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements(package: str, extra: str = "") -> list[Requirement]:
    """What a package asks for on this machine: for an extra, or for its base."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = [Requirement(line) for line in lines]
    return [
        each
        for each in found
        if (each.marker is None and not extra)
        or (
            each.marker is not None
            and each.marker.evaluate({"extra": extra})
            and ("extra" in str(each.marker)) == bool(extra)
        )
    ]


def _complete(package: str, extra: str) -> bool:
    """Whether everything that an extra asks for is installed, the extras it names included."""
    return all(
        _installed(each.name) is not None and all(_complete(each.name, e) for e in each.extras)
        for each in _requirements(package, extra)
    )


def _devices() -> Iterator[Finding]:
    environment.set_default_platform_quiet()
    try:
        import jax

        found = jax.devices()
    except Exception as error:  # a broken plugin fails in any way it likes
        reason = " ".join(str(error).split())[:200]
        yield Finding(
            name="devices",
            value="none",
            problem=f"jax does not start ({type(error).__name__}: {reason})",
            fix="mend the accelerator's driver, or set JAX_PLATFORMS=cpu to go without it",
            fatal=True,
        )
        return
    kinds = sorted({device.device_kind for device in found})
    value = f"{len(found)} x {', '.join(kinds)} ({found[0].platform})"
    hardware = _accelerator()
    if hardware and found[0].platform == "cpu":
        yield Finding(
            name="devices",
            value=value,
            problem=f"there is a {hardware} here, and jax uses the CPU",
            fix=f"pip install '{_DISTRIBUTION}[{_ACCELERATORS[hardware]}]'",
        )
    else:
        yield Finding(name="devices", value=value)


def _processes() -> Iterator[Finding]:
    """Which process of how many a run started here would be."""
    from fornax.mesh import ProcessConfig, find_processes

    try:
        found = find_processes(ProcessConfig())
    except FornaxError as error:
        problem, _, fix = str(error).rpartition("; ")
        yield Finding(name="processes", value="unknown", problem=problem, fix=fix)
        return
    number, count, first = found.process_id, found.num_processes, found.coordinator
    if count in (None, 1) and first is None:
        yield Finding(name="processes", value="one (no launcher found)")
    elif number is None or count is None or first is None:
        yield Finding(
            name="processes",
            value=f"process {number} of {count}, process 0 at {first} ({found.launcher})",
            problem="an address, a count and a number are needed",
            fix="set FORNAX_COORDINATOR, FORNAX_NUM_PROCESSES and FORNAX_PROCESS_ID",
        )
    else:
        value = f"process {number} of {count}, process 0 at {first} ({found.launcher})"
        yield Finding(name="processes", value=value)


_ACCELERATORS = {"NVIDIA GPU": "cuda", "TPU": "tpu"}


def _accelerator() -> str | None:
    if Path("/proc/driver/nvidia/version").exists():
        return "NVIDIA GPU"
    return "TPU" if Path("/dev/accel0").exists() else None


def _compiler() -> Iterator[Finding]:
    for name in filter(None, (environment.cxx(), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            yield Finding(name="compiler", value=f"{path} ({_first_line(path)})")
            return
    asked = environment.cxx()
    yield Finding(
        name="compiler",
        value="none",
        problem=f"CXX={asked} is not a program" if asked else "there is no C++ compiler",
        fix="install one (g++ or clang++), or go without the native CPU kernels",
    )


def _first_line(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "does not run"
    return next(iter(done.stdout.splitlines()), "no version")


def _tpu_compiler() -> Iterator[Finding]:
    """The compiler that `fornax plan` asks; a run on TPUs has the version that jax asks for."""
    version = _installed("libtpu")
    wanted = next((r.specifier for r in _requirements("jax", "tpu") if r.name == "libtpu"), None)
    fix = f"pip install '{_DISTRIBUTION}[tpu]'"
    if version is None:
        value = f"none (plans for TPUs are then predicted only; {fix})"
        yield Finding(name="TPU compiler", value=value)
    elif wanted is not None and not wanted.contains(version, prereleases=True):
        yield Finding(
            name="TPU compiler",
            value=f"libtpu {version}",
            problem=f"this jax goes with libtpu {wanted}; plans may differ from runs, or fail",
            fix=fix,
        )
    else:
        yield Finding(name="TPU compiler", value=f"libtpu {version}")


def _cores() -> Iterator[Finding]:
    usable = environment.usable_cores()
    yield Finding(name="cores", value=f"{usable} usable of {os.cpu_count()}")


def _memory() -> Iterator[Finding]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):
        yield Finding(name="memory", value="unknown")
        return
    available = _available_memory() or free
    value = f"{available / _GIB:.1f} GiB available of {total / _GIB:.1f}"
    if available < 2 * _GIB:
        yield Finding(
            name="memory",
            value=value,
            problem="the quickstart needs 2 GiB",
            fix="close other programs or lower the batch size",
        )
    else:
        yield Finding(name="memory", value=value)


def _available_memory() -> int | None:
    """What the kernel could hand out without swapping, caches included."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def _disks() -> Iterator[Finding]:
    for name, path in (("disk here", Path.cwd()), ("cache", environment.cache_dir())):
        there = path
        while not there.exists():
            there = there.parent
        free = shutil.disk_usage(there).free
        value = f"{free / _GIB:.1f} GiB free at {path}"
        if not os.access(there, os.W_OK):
            yield Finding(
                name=name,
                value=value,
                problem=f"{there} is not writable",
                fix="set FORNAX_CACHE_DIR to a folder that is"
                if name == "cache"
                else "work in another folder, or give --run-dir one that is",
            )
        elif free < _GIB:
            yield Finding(
                name=name,
                value=value,
                problem="less than 1 GiB is free",
                fix="make room there, or work on another disk",
            )
        else:
            yield Finding(name=name, value=value)


def _extras() -> Iterator[Finding]:
    try:
        extras = importlib.metadata.metadata(_DISTRIBUTION).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        extras = []
    have = [extra for extra in extras if _complete(_DISTRIBUTION, extra)]
    lack = [extra for extra in extras if extra not in have]
    yield Finding(
        name="extras",
        value=f"{', '.join(have) or 'none'} (not installed: {', '.join(lack) or 'none'})",
    )
