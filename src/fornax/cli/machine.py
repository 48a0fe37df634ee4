"""What a machine offers to Fornax, each finding with its problem and fix where something is off."""

import dataclasses
import importlib.metadata
import importlib.resources
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fornax import __version__
from fornax.config import FornaxError, environment
from fornax.config.host_memory import available_memory

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_DISTRIBUTION = "fornax-ai"
_GIB = 2**30
_LEAST_SHARED = 2**29
"""Bytes of /dev/shm that several processes of a machine need; Docker gives 64 MiB."""
_LEAST_FILES = 4096
"""Descriptors: a server of 1,024 clients and its replicas."""
EXTRAS = {
    "serve": "`fornax serve`, `fornax host`, `fornax ui` and `fornax bench`",
    "tune": "rewards by verified answers (`math-verify`, `jsonschema`)",
    "hub": "models and datasets by their names on the Hugging Face Hub",
    "cuda": "jax for NVIDIA GPUs (CUDA 13)",
    "tpu": "jax for TPUs, and the compiler that `fornax plan` uses",
    "cluster": "`fornax launch` on Ray and on several machines",
    "gcs": "datasets and checkpoints in Google Cloud Storage",
    "s3": "datasets and checkpoints in S3",
    "tokamax": "kernels for experts on Hopper GPUs; Python 3.12 or newer",
    "video": "MP4 files: of sampled videos, and to train on",
    "bagz": "datasets in Bagz files",
    "otel": "traces and metrics to OpenTelemetry",
    "wandb": "metrics to Weights & Biases",
    "vllm": "the step inside vLLM",
}
"""What each extra is for; `docs`, `dev` and `parity` are for work on Fornax itself."""


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
        _platform,
        _processes,
        _compiler,
        _native,
        _tpu_compiler,
        _cores,
        _memory,
        _shared_memory,
        _open_files,
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
    """Whether everything that an extra asks for is installed, the extras it names included.

    An extra without requirements here, which needs another Python, is not complete.
    """
    wanted = _requirements(package, extra)
    return bool(wanted) and all(
        _installed(each.name) is not None and all(_complete(each.name, e) for e in each.extras)
        for each in wanted
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
            fix="fix the accelerator's driver, or set JAX_PLATFORMS=cpu to go without it",
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


def _platform() -> Iterator[Finding]:
    """What was tested and measured on devices such as those here: the table of the guide."""
    text = importlib.resources.files("fornax.cli").joinpath("platforms.json").read_text()
    try:
        import jax

        kind = jax.default_backend()
    except Exception:  # the devices' finding says why
        return
    known = json.loads(text).get(kind, "neither tested nor measured")
    machine = f"{platform.system()} {platform.machine()}"
    where = "" if machine == "Linux x86_64" else f" (on Linux x86_64; this is {machine})"
    yield Finding(name="platform", value=f"{kind}: {known}{where}")


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


def _native() -> Iterator[Finding]:
    from fornax.kernels import compiled_native

    found, units = compiled_native()
    told = "" if found == units else "; the others are compiled when they are first used"
    yield Finding(name="native kernels", value=f"{found} of {units} compiled{told}")


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
    available = available_memory() or free
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


def _shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Finding(name="/dev/shm", value="none")
        return
    usage = shutil.disk_usage(folder)
    value = f"{usage.free / _GIB:.1f} GiB free of {usage.total / _GIB:.1f}"
    if usage.free < _LEAST_SHARED:
        yield Finding(
            name="/dev/shm",
            value=value,
            problem="snapshots of launched runs and shared tensors of clients need more",
            fix="mount -o remount,size=8g /dev/shm; in Docker, docker run --shm-size 8g",
        )
    else:
        yield Finding(name="/dev/shm", value=value)


def _open_files() -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = [
        "unlimited" if each == resource.RLIM_INFINITY else f"{each:,}" for each in (soft, hard)
    ]
    value = f"{shown[0]}, at most {shown[1]} (servers take the most)"
    if hard != resource.RLIM_INFINITY and hard < _LEAST_FILES:
        yield Finding(
            name="open files",
            value=value,
            problem=f"a server of many clients needs {_LEAST_FILES:,}",
            fix="raise nofile in /etc/security/limits.conf; in Docker, --ulimit nofile=65536",
        )
    else:
        yield Finding(name="open files", value=value)


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
    yield Finding(name="extras", value=", ".join(have) or "none")
    for extra, purpose in EXTRAS.items():
        if extra not in have:
            install = f"pip install '{_DISTRIBUTION}[{extra}]'"
            value = f"not installed: {purpose.replace('`', '')}; {install}"
            yield Finding(name=f"  {extra}", value=value)
