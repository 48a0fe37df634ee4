"""Every kind of fault done to a real launched run, with the times from it to the verdict and on.

A row is a drill, its limits and the test that does it. The ranks run `train`, which is the command
line of Fornax and, when told by a signal, waits for data for ever or keeps Python's lock.
"""

import ast
import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fornax.checkpoint.records import record_path
from fornax.cluster import drill, resize
from fornax.cluster.drill import Fault
from fornax.cluster.files import ClusterFiles
from fornax.cluster.storm import LIMITS, follow
from fornax.cluster.verdict import Limits
from fornax.config import worker_record
from fornax.config.errors import ClusterError
from fornax.config.jsonl import read_json_lines

TESTS = Path(__file__).parents[1] / "tests"
SECONDS = 600
STEPS = 40
"""Good steps between two drills."""
HOSTS = 4
SMALL_DISK = "size=80m"
LAUNCH = """
import sys
from fornax.cluster import Job, launch
hosts, run_dir, *words = sys.argv[1:]
words = ("train", "--run-dir", run_dir, *words)
job = Job(hosts=int(hosts), program="_drills:train", words=words, mtbf=60.0)
sys.exit(launch(job, run_dir))
"""


def train(words: Sequence[str]) -> int:
    """The program of the ranks."""
    from fornax.cli.main import main

    signal.signal(signal.SIGUSR2, hang)
    signal.signal(signal.SIGALRM, hang)
    return main(list(words))


def hang(number: int, frame: object) -> None:
    """Hang as a file beside the record says, once the rank is where it can."""
    record = Path(os.environ["FORNAX_WORKER_RECORD"])
    began = record.with_suffix(".hung")
    if record.with_suffix(".hang").read_text() == "lock":
        began.touch()
        ctypes.PyDLL(None).sleep(SECONDS)  # keeps the interpreter's lock
    state = worker_record.read(record)
    if state is not None and state.phase == "wait_for_data":
        began.touch()
        time.sleep(SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 0.0005)


def make_hang(files: ClusterFiles, rank: int, what: str) -> Path:
    """Have a rank that runs `train` hang, in `data` or in `lock`; the file that is there once it
    does."""
    record = files.record(rank)
    state = worker_record.read(record)
    assert state is not None
    began = record.with_suffix(".hung")
    began.unlink(missing_ok=True)
    record.with_suffix(".hang").write_text(what)
    os.kill(state.pid, signal.SIGUSR2)
    return began


