"""Whether a version's folder is complete, and a fingerprint by which to see that it changed."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from fornax.config import ServingError
from fornax.serving.repository.files import read_small

__all__ = ["Bundle", "examine"]

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
    return Bundle(digest, _waiting(root, folder, found))


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
        return f"its {MANIFEST} is not whole yet, or no JSON"
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
