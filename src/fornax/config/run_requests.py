"""What is asked of a running run, by files in its directory: a profile, a checkpoint, a stop.

`<run>/requests/<unix ms>-<kind>.json` holds `{"kind": "profile", "steps": 5}`. The run looks about
once a second, and answers by renaming it to `….done.json`, with `{"result": {…}}` or
`{"error": "…"}` beside what was asked. Every user who may write to the run's directory may ask.
"""

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from fornax.config.errors import ConfigError
from fornax.config.files import write_whole

__all__ = [
    "KINDS",
    "MOST_STEPS",
    "Kind",
    "Request",
    "answer",
    "answer_of",
    "ask",
    "checked",
    "pending",
]

Kind = Literal["profile", "checkpoint", "stop"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_STEPS = 200
"""That one request may have profiled, so that a capture stays small."""
_DEFAULT_STEPS = 5
_NAME = re.compile(r"(\d{1,16})-([a-z]+)\.json")
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Request:
    """One file that waits for an answer."""

    path: Path
    kind: Kind | None
    """None: it is not supported, and `error` says why."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """`steps` of a profile; nothing of the others."""
    error: str | None = None


def ask(run_dir: str | Path, kind: str, **values: object) -> Path:
    """Ask the run in a directory for something; returns the request's file.

    Args:
      run_dir: of a run, which need not run yet; requests from before its start are refused by it.
      kind: `profile` (with `steps`, 1 to `MOST_STEPS`, 5 if not given), `checkpoint` or `stop`.
      values: of the kind.

    Raises:
      ConfigError: for what is none of these, a directory that is not a run's, or cannot be written.
    """
    asked = {"kind": kind, **checked(kind, values)}
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a directory of a run; name one that `train` wrote")
    folder = run_dir / "requests"
    try:
        folder.mkdir(exist_ok=True)
        taken = {name.partition("-")[0] for name in os.listdir(folder)}
        milliseconds = time.time_ns() // 1_000_000
        while str(milliseconds) in taken:  # so that requests keep their order
            milliseconds += 1
        path = folder / f"{milliseconds}-{kind}.json"
        write_whole(path, json.dumps(asked) + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write {folder}: {error.strerror or error}; ask as the user who runs it"
        ) from error
    return path


def checked(kind: object, values: Mapping[str, object]) -> dict[str, object]:
    """The values of a request, complete.

    Raises:
      ConfigError: for an unknown kind or value, or one out of range.
    """
    if kind not in KINDS:
        raise ConfigError(f"a run is asked for {', '.join(KINDS)}, and this says {kind!r}")
    allowed = ("steps",) if kind == "profile" else ()
    unknown = [name for name in values if name not in allowed]
    if unknown:
        takes = "takes only steps" if allowed else "takes no values"
        raise ConfigError(f"a request for a {kind} {takes}, and this has {', '.join(unknown)}")
    if not allowed:
        return {}
    steps = values.get("steps", _DEFAULT_STEPS)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
        raise ConfigError(f"steps={steps!r} of a profile must be a number from 1 to {MOST_STEPS}")
    return {"steps": steps}


def pending(run_dir: Path) -> list[Request]:
    """The requests that wait, the oldest first; what is none of ours in the folder is left alone.

    Raises:
      OSError: when the folder is there and cannot be read.
    """
    folder = run_dir / "requests"
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = [found for name in names if (found := _NAME.fullmatch(name))]
    matches.sort(key=lambda found: (int(found[1]), found[0]))
    return [_read(folder / found[0]) for found in matches]


def answer(
    request: Request, *, result: Mapping[str, object] | None = None, error: str | None = None
) -> None:
    """Answer a request, with a result or an error; it no longer waits, though the disk be full."""
    said = {"error": error} if error is not None else {"result": dict(result or {})}
    body = {"kind": request.kind, **request.values, **said, "time": round(time.time(), 3)}
    done = request.path.with_suffix(".done.json")
    with contextlib.suppress(OSError):
        write_whole(done, json.dumps(body) + "\n")
    with contextlib.suppress(OSError):
        request.path.unlink()


def answer_of(path: Path) -> dict[str, Any] | None:
    """What the run answered to the request that `ask` wrote; None while it waits.

    Raises:
      ConfigError: when the request was taken away.
    """
    done = path.with_suffix(".done.json")
    for _ in range(2):  # it is answered before it goes
        with contextlib.suppress(FileNotFoundError):
            return json.loads(done.read_text(encoding="utf-8"))
        if path.exists():
            return None
    raise ConfigError(f"{path} is gone and has no answer; ask again")


def _read(path: Path) -> Request:
    try:
        kind, values = _parse(path)
        return Request(path=path, kind=kind, values=values)
    except ConfigError as error:
        return Request(path=path, kind=None, error=str(error))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        return Request(path=path, kind=None, error=f"{path.name} cannot be read: {reason}")


def _parse(path: Path) -> tuple[Kind, dict[str, object]]:
    # Neither through a link nor from a pipe, on which reading would wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_size > _MOST_BYTES:
            raise ConfigError(
                f"{path.name} is not a file of a request, of {_MOST_BYTES} bytes at most"
            )
        said = json.loads(file.read(_MOST_BYTES))
    if not isinstance(said, dict):
        raise ConfigError(f"{path.name} must hold an object, such as " + '{"kind": "checkpoint"}')
    kind = said.pop("kind", None)
    values = checked(kind, said)
    return kind, values