class Drilled:
    """A launched run to which things are done."""

    def __init__(self, run_dir: Path, config: Path, hosts: int = HOSTS) -> None:
        self.files, self.run_dir = ClusterFiles(run_dir), run_dir
        self.command = [sys.executable, "-c", LAUNCH, str(hosts), str(run_dir)]
        self.command += ["--config", str(config)]
        self.start()

    def start(self) -> None:
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with (self.run_dir.parent / "output").open("ab") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=output, env=environment
            )

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(SECONDS)

    def events(self) -> list[dict[str, Any]]:
        return read_json_lines(self.files.events)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait for something of the run."""
        deadline = time.monotonic() + SECONDS
        while not (found := condition()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the run ended, or makes no progress; see its output")
            time.sleep(0.01)
        return found

    def formed(self, after: int = 0, since: int = 0) -> dict[str, Any]:
        """The event of the first steps of the newest group, of a later epoch than `after`."""

        def newest() -> dict[str, Any] | None:
            states = [e for e in self.events()[since:] if "state" in e]
            began = [e for e in states if e["state"] == "running" and "step" in e]
            return (
                began[-1] if began and states[-1]["epoch"] == began[-1]["epoch"] > after else None
            )

        return self.until(newest)

    def wait_for_steps(self, count: int, after: int = 0, since: int = 0) -> dict[str, Any]:
        """Until all ranks of a group later than `after` made so many steps; how it began."""
        while True:
            group = self.formed(after, since)
            states = [worker_record.read(path) for path in self.files.records().values()]
            here = [s for s in states if s is not None and s.epoch == group["epoch"]]
            whole = bool(here) and len(here) == here[0].hosts
            if whole and all(s.entered_step >= group["step"] + count for s in here):
                return group
            time.sleep(0.005)

    def hang(self, rank: int, what: str) -> float:
        """Have a rank hang; returns when it began to, seconds since 1970."""
        began = make_hang(self.files, rank, what)
        self.until(began.exists)
        return began.stat().st_mtime

    def processes(self) -> list[int]:
        """Of the launch: its own, and those that it started, directly or not."""
        found = [self.process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += [int(each) for each in (task / "children").read_text().split()]
        return found


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds after a fault, and steps that were made again; None where there is no such thing."""

    named: float | None = None
    stepped: float | None = None
    again: int | None = None
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A drill: what is done, its limits in seconds, the test that does it."""

    name: str
    do: Callable[[Drilled], Times]
    tests: tuple[str, ...]
    """`file.py::name` of tests/."""
    title: str = ""
    named: float | None = None
    steps: int | None = None
    """The limit of the verdict, where it is one of steps."""
    stepped: float | None = None


def of_rank(fault: Fault, rank: int | None) -> Callable[[Drilled], Times]:
    """A drill of `fornax launch drill`."""

    def do(run: Drilled) -> Times:
        found = follow(run.run_dir, fault, rank)
        said = f"named {found.steps} steps later" if fault == "slow" else ""
        return Times(named=found.named, stepped=found.stepped, again=found.again, said=said)

    return do


def faults(*inject: Callable[[Drilled], object]) -> Callable[[Drilled], Times]:
    """One fault after the other, the verdict on the first, steps after the last."""

    def do(run: Drilled) -> Times:
        before, at = len(run.events()), time.time()
        for each in inject:
            each(run)
        last = time.time() - at
        said = f"the last fault after {last:.1f} s" if len(inject) > 1 else ""
        return recovered(run, before, at, said)

    return do


def hanging(rank: int, what: str) -> Callable[[Drilled], Times]:
    """A rank that hangs, from when it does."""

    def do(run: Drilled) -> Times:
        before = len(run.events())
        return recovered(run, before, run.hang(rank, what))

    return do


def recovered(run: Drilled, before: int, at: float, said: str = "") -> Times:
    """Wait for the steps after faults.

    Args:
      run: what they were done to.
      before: how many events there were before them.
      at: when the first happened, seconds since 1970.
      said: of them, in words.
    """

    def torn() -> dict[str, Any] | None:
        return next((e for e in run.events()[before:] if e.get("state") == "teardown"), None)

    first = run.until(torn)
    verdicts = (e for e in run.events()[before:] if e.get("state") in ("suspect", "teardown"))
    named = next(verdicts)  # the stacks of one that hangs are asked for after it
    drills = [e["epoch"] for e in run.events()[before:] if "drill" in e]
    group = run.wait_for_steps(1, after=max([first["epoch"], *drills]), since=before)
    again = max(0, first["entered"] + 1 - group["step"])
    return Times(named=named["time"] - at, stepped=time.time() - at, again=again, said=said)


def drilled(fault: Fault, rank: int) -> Callable[[Drilled], object]:
    """A drill as soon as there is such a rank."""

    def inject(run: Drilled) -> object:
        def tried() -> bool:
            with contextlib.suppress(ClusterError):
                return bool(drill(run.run_dir, fault, rank))
            return False

        return run.until(tried)

    return inject


def while_forming(run: Drilled) -> object:
    """Wait until the next group forms and rank 0 has a worker in it."""
    epoch = drilled_epoch(run) + 1
    run.until(lambda: any(e["epoch"] >= epoch for e in run.events()))

    def there() -> bool:
        state = worker_record.read(run.files.record(0))
        return state is not None and state.epoch >= epoch and state.pid > 0

    return run.until(there)


def while_saving(run: Drilled) -> object:
    """Wait until a checkpoint is being written and rank 1's part is not whole yet."""
    root = run.run_dir / "checkpoints"

    def saving() -> bool:
        names = {path.name.partition(".")[0] for path in root.glob("*")}
        steps = sorted(int(name) for name in names if name.isdecimal())
        return bool(steps) and not record_path(root / str(steps[-1]), 1).exists()

    deadline = time.monotonic() + SECONDS
    while not saving():
        if time.monotonic() > deadline:
            raise SystemExit("no checkpoint is written")
        time.sleep(0.0005)
    return drill(run.run_dir, "kill", 1)


