"""Runs one program in the sandbox and says how it went."""

import json
import math
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fornax.config.errors import ConfigError
from fornax.rewards.sandbox.limits import Limits

__all__ = ["REQUIRED", "Outcome", "run_program"]

REQUIRED = frozenset(
    ("time", "memory", "file size", "processes", "network", "reads", "writes", "signals")
)
"""What must be held before a program is run."""

_ENTER = Path(__file__).with_name("enter.py")
_LIBRARY = sysconfig.get_path("stdlib")
_ANSWER_BYTES = 1 << 20
_SYSTEM = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
    "/dev/urandom",
    "/dev/zero",
)


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    code: int | None
    """Exit status, 128 + signal for one; None when it was ended for time or output."""
    passed: tuple[bool, ...]
    """For each test, whether it passed; empty when the program did not get so far."""
    output: str
    """What it printed on standard output."""
    error: str
    """The last exception or what ended the program, in one line; empty when all is well."""
    held: frozenset[str]
    """What the kernel held: time, memory, file size, processes, network, reads, writes, disk,
    signals."""
    seconds: float


def run_program(
    program: str,
    *,
    tests: Sequence[str] | None = None,
    stdin: str = "",
    limits: Limits = Limits(),  # noqa: B008
    packages: bool = False,
    required: frozenset[str] = REQUIRED,
) -> Outcome:
    """Run Python source in the sandbox.

    Args:
      program: the source.
      tests: sources run one by one in the program's name space, each passing when it raises
        nothing; None runs the program as `__main__`, for what it prints.
      stdin: what it reads.
      limits: what it may use.
      packages: whether the packages of this environment can be imported.
      required: what the kernel must hold, or nothing is run.

    Raises:
      ConfigError: this machine does not hold what is required.
    """
    folder = tempfile.mkdtemp(prefix="fornax-sandbox-")
    try:
        nobody = os.getuid() == 0 and all(map(_open_to_all, (_LIBRARY, str(_ENTER))))
        if nobody:
            os.chown(folder, 65534, 65534)
        return _run(folder, nobody, program, tests, stdin, limits, packages, required)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    folder: str,
    nobody: bool,
    program: str,
    tests: Sequence[str] | None,
    stdin: str,
    limits: Limits,
    packages: bool,
    required: frozenset[str],
) -> Outcome:
    sites = [p for p in sys.path if p.endswith("-packages")] if packages else []
    token = secrets.token_hex(16)
    job = {
        "folder": folder,
        "program": program,
        "tests": None if tests is None else list(tests),
        "token": token,
        "packages": sites,
        "readable": [*_SYSTEM, _LIBRARY, *sites, str(_ENTER.parent)],
        "cpu_seconds": math.ceil(limits.seconds),
        "memory_mb": limits.memory_mb,
        "files_mb": limits.files_mb,
        "processes": limits.processes,
        "required": sorted(required),
        "nobody": nobody,
    }
    started = time.monotonic()
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as entry:
        question.write(json.dumps(job).encode())
        question.seek(0)
        entry.write(stdin.encode(errors="surrogatepass"))
        entry.seek(0)
        reads, writes = os.pipe()
        descriptors = (question.fileno(), writes)
        process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-B", str(_ENTER), *map(str, descriptors)],
            stdin=entry,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
            cwd="/",
            env={
                "HOME": folder,
                "TMPDIR": folder,
                "LANG": "C.UTF-8",
                "PATH": "/usr/bin:/bin",
                "PYTHONHASHSEED": "0",
            },
        )
        os.close(writes)
        try:
            output, answer, ended = _watch(process, reads, started + limits.seconds, limits)
        finally:
            _kill(process)
            os.close(reads)
    return _outcome(process, output, answer, ended, token, time.monotonic() - started)


def _watch(
    process: subprocess.Popen, reads: int, deadline: float, limits: Limits
) -> tuple[bytes, bytes, str]:
    """Read what it prints and answers until it ends, or must be ended: then why."""
    assert process.stdout is not None
    found = {process.stdout.fileno(): bytearray(), reads: bytearray()}
    most = {process.stdout.fileno(): limits.output_kb << 10, reads: _ANSWER_BYTES}
    ended = ""
    with selectors.DefaultSelector() as selector:
        for place in found:
            selector.register(place, selectors.EVENT_READ)
        while selector.get_map() and not ended:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                ended = f"took over {limits.seconds:g} s"
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                found[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
                elif len(found[key.fd]) > most[key.fd]:
                    ended = f"printed over {limits.output_kb} KiB"
    if not ended:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            ended = f"took over {limits.seconds:g} s"
    output, answer = found.values()
    return bytes(output), bytes(answer), ended


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _outcome(
    process: subprocess.Popen, output: bytes, answer: bytes, ended: str, token: str, seconds: float
) -> Outcome:
    said: dict[str, Any] = {"held": [], "error": "", "passed": []}
    for line in answer.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if not isinstance(value, dict):
            continue
        if "held" in value and not said["held"]:  # the first line is the sandbox's own
            said["held"] = value["held"]
            if value["lacking"]:
                raise ConfigError(_unheld(value["lacking"]))
        elif "error" in value:
            said["error"] = str(value["error"])
        elif value.get("token") == token:
            said["passed"] = value.get("passed", [])
    code = None if ended else process.returncode
    error = ended or said["error"]
    if not error and code:
        error = f"signal {code - 128}" if code > 128 else f"exit status {code}"
    return Outcome(
        code,
        tuple(value is True for value in said["passed"]),
        output.decode(errors="replace"),
        " ".join(error.split()),
        frozenset(said["held"]),
        seconds,
    )


def _unheld(kinds: Sequence[str]) -> str:
    return (
        f"the kernel of this machine does not hold a program's {', '.join(kinds)}, so programs "
        "that a model wrote are not run here; use Linux 5.13 or newer with user namespaces (6.2 "
        "without), as an ordinary user or with processes=1, or allow it with the option "
        "unheld=allow inside a container that you can lose"
    )


def _open_to_all(path: str) -> bool:
    """Whether any user of the machine can reach a path: not so beneath a private home."""
    return all(os.stat(place).st_mode & 0o001 for place in Path(path).parents)
