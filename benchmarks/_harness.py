"""What benchmarks share: contestants in processes of their own, interleaved rounds, a results file.

A machine is never quiet, so contestants take turns: each round gives every contestant one turn, in
an order that rotates, and ratios are taken within a round. A contestant lives in its own process
(its own threads, allocator and environment) and waits, without using the processor, for its turn.

A benchmark calls `contest` in the parent process and `serve` in a worker:

    if args.worker:
        _harness.serve(make_turn(args.worker))
    else:
        commands = {name: [sys.executable, __file__, "--worker", name] for name in CONTESTANTS}
        times = _harness.contest(commands, rounds=10)
"""

import contextlib
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

RESULTS = Path(__file__).parent / "results"
GUIDES = Path(__file__).parents[1] / "docs" / "guides"
_LOAD = os.getloadavg()[0]
"""Processes that wanted a processor when the benchmark began, a mean over a minute."""


@dataclass(frozen=True)
class Turn:
    """One turn of one contestant."""

    wall_s: float
    cpu_s: float
    """Processor time, user and system, of the contestant's process during the turn."""
    faults: int
    """Pages that the kernel had to map during the turn."""
    peak_bytes: int = 0
    """Most memory that the process held so far."""


@dataclass
class Result:
    """All turns of one contestant, or the reason why it took none."""

    turns: list[Turn] = field(default_factory=list)
    absent: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """What the contestant said of itself when it was ready."""

    def median_s(self) -> float:
        return statistics.median(t.wall_s for t in self.turns)

    def best_s(self) -> float:
        return min(t.wall_s for t in self.turns)

    def cpu_s(self) -> float:
        return min(t.cpu_s for t in self.turns)


def timed(turn: Callable[[], Any]) -> Turn:
    """Run `turn` once on the clock; it must not return before its work is done."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    turn()
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Turn(wall, cpu, after.ru_minflt - before.ru_minflt, after.ru_maxrss * 1024)


def serve(
    make: Callable[[], tuple[Callable[[], Any], dict[str, Any]]], *, in_a_row: bool = False
) -> None:
    """Be a contestant: make ready, say so, then take a turn for each line on standard input.

    Args:
        make: returns the turn, warmed up, and details to report. ImportError: the contestant is
            absent.
        in_a_row: a turn off the clock comes before each, for work that repeats without a pause.
            While others have their turns, the host of a virtual machine takes back what this
            process freed, and the first turn after that maps it again: 0.75 s of system time in
            place of 0.12 for 1 GB of XLA's temporaries.
    """
    with _answers_only() as answers:
        try:
            turn, details = make()
        except ImportError as error:
            _say(answers, {"absent": str(error)})
            return
        _say(answers, {"ready": details})
        for _ in sys.stdin:
            if in_a_row:
                turn()
            taken = timed(turn)
            _say(answers, asdict(taken))


@contextlib.contextmanager
def _answers_only():
    """Keep standard output for answers: whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        yield answers
    finally:
        answers.close()


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def contest(
    commands: Mapping[str, Sequence[str]],
    *,
    rounds: int,
    warmups: int = 1,
    env: Mapping[str, str] | None = None,
    check: Callable[[Mapping[str, Result]], None] | None = None,
) -> dict[str, Result]:
    """Start every contestant, then let them take turns.

    Args:
        commands: contestant to the command of its worker process.
        rounds: turns for each, after the warm-ups.
        warmups: rounds thrown away.
        env: additions to the workers' environment.
        check: called with what the contestants said of themselves, before the first turn.

    Returns:
        Contestant to its turns, in the order of `commands`.
    """
    results: dict[str, Result] = {}
    with contextlib.ExitStack() as cleanup:
        workers: dict[str, Worker] = {}
        for name, command in commands.items():
            print(f"preparing {name}", file=sys.stderr, flush=True)
            workers[name] = Worker(name, command, cleanup, env=env)
            said = workers[name].receive()
            results[name] = Result(absent=said.get("absent"), details=said.get("ready") or {})
        if check is not None:
            check(results)
        _take_turns(workers, results, rounds, warmups)
    return results


class FailedError(Exception):
    """A contestant's process ended, or did not do what was asked."""


class Worker:
    """A contestant's process, which answers in lines of JSON and ends with `cleanup`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        cleanup: contextlib.ExitStack,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._errors = cleanup.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - closed there
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **(env or {})},
        )
        cleanup.callback(self._process.wait)
        cleanup.callback(self._process.kill)

    def ask(self, message: object) -> dict[str, Any]:
        """Say `message` as a line of JSON and return the answer.

        Raises:
          FailedError: it ended instead; its errors are shown.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: `receive` says so
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        return self.receive()

    def receive(self) -> dict[str, Any]:
        """The next line that it says.

        Raises:
          FailedError: it ended instead; its errors are shown.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        sys.stderr.write(self._errors.read()[-4000:])
        raise FailedError(f"the process of {self.name} ended with code {code}")


def _take_turns(
    workers: Mapping[str, Worker], results: Mapping[str, Result], rounds: int, warmups: int
) -> None:
    names = [name for name, result in results.items() if result.absent is None]
    for number in range(warmups + rounds):
        print(f"round {number + 1} of {warmups + rounds}", file=sys.stderr, flush=True)
        first = number % max(len(names), 1)
        for name in names[first:] + names[:first]:
            turn = Turn(**workers[name].ask("turn"))
            took = f"{1e3 * turn.cpu_s:.0f} ms of processor time in {1e3 * turn.wall_s:.0f}"
            print(f"  {name}: {took}", file=sys.stderr, flush=True)
            if number >= warmups:
                results[name].turns.append(turn)


def ratio(results: Mapping[str, Result], name: str, to: str) -> float:
    """Return the median over rounds of `name`'s time over that of `to` in the same round."""
    pairs = zip(results[name].turns, results[to].turns, strict=True)
    return statistics.median(mine.wall_s / theirs.wall_s for mine, theirs in pairs)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def machine() -> str:
    """Describe the machine in one line: processor, cores, memory, what else it did at the start."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = f"{os.cpu_count()} cores, {pages / 2**30:.0f} GiB"
    return f"{name}, {size}, {platform.system()}, load {_LOAD:.1f} before"


def versions(*packages: str) -> str:
    """Return `name version` of each installed package."""
    found = []
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return ", ".join(["Python " + platform.python_version(), *found])


def write_results(name: str, text: str, *, device: str = "cpu") -> Path:
    """Write `text` to results/<date>-<device>-<name>.md and return its path."""
    RESULTS.mkdir(exist_ok=True)
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    path = RESULTS / f"{date}-{device}-{name}.md"
    path.write_text(text.rstrip() + "\n")
    return path


def write_guide(name: str, mark: str, text: str) -> None:
    """Put `text` into a guide, in place of what is between `<!-- mark -->` and `<!-- /mark -->`."""
    path = GUIDES / name
    before, begin, rest = path.read_text().partition(f"<!-- {mark} -->")
    _, end, after = rest.partition(f"<!-- /{mark} -->")
    if not begin or not end:
        raise FailedError(f"{path} has no {mark} to write")
    path.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")