def end_services(run: Drilled) -> None:
    for pid in run.processes():
        with contextlib.suppress(OSError):
            if b"coordination:serve" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def once_steps_are_made(run: Drilled) -> object:
    return run.wait_for_steps(1, after=drilled_epoch(run))


def drilled_epoch(run: Drilled) -> int:
    """That of the newest drill."""
    return next(e["epoch"] for e in reversed(run.events()) if "drill" in e)


def resized(run: Drilled) -> Times:
    """Four hosts, three, and four again; the pause is the longest between two steps."""
    seconds, pauses = [], []
    for hosts in (HOSTS - 1, HOSTS):
        before, at = run.formed()["epoch"], time.time()
        resize(run.run_dir, hosts)
        run.wait_for_steps(1, after=before)
        seconds.append(time.time() - at)
        run.wait_for_steps(STEPS, after=before)
        pauses.append(max(gaps(run, since=at)))
    said = "pauses " + ", ".join(f"{pause:.1f} s" for pause in pauses)
    return Times(stepped=max(seconds), again=0, said=said)


def gaps(run: Drilled, since: float = 0.0) -> list[float]:
    """Seconds between recorded steps after a time."""
    records = read_json_lines(run.run_dir / "metrics.jsonl")
    times = [each["time"] for each in records if each["time"] > since]
    return [b - a for a, b in itertools.pairwise(times)]


