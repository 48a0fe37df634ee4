"""Files and folders that appear whole or not at all, whatever is killed while they are written."""

import contextlib
import ctypes
import errno
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["is_full", "put_in_place", "replacing", "replacing_folder", "sync", "write_whole"]

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def is_full(error: BaseException) -> bool:
    """Whether the disk, or what this user may use of it, has no room."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A path beside `path` to write, which takes its place when the block ends without an error.

    Args:
      durable: whether the file must also outlast a power cut from then on.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield draft
        if durable:
            sync(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def write_whole(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file, and its folder, so that a reader sees the old or the new one; text is UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=durable) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """A new folder that takes `target`'s place, durably, when the block ends without an error.

    What was there is deleted then; where that fails, it is named in the log.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        yield work
        work.chmod(0o777 & ~_umask())
        for parent, _, names in os.walk(work):
            for name in names:
                sync(Path(parent) / name)
            sync(Path(parent))
        put_in_place(work, target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    try:
        if work.exists():  # what was replaced
            shutil.rmtree(work)
    except OSError as error:
        logging.getLogger("fornax").warning(
            "%s is written, but what it replaces cannot be deleted: %s (%s); delete it",
            target,
            work,
            error.strerror or error,
        )


def put_in_place(work: Path, target: Path) -> None:
    """Give `work` the name `target`; what had it takes the name `work`."""
    if not target.exists():
        work.rename(target)
    elif not _exchange(work, target):
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
        target.rename(old)
        try:
            work.rename(target)
        except BaseException:
            old.rename(target)
            raise
        old.rename(work)


def _exchange(a: Path, b: Path) -> bool:
    """Let two folders change names in one step, where the system can (Linux)."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return renameat2(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def sync(path: Path) -> None:
    """Make a file, or what a folder was just told, last beyond a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
