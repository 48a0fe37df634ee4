"""Compiled programs on disk: by what was compiled, for what, by which versions and which source.

One folder a program, written under another name and moved into place. A folder that cannot be read
counts as none. The least recently used go when all together grow beyond a bound.
"""

import dataclasses
import errno
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fornax
from fornax.config import environment
from fornax.config.errors import FornaxError
from fornax.config.files import write_whole
from fornax.plan.artifact import Artifact
from fornax.plan.compile.errors import OutOfMemoryError, from_mapping, to_mapping
from fornax.plan.compile.request import Request
from fornax.plan.topology import Topology

_LIMIT_BYTES = 512 * 2**20
_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax")
_ELSEWHERE = ("cli", "quickstart", "plan", "preflight", "hlo")
"""Packages whose source does not change a program."""


def versions() -> dict[str, str]:
    """Installed versions of what makes a program."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def path_of(request: Request, topology: Topology, program: str) -> Path:
    """The folder that holds (or would hold) what compiling one of the request's programs gives."""
    key = {
        "builder": request.builder,
        "arguments": dict(request.arguments),
        "options": dict(request.options),
        "program": program,
        "topology": topology.name,
        "versions": versions(),
        "flags": environment.compiler_flags(),
        "source": _source(request.builder.partition(":")[0]),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return _folder() / digest[:24]


def find(request: Request, topology: Topology, program: str) -> Artifact | OutOfMemoryError | None:
    """What compiling gave before, or None. A program that did not fit is an answer too."""
    folder = path_of(request, topology, program)
    found = _load(folder)
    if found is not None:
        os.utime(folder)
    return dataclasses.replace(found, cached=True) if isinstance(found, Artifact) else found


def keep(
    request: Request, topology: Topology, program: str, found: Artifact | OutOfMemoryError
) -> None:
    """Remember an answer, and forget the oldest ones beyond the bound."""
    folder = path_of(request, topology, program)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        artifact = found if isinstance(found, Artifact) else found.artifact
        if artifact is not None:
            artifact.save(made)
        if isinstance(found, OutOfMemoryError):
            write_whole(made / "error.json", json.dumps(to_mapping(found)).encode())
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise  # else another process put the same answer there, and a third may replace it
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _forget_oldest(folder)


def _folder() -> Path:
    return environment.cache_dir() / "plans"


def _load(folder: Path) -> Artifact | OutOfMemoryError | None:
    try:
        if (folder / "error.json").is_file():
            values = json.loads((folder / "error.json").read_text(encoding="utf-8"))
            error: FornaxError = from_mapping(values)
            if not isinstance(error, OutOfMemoryError):
                return None
            if (folder / "artifact.json").is_file():
                error.artifact = Artifact.load(folder)
            return error
        return Artifact.load(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _entries() -> Iterator[Path]:
    folder = _folder()
    if folder.is_dir():
        yield from (path for path in folder.iterdir() if path.is_dir())


def _size(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:  # forgotten meanwhile
        return 0


def _used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _forget_oldest(newest: Path) -> None:
    left = 0
    for entry in sorted(_entries(), key=_used, reverse=True):
        left += _size(entry)
        if left > _LIMIT_BYTES and entry != newest:
            shutil.rmtree(entry, ignore_errors=True)


@functools.cache
def _source(builder: str) -> str:
    """A hash of the source that makes a program: Fornax's packages below, and the builder's
    module."""
    root = Path(fornax.__file__).parent
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if path.relative_to(root).parts[0] not in _ELSEWHERE
        or path.is_relative_to(root / "plan" / "compile")
    ]
    files.append(root / "plan" / "topology.py")
    found = importlib.util.find_spec(builder)
    if found is not None and found.origin and found.has_location:
        files.append(Path(found.origin))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
