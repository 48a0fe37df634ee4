"""Exceptions into one paragraph and an exit code: 2 for what the user can fix, 1 for a bug.

75 where another process of the run is gone, so that a scheduler starts it again.
"""

import errno
import os
import select
import shutil
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path

from fornax import __version__
from fornax.config import FornaxError
from fornax.config.environment import full_traceback
from fornax.config.errors import GroupLostError

USER_ERROR = 2
BUG = 1
INTERRUPTED = 130
BROKEN_PIPE = 141

_FIXES: dict[int, str] = {
    errno.ENOSPC: "make room on that disk or choose another directory",
    errno.EDQUOT: "your quota there is used up; make room or choose another directory",
    errno.EROFS: "that file system is read-only; choose another directory",
    errno.EACCES: "give this user the right to it or choose another path",
    errno.EPERM: "give this user the right to it or choose another path",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of that path is a file; check the path",
    errno.EISDIR: "that is a directory; name a file",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EADDRINUSE: "another process uses that port; choose another",
}


def report(error: BaseException, run_dir: Path | None = None) -> int:
    """Tell the user what happened on standard error; return the exit code.

    The traceback of a bug is written into `run_dir` where it exists, else into a temporary file.
    """
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError) and _stdout_is_closed():
        _silence_stdout()
        return BROKEN_PIPE
    message = _mendable(error)
    if full_traceback():
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, GroupLostError):
        _say(str(error))
        return error.exit_code
    _say(f"error: {message or _bug(error, run_dir)}")
    return USER_ERROR if message else BUG


def _mendable(error: BaseException) -> str | None:
    """The paragraph for what the user can fix, or None for a bug."""
    if isinstance(error, FornaxError):
        return str(error)
    for cause in _causes(error):
        if isinstance(cause, FornaxError):
            return str(cause)
        if isinstance(cause, OSError) and cause.errno in _FIXES:
            place = f"{cause.filename}: " if cause.filename else ""
            reason = (cause.strerror or os.strerror(cause.errno)).lower()
            return f"{place}{reason}; {_FIXES[cause.errno]}"
        if _out_of_device_memory(cause):
            return (
                f"the device ran out of memory ({_one_line(cause, 200)}); lower the batch size or "
                "the sequence length, accumulate over more micro-batches, choose a remat policy, "
                "or shard over more devices"
            )
        if isinstance(cause, MemoryError):
            return "this machine ran out of memory; lower the batch size or free some memory"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _out_of_device_memory(error: BaseException) -> bool:
    return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and str(error).startswith(
        "RESOURCE_EXHAUSTED"
    )


def _bug(error: BaseException, run_dir: Path | None) -> str:
    where = _write_traceback(error, run_dir)
    kept = f"the traceback is in {where}" if where else "the traceback is above"
    return (
        f"{type(error).__name__}: {_one_line(error, 300)}. This is a bug in Fornax {__version__}, "
        f"not a mistake of yours: {kept}; please report it with the command you gave"
    )


def _write_traceback(error: BaseException, run_dir: Path | None) -> Path | None:
    """Write the traceback to a file; to standard error where no file can be written."""
    text = "".join(traceback.format_exception(error))
    folders = ([run_dir] if run_dir and run_dir.is_dir() else []) + [None]
    for folder in folders:
        try:
            handle, name = tempfile.mkstemp(prefix="traceback-", suffix=".txt", dir=folder)
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"fornax {__version__}: {' '.join(sys.argv)}\n{text}")
        except OSError:
            continue
        return Path(name)
    sys.stderr.write(text)
    return None


def _one_line(error: BaseException, limit: int) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _say(text: str) -> None:
    """Write a paragraph: wrapped on a terminal, one line elsewhere, for logs."""
    text = " ".join(text.split())
    if sys.stderr.isatty():
        width = min(shutil.get_terminal_size().columns, 100)
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    print(text, file=sys.stderr)  # noqa: T201


def _stdout_is_closed() -> bool:
    """Whether the reader of standard output went away, and not that of some other pipe."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # replaced by something that is not a file
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _silence_stdout() -> None:
    """Keep the interpreter from complaining about the broken pipe when it flushes at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return
