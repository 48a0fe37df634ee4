"""What lies in a repository of models: `<name>/<version>/`, `serving.yaml`, `pin.json`."""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from fornax.config import (
    ConfigError,
    FornaxError,
    ServingCode,
    ServingError,
    did_you_mean,
    from_yaml,
)
from fornax.config.text import read_yaml
from fornax.serving.repository.files import (
    inside,
    name_problem,
    printable,
    read_pin,
    read_small,
    version_number,
)
from fornax.serving.settings import ModelSettings

__all__ = ["SETTINGS_FILE", "Bundle", "ModelFolder", "examine", "scan", "scan_model"]

SETTINGS_FILE = "serving.yaml"
_SETTINGS_LIMIT = 1 << 16


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A model as its folder describes it; nothing in a version's folder was looked at."""

    name: str
    path: Path
    settings: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    """Of a model whose versions are bundles."""
    type: str = "bundle"
    """What serving.yaml says it is; `bundle` without one."""
    entry: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """What serving.yaml says besides the type, where the type is another than `bundle`."""
    versions: Mapping[int, Path] = dataclasses.field(default_factory=dict)
    """Real folders by number."""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Folders that can be no version, and why."""
    pin: int | None = None
    problem: str = ""
    """What is wrong with the model as a whole; then nothing about it changes until it is fixed."""


def scan(root: Path, types: frozenset[str] = frozenset()) -> dict[str, ModelFolder]:
    """Every model of a repository, by name; `types` are those served beside bundles.

    Names that begin with a dot are passed over: so are called files that are not finished.

    Raises:
      ServingError: the repository cannot be listed.
    """
    real = _real(root)
    try:
        with os.scandir(real) as entries:
            names = sorted(e.name for e in entries if e.name[0] != "." and e.is_dir())
    except OSError as error:
        raise _unreadable(root, error) from error
    return {printable(name): _model(real, name, types) for name in names}


def scan_model(root: Path, name: str, types: frozenset[str] = frozenset()) -> ModelFolder | None:
    """One model of a repository; None where there is no such folder.

    Raises:
      ServingError: the name is none, or the repository cannot be read.
    """
    if problem := name_problem(name):
        raise ServingError(ServingCode.INVALID_ARGUMENT, problem)
    real = _real(root)
    return _model(real, name, types) if (real / name).is_dir() else None


def _real(root: Path) -> Path:
    try:
        return Path(os.path.realpath(root, strict=True))
    except OSError as error:
        raise _unreadable(root, error) from error


def _unreadable(root: Path, error: OSError) -> ServingError:
    return ServingError(
        ServingCode.UNAVAILABLE,
        f"the repository {root} cannot be read: {error.strerror or error}; models stay as they are",
    )


def _model(root: Path, name: str, types: frozenset[str]) -> ModelFolder:
    path = root / name
    if problem := name_problem(name):
        return ModelFolder(printable(name), path, problem=problem)
    real = inside(root, path)
    if real is None:
        return ModelFolder(
            name, path, problem="its folder is a link that leads out of the repository; move it in"
        )
    try:
        versions, refused = _versions(root, real)
        kind, settings, entry = _settings(root, real, types)
        held = read_pin(root, real)
    except FornaxError as error:
        return ModelFolder(name, real, problem=str(error))
    except OSError as error:
        return ModelFolder(name, real, problem=f"its folder cannot be read: {error}")
    return ModelFolder(
        name, real, settings, type=kind, entry=entry, versions=versions, refused=refused, pin=held
    )


def _versions(root: Path, folder: Path) -> tuple[dict[int, Path], dict[str, str]]:
    versions: dict[int, Path] = {}
    refused: dict[str, str] = {}
    with os.scandir(folder) as entries:
        found = sorted((e.name, e.is_dir()) for e in entries if e.name[0] != ".")
    for name, is_folder in found:
        number = version_number(name)
        if number is None:
            if is_folder:
                refused[printable(name)] = "not a version; name its folder with a number from 1"
        elif (real := inside(root, folder / name)) is None:
            refused[name] = "its folder is a link that leads out of the repository; move it in"
        elif is_folder:
            versions[number] = real
        else:
            refused[name] = "a file, not the folder of a version"
    return versions, refused


def _settings(
    root: Path, folder: Path, types: frozenset[str]
) -> tuple[str, ModelSettings, Mapping[str, object]]:
    path = folder / SETTINGS_FILE
    try:
        text = read_small(root, path, _SETTINGS_LIMIT).decode()
    except FileNotFoundError:
        return "bundle", ModelSettings(), {}
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}; save it as UTF-8") from error
    return _parsed(text, str(path), types)


@functools.lru_cache(maxsize=4096)  # every look reads every file, and few have changed
def _parsed(
    text: str, source: str, types: frozenset[str]
) -> tuple[str, ModelSettings, Mapping[str, object]]:
    value, _ = read_yaml(text, source)
    kind = value.get("type", "bundle") if isinstance(value, Mapping) else "bundle"
    if kind == "bundle":
        return "bundle", from_yaml(ModelSettings, text, source=source), {}
    if kind not in types:
        known = ["bundle", *sorted(types)]
        hint = did_you_mean(str(kind), known, f"this server has {', '.join(known)}")
        raise ConfigError(f"{source}: type={kind} is none; {hint}")
    return kind, ModelSettings(), {key: each for key, each in value.items() if key != "type"}


MANIFEST = "manifest.json"
_MANIFEST_LIMIT = 64 << 20
_MOST_FILES = 100_000
_DEEPEST = 32


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A version's files as they lie now."""

    fingerprint: str
    """Of the names, sizes and times of its files: other when any was touched."""
    waiting: str = ""
    """What a copy under way still lacks; empty when everything the manifest lists is there."""


