"""Runs one program in the sandbox and says how it went, or what tests outside it find of it."""

import compileall
import contextlib
import functools
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fornax.config.errors import ConfigError
from fornax.rewards.sandbox import values
from fornax.rewards.sandbox.limits import Limits

__all__ = ["REQUIRED", "Outcome", "Tested", "run_program", "run_tests"]

REQUIRED = frozenset(
    ("time", "memory", "file size", "processes", "network", "reads", "writes", "signals")
)
"""What must be held before a program is run."""

_ENTER = Path(__file__).with_name("enter.py")
_LIBRARY = sysconfig.get_path("stdlib")
_ANSWER_BYTES = 1 << 20
_HEAD = 4
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
    output: str
    """What it printed on standard output."""
    error: str
    """The last exception or what ended the program, in one line; empty when all is well."""
    held: frozenset[str]
    """What the kernel held: time, memory, file size, processes, network, reads, writes, disk,
    signals."""
    seconds: float


@dataclass(frozen=True)
class Tested:
    """What tests found of a program."""

    verdicts: tuple[str, ...]
    """For each test: `passed`, `failed`, `weak` (it cannot be judged from outside the program),
    `setup` (it passed and asks nothing of the program)."""
    errors: tuple[str, ...]
    """For each test, what was wrong; empty when nothing was."""
    error: str
    """What ended the program before its tests, in one line; empty otherwise."""
    seconds: float


def run_program(
    program: str,
    *,
    stdin: str = "",
    limits: Limits = Limits(),  # noqa: B008
    packages: bool = False,
    required: frozenset[str] = REQUIRED,
) -> Outcome:
    """Run Python source as `__main__` in the sandbox, for what it prints.

    Args:
      program: the source.
      stdin: what it reads.
      limits: what it may use.
      packages: whether the packages of this environment can be imported.
      required: what the kernel must hold, or nothing is run.

    Raises:
      ConfigError: this machine does not hold what is required.
    """
    started = time.monotonic()
    box = _Sandbox(
        {"role": "print", "program": program}, limits, packages, required, stdin=stdin, prints=True
    )
    with box:
        ended = _watch([box], started + limits.seconds, limits)
        code = None if ended else box.wait(started + limits.seconds)
        if code is None:
            ended = ended or f"took over {limits.seconds:g} s"
    error = ended or box.error
    if not error and code:
        error = f"signal {code - 128}" if code > 128 else f"exit status {code}"
    output = bytes(box.output).decode(errors="replace")
    return Outcome(code, output, _line(error), box.held, time.monotonic() - started)


def run_tests(
    program: str,
    tests: Sequence[str],
    *,
    setup: str = "",
    entry: str = "",
    limits: Limits = Limits(),  # noqa: B008
    packages: bool = False,
    required: frozenset[str] = REQUIRED,
) -> Tested:
    """Run tests of Python source, each in turn, in a process that is not the program's.

    The tests run in one sandbox, the program in another; between them two pipes carry plain
    values. Nothing the program does in its process decides a test: it returns values.

    Args:
      program: the source, which is not trusted.
      tests: sources that call the program's functions by name; each passes when it raises nothing.
        Functions `test…` and cases of unittest that they define are run, and HumanEval's `check`.
      setup: source whose names the tests may use; trusted as they are.
      entry: the function that the program was asked for; tests may call it `candidate`.
      limits: what program and tests may use, each; the time is for both.
      packages: whether the packages of this environment can be imported.
      required: what the kernel must hold, or nothing is run.

    Raises:
      ConfigError: this machine does not hold what is required.
    """
    started = time.monotonic()
    given, asks = os.pipe()
    answered, answers = os.pipe()
    judged = {"role": "judge", "tests": list(tests), "setup": setup, "entry": entry}
    judging = {**judged, "requests": asks, "answers": answered}
    running = {"role": "program", "program": program, "requests": given, "answers": answers}
    with contextlib.ExitStack() as stack:
        try:
            boxes = [
                stack.enter_context(_Sandbox(job, limits, packages, required))
                for job in (judging, running)
            ]
        finally:
            for place in (given, asks, answered, answers):
                os.close(place)
        ended = _watch(boxes, started + limits.seconds, limits)
    judge, ran = boxes
    found = {said["test"]: said for said in judge.said if "test" in said}
    lost = ended or "the tests ended their process"
    verdicts = [found.get(n, {"verdict": "failed", "error": lost}) for n in range(len(tests))]
    return Tested(
        tuple(each["verdict"] for each in verdicts),
        tuple(_line(each["error"]) for each in verdicts),
        _line(ran.error or ended),
        time.monotonic() - started,
    )


