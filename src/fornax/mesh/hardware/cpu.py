"""This machine's CPU as a chip, measured once: no table knows it.

A worker process measures, because the process that plans starts no jax backend.
"""

import importlib.metadata
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from fornax.config import environment
from fornax.config.errors import FornaxError
from fornax.config.files import write_whole
from fornax.config.worker_process import WorkerProcess, last_line, send
from fornax.mesh.hardware import Chip

_METHOD = 2  # counts ways of measuring: figures of another way are measured again
_SIDE = 2048
_COPIED = 2**25  # float32: 128 MiB, beyond any cache worth the name
_LIMIT_SECONDS = 120.0


def cpu_chip(devices: int = 1) -> Chip:
    """One of `devices` virtual devices that share this machine's cores evenly.

    The first call on a machine takes a few seconds; its figures are kept in the cache folder.

    Raises:
      FornaxError: when the measurement fails.
    """
    return _chip(_kept() or _measured(), devices)


def kept_cpu_chip(devices: int = 1) -> Chip | None:
    """The same from figures that were measured before; None where there are none: for a process
    that is busy, whose work would slow the measurement and be slowed by it."""
    found = _kept()
    return None if found is None else _chip(found, devices)


def _chip(found: dict, devices: int) -> Chip:
    machine = _machine_memory()
    return Chip(
        name="cpu",
        platform="cpu",
        kinds=("cpu",),
        peak_flops={name: rate / devices for name, rate in found["flops"].items()},
        memory_bytes=machine / devices,
        usable_bytes=0.9 * machine / devices,
        memory_bandwidth=found["bandwidth"] / devices,
        link_bandwidth=found["bandwidth"] / devices / 2,
        torus=0,
        network_bandwidth=found["bandwidth"] / devices / 2,
        host_bandwidth=found["bandwidth"] / devices,
        host_chips=devices,
        sources={
            "peak_flops": f"measured here: products of {_SIDE}x{_SIDE}",
            "memory_bytes": "this machine",
            "usable_bytes": "nine tenths, the rest for the system",
            "memory_bandwidth": "measured here: one pass over an array, read and written",
            "link_bandwidth": "devices talk through memory: each byte is read and written",
            "network_bandwidth": "the same",
            "host_bandwidth": "the same memory",
        },
    )


def _key() -> dict[str, object]:
    return {
        "processor": processor_name(),
        "cores": environment.usable_cores(),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "method": _METHOD,
    }


def processor_name() -> str:
    """The processor of this machine, as it calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file() -> Path:
    return environment.cache_dir() / "plans" / "cpu.json"


def _kept() -> dict | None:
    try:
        kept = json.loads(_file().read_text(encoding="utf-8"))
        return kept if kept["key"] == _key() and kept["bandwidth"] > 0 and kept["flops"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _measured() -> dict:
    changes = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": None}
    with (
        tempfile.TemporaryFile() as log,
        WorkerProcess("fornax.mesh.hardware.cpu:measure", log=log, environment=changes) as child,
    ):
        try:
            found = child.receive(_LIMIT_SECONDS)
        except EOFError as error:
            child.wait()
            raise FornaxError(f"measuring this CPU failed: {last_line(log)}") from error
        except TimeoutError as error:
            raise FornaxError(
                f"measuring this CPU took over {_LIMIT_SECONDS:g} s; run it on an idle machine"
            ) from error
    found["key"] = _key()
    write_whole(_file(), json.dumps(found, indent=2).encode())
    return found


def _machine_memory() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return 8.0 * 2**30


def measure(parent: Connection) -> None:
    """The worker: FLOP/s of products by dtype, bytes/s (read and written) of a copy, the best of
    several."""
    import jax
    import jax.numpy as jnp

    flops = {}
    multiply = jax.jit(jnp.matmul)
    for dtype in ("float32", "bfloat16"):
        x = jnp.ones((_SIDE, _SIDE), dtype)
        flops[dtype] = 2 * _SIDE**3 / _best(lambda x=x: multiply(x, x).block_until_ready())
    long = [jnp.ones(_COPIED, jnp.float32)]
    add = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: a fresh result's pages cost more

    def pass_over() -> None:
        long[0] = add(long[0]).block_until_ready()

    send(parent, {"flops": flops, "bandwidth": 2 * 4 * _COPIED / _best(pass_over)})


def _best(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)
