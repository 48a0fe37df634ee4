"""Measured choices on disk: which implementation was fastest for one call on one machine.

One small JSON file per (operation, call, device, versions), replaced atomically, so that processes
that tune at the same time never spoil each other's work. A file that cannot be read counts as
none. An implementation that raised is part of the result: it is kept with its error, and not tried
again until a version changes.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jaxlib

from fornax.config import environment
from fornax.config.files import write_whole

__all__ = ["Kept", "kept", "lookup", "path_of", "record"]

_FORMAT = 2


@dataclass(frozen=True)
class Kept:
    """What measuring one call gave; empty where nothing was measured."""

    call: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the call."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of each implementation that ran, with gradients where the operation has any."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """The error of each implementation that raised."""
    chosen: str | None = None
    """The fastest implementation; None where nothing was measured, or all failed."""


@functools.cache
def _machine() -> dict[str, object]:
    """What a measured choice depends on beside the call itself."""
    device = jax.devices()[0]
    return {
        "format": _FORMAT,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "device": device.device_kind,
        "platform": device.platform,
        "cores": os.cpu_count(),
    }


def _key(operation: str, call: Any) -> dict[str, Any]:
    described = call if isinstance(call, Mapping) else dataclasses.asdict(call)
    return {"operation": operation, "call": described, "machine": _machine()}


def path_of(operation: str, call: object) -> Path:
    """Return the file that holds (or would hold) the measured choice for `call`."""
    text = json.dumps(_key(operation, call), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    return environment.cache_dir() / "kernel-choices" / f"{operation}-{digest}.json"


@functools.lru_cache(maxsize=4096)
def _read(path: Path, modified_ns: int) -> Kept | None:
    del modified_ns  # part of the cache key: a file measured again is read again
    try:
        content = json.loads(path.read_text())
        found = Kept(*(content[name] for name in ("call", "seconds", "failures", "chosen")))
        own = path.name == path_of(content["operation"], found.call).name
    except (OSError, ValueError, KeyError, TypeError):
        return None
    wanted = (Mapping, Mapping, Mapping, str | None)
    return found if own and all(map(isinstance, vars(found).values(), wanted)) else None


def lookup(operation: str, call: object) -> Kept | None:
    """Return what measuring `call` gave, None if it was never measured."""
    path = path_of(operation, call)
    try:
        modified_ns = path.stat().st_mtime_ns
    except OSError:
        return None
    return _read(path, modified_ns)


def kept(operation: str) -> list[Kept]:
    """What was measured of an operation on this machine, with these versions; oldest first."""
    folder = environment.cache_dir() / "kernel-choices"
    times = {path: path.stat().st_mtime_ns for path in folder.glob(f"{operation}-*.json")}
    found = (_read(path, times[path]) for path in sorted(times, key=lambda path: times[path]))
    return [one for one in found if one is not None]


def record(
    operation: str, call: object, seconds: Mapping[str, float], failures: Mapping[str, str]
) -> Kept:
    """Store the measured `seconds`, or the error, of each implementation; return the result."""
    chosen = min(seconds, key=lambda name: seconds[name]) if seconds else None
    path = path_of(operation, call)
    key = _key(operation, call)
    found = Kept(key["call"], dict(seconds), dict(failures), chosen)
    write_whole(path, json.dumps({**key, **vars(found)}, indent=1, default=str))
    return found