def examine(root: Path, folder: Path, before: Bundle | None = None) -> Bundle:
    """Look at a version's files without reading them; what they hold is verified at load.

    A file that grows, or is still to come, makes the version wait, whatever order a copy takes.

    Args:
      before: What was seen there at an earlier look; the manifest of one that was complete is
        read again only if a file has changed.
    """
    found: dict[str, tuple[int, int, int]] = {}
    try:
        for name, status in _files(folder, ""):
            found[name] = (status.st_size, status.st_mtime_ns, status.st_ino)
            if len(found) > _MOST_FILES:
                return Bundle("", f"it has over {_MOST_FILES} files, more than a bundle may")
    except OSError as error:  # files come and go while it is copied or removed
        return Bundle("", f"its files cannot be listed: {error}")
    digest = hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=16).hexdigest()
    if before is not None and before.fingerprint == digest and not before.waiting:
        return before
    return Bundle(digest, _waiting(Path(os.path.realpath(root)), folder, found))


def _files(folder: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if prefix.count("/") >= _DEEPEST:
                    raise OSError(f"{prefix[:80]} is more than {_DEEPEST} folders deep")
                yield from _files(Path(entry.path), f"{prefix}{entry.name}/")
            else:
                yield f"{prefix}{entry.name}", entry.stat(follow_symlinks=False)


def _waiting(root: Path, folder: Path, found: dict[str, tuple[int, int, int]]) -> str:
    if MANIFEST not in found:
        return f"it has no {MANIFEST} yet"
    try:
        listed = _sizes(json.loads(read_small(root, folder / MANIFEST, _MANIFEST_LIMIT)))
    except ServingError as error:
        return str(error)
    except OSError as error:
        return f"its {MANIFEST} cannot be read: {error}"
    except (ValueError, RecursionError):
        return f"its {MANIFEST} is not whole yet, or not JSON"
    lacking = [
        f"{name} has {found[name][0] if name in found else 0} of {size} bytes"
        for name, size in listed.items()
        if name not in found or found[name][0] < size
    ]
    if not lacking:
        return ""
    more = f", and {len(lacking) - 1} more files lack some" if len(lacking) > 1 else ""
    return f"{lacking[0]}{more}"


def _sizes(manifest: object) -> dict[str, int]:
    """Sizes by file; what is not as it should be is left to the verification, which names it."""
    files = manifest.get("files") if isinstance(manifest, dict) else None
    sizes = {}
    for name, entry in files.items() if isinstance(files, dict) else ():
        size = entry.get("size") if isinstance(entry, dict) else None
        path = PurePosixPath(name)
        if isinstance(size, int) and not path.is_absolute() and ".." not in path.parts:
            sizes[name] = size
    return sizes