class _Sandbox:
    """A sandbox that runs one job, until it is left."""

    def __init__(
        self,
        job: dict[str, Any],
        limits: Limits,
        packages: bool,
        required: frozenset[str],
        *,
        stdin: str = "",
        prints: bool = False,
    ) -> None:
        _compile()
        self.output, self._answer = bytearray(), bytearray()
        self._folder = tempfile.mkdtemp(prefix="fornax-sandbox-")
        nobody = os.getuid() == 0 and all(map(_open_to_all, (_LIBRARY, str(_ENTER))))
        if nobody:
            os.chown(self._folder, 65534, 65534)
        channel = {"requests": None, "answers": None}
        kept = [place for place in (job.get("requests"), job.get("answers")) if place is not None]
        whole = channel | job | _held_by(limits, packages, required)
        whole |= {"folder": self._folder, "nobody": nobody}
        self._answers, writes = os.pipe()
        with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as entry:
            question.write(values.encode(whole, _no_objects))
            question.seek(0)
            entry.write(stdin.encode(errors="surrogatepass"))
            entry.seek(0)
            descriptors = (question.fileno(), writes)
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-B", str(_ENTER), *map(str, descriptors)],
                stdin=entry,
                stdout=subprocess.PIPE if prints else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(*descriptors, *kept),
                start_new_session=True,
                cwd="/",
                env={
                    "HOME": self._folder,
                    "TMPDIR": self._folder,
                    "LANG": "C.UTF-8",
                    "PATH": "/usr/bin:/bin",
                    "PYTHONHASHSEED": "0",
                },
            )
        os.close(writes)

    @property
    def pipes(self) -> dict[int, bytearray]:
        """What is read from it: its answers first, then what it prints."""
        stdout = self._process.stdout
        return {self._answers: self._answer} | ({stdout.fileno(): self.output} if stdout else {})

    @property
    def said(self) -> list[dict[str, Any]]:
        """Its answers; raises ConfigError when something was not held."""
        found = [value for value in _frames(bytes(self._answer)) if isinstance(value, dict)]
        if found and found[0].get("lacking"):  # the first line is the sandbox's own
            raise ConfigError(_unheld(found[0]["lacking"]))
        return found

    @property
    def held(self) -> frozenset[str]:
        """What the kernel held."""
        return frozenset(next((said["held"] for said in self.said[:1]), ()))

    @property
    def error(self) -> str:
        """The last exception it told of."""
        return "".join(str(said["error"]) for said in self.said[1:] if "error" in said)[-400:]

    def wait(self, deadline: float) -> int | None:
        """Its exit status; None when it has none by then."""
        try:
            return self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        os.close(self._answers)
        shutil.rmtree(self._folder, ignore_errors=True)


@functools.cache
def _compile() -> None:
    """Leave bytecode beside what every sandbox imports, where this folder can be written."""
    compileall.compile_dir(_ENTER.parent, maxlevels=0, quiet=2)


def _held_by(limits: Limits, packages: bool, required: frozenset[str]) -> dict[str, object]:
    sites = [p for p in sys.path if p.endswith("-packages")] if packages else []
    return {
        "packages": sites,
        "readable": [*_SYSTEM, _LIBRARY, *sites, str(_ENTER.parent)],
        "cpu_seconds": math.ceil(limits.seconds),
        "memory_mb": limits.memory_mb,
        "files_mb": limits.files_mb,
        "processes": limits.processes,
        "required": sorted(required),
    }


def _watch(boxes: Sequence[_Sandbox], deadline: float, limits: Limits) -> str:
    """Read from sandboxes until the first has closed all its pipes, or must be ended: then why."""
    found = {place: data for box in boxes for place, data in box.pipes.items()}
    answers = {next(iter(box.pipes)) for box in boxes}
    waited = set(boxes[0].pipes)
    with selectors.DefaultSelector() as selector:
        for place in found:
            selector.register(place, selectors.EVENT_READ)
        while waited:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                return f"took over {limits.seconds:g} s"
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                found[key.fd] += piece
                most = _ANSWER_BYTES if key.fd in answers else limits.output_kb << 10
                if not piece:
                    selector.unregister(key.fd)
                    waited.discard(key.fd)
                elif len(found[key.fd]) > most:
                    return f"printed over {limits.output_kb} KiB"
    return ""


def _frames(data: bytes) -> Iterator[object]:
    """The values in frames, up to the first that is none."""
    while len(data) > _HEAD:
        size = int.from_bytes(data[:_HEAD], "big")
        frame, data = data[_HEAD : _HEAD + size], data[_HEAD + size :]
        try:
            yield values.decode(frame, _no_objects)
        except values.MalformedError:
            return


def _no_objects(_: object) -> int:
    raise ValueError("only values are sent")


def _line(text: str) -> str:
    return " ".join(text.split())


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
