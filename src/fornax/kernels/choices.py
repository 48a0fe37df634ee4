"""Measured choices on disk: which implementation was fastest for one call on one machine.

One small JSON file per (operation, call, device, versions), replaced atomically, so that processes
that tune at the same time never spoil each other's work. A file that cannot be read counts as
none.
"""

import dataclasses
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jaxlib

from fornax.config import environment

__all__ = ["lookup", "path_of", "record"]

_FORMAT = 1


@functools.cache
def _machine() -> dict[str, Any]:
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
    described = dataclasses.asdict(call)
    return {"operation": operation, "call": described, "machine": _machine()}


def path_of(operation: str, call: Any) -> Path:
    """Return the file that holds (or would hold) the measured choice for `call`."""
    text = json.dumps(_key(operation, call), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    return environment.cache_dir() / "kernel-choices" / f"{operation}-{digest}.json"


@functools.lru_cache(maxsize=4096)
def _read(path: Path, modified_ns: int) -> str | None:
    del modified_ns  # part of the cache key: a file measured again is read again
    try:
        chosen = json.loads(path.read_text())["chosen"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return chosen if isinstance(chosen, str) else None


def lookup(operation: str, call: Any) -> str | None:
    """Return the name of the implementation measured fastest for `call`, None if never measured."""
    path = path_of(operation, call)
    try:
        modified_ns = path.stat().st_mtime_ns
    except OSError:
        return None
    return _read(path, modified_ns)


def record(operation: str, call: Any, seconds: dict[str, float]) -> str:
    """Store the measured `seconds` per implementation and return the fastest one's name."""
    chosen = min(seconds, key=lambda name: seconds[name])
    path = path_of(operation, call)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**_key(operation, call), "seconds": seconds, "chosen": chosen}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-", suffix=".json")
    with os.fdopen(handle, "w") as file:
        json.dump(content, file, indent=1, default=str)
    os.replace(temporary, path)
    return chosen
