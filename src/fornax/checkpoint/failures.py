"""Why a checkpoint could not be written, in words."""

import errno
import shutil
from pathlib import Path

from fornax.config.files import is_full

__all__ = ["first_line", "has_no_room", "reason"]


def has_no_room(error: BaseException) -> bool:
    """Whether there was no room; TensorStore says so in words alone."""
    causes = _causes(error)
    return any(is_full(cause) or "No space left" in str(cause) for cause in causes)


def reason(error: BaseException, directory: Path) -> str:
    """The cause in words, and the fix where there is one."""
    text = " ".join(str(cause) for cause in _causes(error))
    codes = {cause.errno for cause in _causes(error) if isinstance(cause, OSError)}
    if has_no_room(error):
        free = shutil.disk_usage(directory).free / 1e6
        return f"no space left on the disk ({free:.0f} MB free); free some, or keep fewer steps"
    if errno.EFBIG in codes or "File too large" in text:
        return "a file grew over the limit of this system; raise the file-size limit"
    if codes & {errno.EROFS, errno.EACCES, errno.EPERM} or "Read-only file system" in text:
        return "the directory cannot be written; choose another or change its permissions"
    return first_line(error)


def _causes(error: BaseException | None) -> list[BaseException]:
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def first_line(error: BaseException) -> str:
    """An error's type and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