def launch_killed(run: Drilled) -> Times:
    """All processes end with it; the same command resumes from the newest checkpoint."""
    pids, at = run.processes(), time.time()
    entered = max(
        s.entered_step for p in run.files.records().values() if (s := worker_record.read(p))
    )
    epoch, before = run.formed()["epoch"], len(run.events())
    run.process.kill()
    run.process.wait()
    while any(alive(pid) for pid in pids):
        time.sleep(0.005)
    ended = time.time() - at
    run.start()
    group = run.wait_for_steps(1, after=epoch, since=before)
    return Times(
        named=ended,
        stepped=time.time() - at,
        again=max(0, entered + 1 - group["step"]),
        said="named: all processes have ended",
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def disk_full(folder: Path, config: Path) -> Times:
    """A run of two hosts whose disk fills up before it saves; needs the right to mount."""
    run_dir = folder / "small" / "run"
    run_dir.mkdir(parents=True)
    made = ["mount", "-t", "tmpfs", "-o", SMALL_DISK, "tmpfs", str(run_dir)]
    if subprocess.run(made, capture_output=True).returncode:
        return Times(named=None, stepped=None, again=None, said="mounting is not permitted here")
    try:
        run = Drilled(run_dir, config, hosts=2)
        run.wait_for_steps(STEPS)
        with (run_dir / "filler").open("ab", buffering=0) as filler:
            while (free := shutil.disk_usage(run_dir).free) > 300_000:
                filler.write(bytes(min(free - 300_000, 1 << 20)))
        event = run.until(lambda: next((e for e in run.events() if "unsaved" in e), None))
        count = event["unsaved"]
        run.until(lambda: len(read_json_lines(run_dir / "metrics.jsonl")) > count + STEPS)
        records = {r["step"]: r["time"] for r in read_json_lines(run_dir / "metrics.jsonl")}
        pause = max(records[n + 1] - records[n] for n in range(count - 1, count + 3))
        usual = statistics.median(gaps(run))
        run.close()
        said = f"a step took {pause:.1f} s there, {usual:.2f} s else; no new group formed"
        return Times(named=event["time"] - records[count], stepped=pause, again=0, said=said)
    finally:
        subprocess.run(["umount", "--lazy", str(run_dir)], check=True)


def _row(fault: Fault, rank: int | None, *tests: str) -> Row:
    limit = LIMITS[fault]
    name = fault if rank is None else f"{fault} {rank}"
    return Row(
        name=name,
        title=f"`--{name}`",
        do=of_rank(fault, rank),
        named=limit.named,
        steps=limit.steps if limit.named is None else None,
        stepped=limit.stepped,
        tests=tests,
    )


_RECOVERY = "integration/cluster/test_recovery.py::"
_CONTROLLER = "unit/cluster/test_controller.py::"
_MANY = "integration/cluster/test_drills.py::test_faults_of_many_kinds_change_no_number"
_SOON = (
    "integration/cluster/test_drills.py::"
    "test_data_that_never_comes_and_two_deaths_soon_after_each_other"
)
_STAYS = f"{_RECOVERY}test_the_survivor_stays_in_its_process_and_no_number_changes"
_HANGS = f"{_CONTROLLER}test_a_hanging_rank_is_named_with_its_stack"
_TWICE = f"{_RECOVERY}test_memory_is_enough_for_a_second_death_while_the_group_forms"
_SAVING = f"{_RECOVERY}test_a_death_while_saving_and_that_of_the_coordination_service"
_SLOW = f"{_RECOVERY}test_a_slow_rank_is_named_and_replaced_where_that_is_the_policy"
_CUT = f"{_CONTROLLER}test_one_that_is_cut_off_is_ended_by_its_agent_before_it_is_replaced"
_SAVES = (
    "integration/cluster/test_drills.py::"
    "test_a_host_that_is_cut_off_saves_nothing_once_others_took_over"
)
_NOTICE = f"{_RECOVERY}test_a_host_that_is_taken_away_with_notice_loses_no_step"
_LOST = f"{_RECOVERY}test_the_state_of_a_host_that_is_lost_comes_from_the_memory_of_another"
_DEAD = f"{_CONTROLLER}test_a_dead_agent_is_replaced_with_its_worker"
_BOTH = f"{_RECOVERY}test_when_a_host_and_its_replica_are_lost_the_newest_checkpoint_is_taken"
_RESIZED = "integration/cluster/test_client.py::test_other_numbers_of_hosts_train_as_one_process"
_NOTHING = f"{_CONTROLLER}test_nothing_is_left_when_the_launch_is_killed"
_KILLED = f"{_RECOVERY}test_a_run_goes_on_from_memory_when_its_controller_is_killed"
_LOST_AGAIN = f"{_CONTROLLER}test_a_controller_that_is_lost_again_and_again_ends_the_launch"
_AGAIN = (
    "integration/cluster/test_launch.py::test_signals_save_one_step_and_the_same_command_goes_on"
)
_FULL = "integration/cluster/test_full_disk.py::test_a_full_disk_costs_checkpoints_and_nothing_else"
_FROZEN, _STALL = Limits().frozen, Limits().stall

ROWS: tuple[Row, ...] = (
    _row("kill", 1, _MANY, _STAYS),
    _row("kill", 0, _MANY, _STAYS),
    _row("stop", 1, _MANY, _STAYS),
    _row("lose", 1, _MANY, _LOST, _DEAD),
    _row("preempt", 2, _MANY, _NOTICE),
    _row("partition", 3, _MANY, _CUT, _SAVES),
    _row("slow", 1, _SLOW),
    _row("controller", None, _KILLED, _LOST_AGAIN),
    Row(
        name="data stuck",
        do=hanging(1, "data"),
        named=_STALL + 1,
        stepped=_STALL + 11,
        tests=(_SOON, _HANGS),
    ),
    Row(
        name="lock held",
        do=hanging(2, "lock"),
        named=_FROZEN + 1,
        stepped=_FROZEN + 11,
        tests=(_MANY, _HANGS),
    ),
    Row(
        name="coordination service killed",
        do=faults(end_services),
        named=1.0,
        stepped=20.0,
        tests=(_SAVING,),
    ),
    Row(
        name="a host and the one with its replica",
        do=faults(drilled("lose", 1), drilled("lose", 2)),
        named=1.0,
        stepped=20.0,
        tests=(_BOTH,),
    ),
    Row(
        name="a second death while the group forms",
        do=faults(drilled("kill", 1), while_forming, drilled("kill", 0)),
        named=1.0,
        stepped=20.0,
        tests=(_MANY, _TWICE),
    ),
    Row(
        name="twice within 5 s",
        do=faults(drilled("kill", 1), once_steps_are_made, drilled("kill", 2)),
        named=1.0,
        stepped=20.0,
        tests=(_SOON,),
    ),
    Row(name="death while saving", do=faults(while_saving), tests=(_SAVING,)),
    Row(name="4 hosts to 3 to 4", do=resized, stepped=10.0, tests=(_RESIZED,)),
    Row(name="launch killed, and launched again", do=launch_killed, tests=(_NOTHING, _AGAIN)),
)

FULL = Row(name="disk full", do=lambda run: Times(), tests=(_FULL,))
"""Of a run of its own; see `disk_full`."""

HEAD = (
    "drill",
    "named after",
    "limit",
    "a step made after",
    "limit",
    "made again",
    "",
    "test, runs",
)


def shown(row: Row, found: Times) -> list[str]:
    """A row of the table, in words."""
    limits = (row.named, row.stepped)
    named, stepped = (
        f"{'' if limit is None or seconds <= limit else '**over** '}{seconds:.1f} s"
        if seconds is not None
        else ""
        for seconds, limit in zip((found.named, found.stepped), limits, strict=True)
    )
    first, second = ("" if limit is None else f"{limit:g} s" for limit in limits)
    if row.steps is not None:
        first = f"{row.steps} steps"
    again = "" if found.again is None else str(found.again)
    return [row.title or row.name, named, first, stepped, second, again, found.said, tested(row)]


def tested(row: Row) -> str:
    """The tests of a row, and when each runs, in words."""
    found = []
    for test in row.tests:
        file, _, name = test.partition("::")
        found.append(f"{Path(file).stem}: `{name}`, {runs(test)}")
    return "; ".join(found)


def runs(test: str) -> str:
    """When a test runs, by its markers: `always`, `CI`, or `exhaustive`.

    Args:
      test: `file.py::name` of tests/; one with parameters runs when the first of them does.

    Raises:
      ValueError: where there is no such test, or it does not say that it is a fault's.
    """
    file, _, name = test.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name)
    function = next(functions, None)
    if function is None:
        raise ValueError(f"tests/{file} has no test {name}; see the rows of _drills.py")
    for_all = (x.value for x in tree.body if isinstance(x, ast.Assign) and _sets_marks(x))
    marks, alternatives = set[str](), [set[str]()]
    for node in (*for_all, *function.decorator_list):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("parametrize"):
            assert isinstance(node.args[1], ast.List)
            some = [_marks(each) for each in node.args[1].elts]
            alternatives = [one | other for one in alternatives for other in some]
        else:
            marks |= _marks(node)
    if "fault" not in marks:
        raise ValueError(f"tests/{file} {name} lacks the marker `fault`")
    if all("exhaustive" in marks | each for each in alternatives):
        return "exhaustive"
    return "CI" if "slow" in marks else "always"


def _sets_marks(node: ast.Assign) -> bool:
    return any(ast.unparse(target) == "pytestmark" for target in node.targets)


def _marks(node: ast.AST) -> set[str]:
    """The markers that an expression names."""
    names = (ast.unparse(x) for x in ast.walk(node) if isinstance(x, ast.Attribute))
    return {name.removeprefix("pytest.mark.") for name in names if "pytest.mark." in name}


def table_of_faults(folder: Path, config: Path, only: Sequence[str] = ()) -> list[list[str]]:
    """Do everything once and measure it; `only` names the rows to do."""
    run, rows = Drilled(folder / "run", config), []
    try:
        for row in ROWS:
            if only and row.name not in only:
                continue
            run.wait_for_steps(STEPS)
            found = row.do(run)
            rows.append(shown(row, found))
            print(*rows[-1][:7], sep=" | ", file=sys.stderr, flush=True)
    finally:
        run.close()
    if not only or FULL.name in only:
        rows.append(shown(FULL, disk_full(folder, config)))
        print(*rows[-1][:7], sep=" | ", file=sys.stderr, flush=True)
    return rows
