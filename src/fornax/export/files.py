"""A bundle's directory: hashes, what does not belong there, and its atomic creation."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fornax.config.errors import BundleError
from fornax.config.files import replacing_folder
from fornax.export.manifest import File

__all__ = [
    "MANIFEST",
    "check_listing",
    "measure",
    "new_directory",
    "read_checked",
    "verify",
    "watch",
]

MANIFEST = "manifest.json"
_BLOCK = 1 << 20
_AGAIN = "copy the bundle again or export again"


def check_listing(root: Path, files: Mapping[str, File]) -> None:
    """That the directory holds exactly the manifest's files, each of its size and no link.

    Raises:
      BundleError: naming the first that is extra, missing, linked or of another size.
    """
    found: dict[str, int] = {}
    folders = {str(Path(name).parent) for name in (*files, MANIFEST)}
    folders |= {str(p) for name in files for p in Path(name).parents}
    for path, info in _walk(root, ""):
        if stat.S_ISLNK(info.st_mode):
            raise BundleError(f"{root / path} is a link; a bundle has none: {_AGAIN}")
        if stat.S_ISDIR(info.st_mode):
            if path not in folders:
                raise BundleError(f"{root / path} is not part of the bundle; {_AGAIN}")
        elif not stat.S_ISREG(info.st_mode):
            raise BundleError(f"{root / path} is not a regular file; {_AGAIN}")
        elif path != MANIFEST:
            if path not in files:
                raise BundleError(f"{root / path} is not part of the bundle; {_AGAIN}")
            found[path] = info.st_size
    for name, file in files.items():
        if name not in found:
            raise BundleError(f"{root / name} is missing; {_AGAIN}")
        if found[name] != file.size:
            raise BundleError(
                f"{root / name} has {found[name]} bytes instead of {file.size}; {_AGAIN}"
            )


def _walk(root: Path, below: str) -> Iterator[tuple[str, os.stat_result]]:
    at = root / below
    try:
        found = []
        for entry in list(os.scandir(at)):
            at = Path(entry.path)  # which may be gone by now
            found.append((entry.name, entry.stat(follow_symlinks=False)))
    except OSError as error:
        raise BundleError(f"{at} cannot be read ({error.strerror})") from None
    for name, info in found:
        path = f"{below}/{name}" if below else name
        yield path, info
        if stat.S_ISDIR(info.st_mode):
            yield from _walk(root, path)


def read_checked(root: Path, name: str, file: File | None, *, limit: int = 1 << 32) -> bytes:
    """A file's bytes; with `file`, only if they have its size and hash.

    Raises:
      BundleError: naming the file and what is wrong.
    """
    path = root / name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise BundleError(f"{path} is not a regular file; {_AGAIN}")
            data = stream.read(limit + 1)
    except FileNotFoundError:
        raise BundleError(f"{path} is missing; {_AGAIN}") from None
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror})") from None
    if len(data) > limit:
        raise BundleError(f"{path} is larger than {limit} bytes; no bundle has such a file")
    if file is not None:
        _compare(path, File(size=len(data), sha256=hashlib.sha256(data).hexdigest()), file)
    return data


def measure(path: Path) -> File:
    """Size and SHA-256 of a file.

    Raises:
      BundleError: it is not a regular file.
      OSError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    # It was regular when the bundle was listed. What took its place may be a pipe, which would
    # hold the reader for ever without O_NONBLOCK.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BundleError(f"{path} is not a regular file; {_AGAIN}")
        block = bytearray(_BLOCK)
        view = memoryview(block)
        while count := stream.readinto(block):
            digest.update(view[:count])
            size += count
    return File(size=size, sha256=digest.hexdigest())


def _compare(path: Path, found: File, expected: File) -> None:
    if found.size != expected.size:
        raise BundleError(f"{path} has {found.size} bytes instead of {expected.size}; {_AGAIN}")
    if found.sha256 != expected.sha256:
        raise BundleError(f"{path} was altered: its SHA-256 is not the manifest's; {_AGAIN}")


def verify(root: Path, files: Mapping[str, File], names: Iterable[str]) -> None:
    """Hash the named files, several at a time.

    Raises:
      BundleError: naming the first that is not as it was sealed.
    """

    def check(name: str) -> None:
        try:
            _compare(root / name, measure(root / name), files[name])
        except OSError as error:
            raise BundleError(f"{root / name} cannot be read ({error.strerror})") from None

    largest_first = sorted(names, key=lambda name: -files[name].size)
    if sum(files[name].size for name in largest_first) < _BLOCK:
        for name in largest_first:
            check(name)
        return
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for _ in pool.map(check, largest_first):
            pass


def watch(root: Path, names: Iterable[str]) -> Callable[[], None]:
    """A check that the named files are still the same ones, for who waits for a reader of them.

    A pipe in a file's place holds a reader that opens it for ever, also when the pipe is gone.

    Raises:
      BundleError: as the check does, naming a file that is not a regular one, or none, or another.
    """
    before = {name: _identity(root / name) for name in names}

    def check() -> None:
        for name, identity in before.items():
            if _identity(root / name) != identity:
                raise BundleError(f"{root / name} was replaced while it was read; load it again")

    return check


def _identity(path: Path) -> tuple[int, int]:
    try:
        info = path.lstat()
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(info.st_mode):
        raise BundleError(f"{path} is not a regular file; {_AGAIN}")
    return info.st_dev, info.st_ino


@contextlib.contextmanager
def new_directory(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A directory to fill that becomes `path` when the block ends, and vanishes if it fails.

    Raises:
      BundleError: when `path` exists and may not be overwritten, or cannot be written.
    """
    if path.is_symlink() or (path.exists() and not (overwrite and path.is_dir())):
        raise BundleError(
            f"{path} exists; choose another directory or pass overwrite=True (--overwrite)"
        )
    if path.exists() and any(path.iterdir()) and not (path / MANIFEST).is_file():
        raise BundleError(f"{path} is not a bundle, so it is not overwritten; choose another")
    try:
        with replacing_folder(path) as work:
            yield work
    except OSError as error:
        raise BundleError(f"{path} cannot be written ({error.strerror or error})") from error
