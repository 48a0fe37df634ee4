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

__all__ = ["Measured", "lookup", "path_of", "record"]

_FORMAT = 2


@dataclass(frozen=True)
class Measured:
    """What measuring one call gave."""

    chosen: str | None = None
    """The fastest implementation; None where nothing was measured, or all failed."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """The error of each implementation that raised."""


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


def _key(operation: str, call: Any) -> dict[str, object]:
    described = dataclasses.asdict(call)
    return {"operation": operation, "call": described, "machine": _machine()}


def path_of(operation: str, call: object) -> Path:
    """Return the file that holds (or would hold) the measured choice for `call`."""
    text = json.dumps(_key(operation, call), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    return environment.cache_dir() / "kernel-choices" / f"{operation}-{digest}.json"


@functools.lru_cache(maxsize=4096)
def _read(path: Path, modified_ns: int) -> Measured | None:
    del modified_ns  # part of the cache key: a file measured again is read again
    try:
        content = json.loads(path.read_text())
        chosen, failures = content["chosen"], content["failures"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(chosen, str | None) or not isinstance(failures, dict):
        return None
    return Measured(chosen, failures)


def lookup(operation: str, call: object) -> Measured | None:
    """Return what measuring `call` gave, None if it was never measured."""
    path = path_of(operation, call)
    try:
        modified_ns = path.stat().st_mtime_ns
    except OSError:
        return None
    return _read(path, modified_ns)


def record(
    operation: str, call: object, seconds: Mapping[str, float], failures: Mapping[str, str]
) -> Measured:
    """Store the measured `seconds`, or the error, of each implementation; return the result."""
    chosen = min(seconds, key=lambda name: seconds[name]) if seconds else None
    path = path_of(operation, call)
    content = {
        **_key(operation, call),
        "seconds": dict(seconds),
        "failures": dict(failures),
        "chosen": chosen,
    }
    write_whole(path, json.dumps(content, indent=1, default=str))
    return Measured(chosen, failures)
