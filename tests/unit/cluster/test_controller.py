"""The controller with real agents, workers and faults; the workers compute nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fornax.cli.main import main
from fornax.cluster import Job, Limits, drill, read_status, stacks
from fornax.cluster.beside import Beside
from fornax.cluster.beside_process import DATA_WORKER
from fornax.cluster.controller import Controller
from fornax.cluster.files import ClusterFiles
from fornax.cluster.local import LocalLauncher
from fornax.config import ClusterError, worker_record
from fornax.config.jsonl import read_json_lines
from fornax.config.worker_process import WorkerProcess

pytestmark = [pytest.mark.fault]

HOSTS = 3
FACTS = {"rank", "host", "kind", "phase", "step", "since", "last_line"}


class Run:
    """A launch of `ranks.py` in this process; `when` runs beside it."""

    def __init__(
        self,
        folder: Path,
        steps: int = 60,
        spare: bool = False,
        name: str = "run",
        data_workers: int = 0,
        launcher: type[LocalLauncher] = LocalLauncher,
    ) -> None:
        self.folder, self.files = folder, ClusterFiles(folder / name)
        self.files.directory.mkdir(parents=True, exist_ok=True)
        self.said: list[str] = []
        job = Job(
            hosts=HOSTS,
            program="ranks:main",
            words=(str(folder), str(steps)),
            limits=Limits(stall=1.0, leave=0.5, lease=6.0),
        )
        placed = launcher(files=self.files, spare=spare, imports=("ranks",))
        beside = Beside(
            files=self.files,
            role=DATA_WORKER,
            count=data_workers,
            launcher=placed,
            order={},
            announce=self.said.append,
            stall=1.0,
        )
        self.close = beside.close
        self.controller = Controller(
            job,
            self.files,
            placed,
            announce=self.said.append,
            tick=lambda step: beside.check(),
        )

    def code(self, *when: tuple[int, Callable[[], object]]) -> int:
        """Run to the end; each of `when` is called once rank 1 has entered a step."""
        beside = threading.Thread(target=self._beside, args=when, daemon=True)
        beside.start()
        return self.controller.run()

    def _beside(self, *when: tuple[int, Callable[[], object]]) -> None:
        for step, call in when:
            self.pid(1, step)
            call()

    def pid(self, rank: int, step: int = 0) -> int:
        """The process of a rank once it has entered a step."""
        for _ in range(12_000):
            state = worker_record.read(self.files.record(rank))
            if state is not None and state.entered_step >= step:
                return state.pid
            time.sleep(0.01)
        raise TimeoutError

    def wait_for(self, state: str, epoch: int) -> None:
        """Until an epoch has entered a state."""
        for _ in range(12_000):
            events = read_json_lines(self.files.events)
            if any(e.get("state") == state and e["epoch"] == epoch for e in events):
                return
            time.sleep(0.01)
        raise TimeoutError

    def faults(self) -> list[tuple[str, int]]:
        """What was at fault, as it was torn down."""
        return [(e["kind"], e["rank"]) for e in self.teardowns()]

    def teardowns(self) -> list[dict]:
        """The events that name what was at fault."""
        return [e for e in read_json_lines(self.files.events) if e.get("state") == "teardown"]

    def steps(self) -> list[list[int]]:
        """What each rank did."""
        texts = [(self.folder / f"{rank}.steps").read_text() for rank in range(HOSTS)]
        return [[int(step) for step in text.split()] for text in texts]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("FORNAX_TEST_RUN", str(tmp_path))
    yield tmp_path
    left = [pid for pid in processes(tmp_path) if pid != os.getpid()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def processes(folder: Path) -> list[int]:
    """Those that were started for a run and are there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"FORNAX_TEST_RUN={folder}".encode() in (entry / "environ").read_bytes()
        except OSError:
            continue
        if mine:
            found.append(int(entry.name))
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_undisturbed_run_makes_every_step_once(folder: Path):
    run = Run(folder, steps=20)
    assert run.code() == 0
    assert run.steps() == [list(range(1, 21))] * HOSTS
    states = [event["state"] for event in read_json_lines(run.files.events)]
    assert states == ["forming", "running", "ended"]
    assert not run.files.records()


@pytest.mark.slow
@pytest.mark.parametrize("spare", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_killed_and_stopped_ranks_are_named_and_the_run_goes_on(folder: Path, spare: bool):
    run = Run(folder, spare=spare)
    at = run.files.run_dir
    code = run.code(
        (10, lambda: drill(at, "kill", 0)),
        (30, lambda: drill(at, "stop", 2)),
    )
    assert code == 0, run.said
    assert run.faults() == [("killed", 0), ("stopped", 2)]
    known = list(dict.fromkeys(float(x) for x in (folder / "mtbf").read_text().split()))
    assert known[0] == 24 * 3600 / HOSTS
    assert [known[0] / each for each in known] == pytest.approx([1, 2, 3], rel=0.05)
    for done in run.steps():
        assert set(done) == set(range(1, 61))
        assert len(done) <= 60 + 2 * 2  # a fault repeats the step it met, at most two
    assert any("was ended by SIGKILL" in line for line in run.said)
    killed, stopped = run.teardowns()
    for named, host in ((killed, 0), (stopped, 2)):
        assert named.keys() >= FACTS
        assert named["host"] == os.uname().nodename
        assert f"rank {host} on {named['host']} (process " in named["why"]
        assert named["step"] >= 9
    told = [e for e in read_json_lines(run.files.events) if "stacks" in e or "no_stack" in e]
    assert [e["rank"] for e in told] == [2]
    if stacks.py_spy():  # of the extra [cluster]
        assert "in main" in stopped["stack"] or "in met" in stopped["stack"]
        assert "in run_worker" in told[0]["stacks"]
    else:
        assert "py-spy, which reads stopped processes, is not installed" in told[0]["why"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "verdict"), [("lock", "frozen"), ("data", "stuck")])
def test_a_hanging_rank_is_named_with_its_stack(folder: Path, kind: str, verdict: str):
    run = Run(folder, steps=40)
    assert run.code((10, lambda: (folder / f"1.fault-{kind}").touch())) == 0, run.said
    assert run.faults() == [(verdict, 1)]
    stacks = "".join(event.get("stacks", "") for event in read_json_lines(run.files.events))
    assert "in told" in stacks
    named = run.teardowns()[0]
    assert "in told" in named["stack"]
    assert named["phase"] == "wait_for_data"
    assert named["step"] >= 10
    assert 1.0 <= named["time"] - named["since"] < 120.0


@pytest.mark.slow
def test_a_dead_agent_is_replaced_with_its_worker(folder: Path):
    run = Run(folder)

    def kill_agent() -> None:
        os.kill(parent(run.pid(1)), signal.SIGKILL)

    assert run.code((10, kill_agent)) == 0, run.said
    assert run.faults() == [("agent", 1)]
    named = run.teardowns()[0]
    assert named.keys() >= FACTS
    assert named["host"] == os.uname().nodename
    assert named["step"] >= 1  # as it was received last
    assert named["phase"] in ("step", "wait_for_data")


@pytest.mark.exhaustive
def test_drills_are_followed_to_their_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As a user has them, without a word on which run; what is over a limit that holds on any
    machine would be said with the verdict's or the steps' own words."""
    monkeypatch.chdir(folder)
    run = Run(folder, steps=100_000, name="runs/four")
    codes: list[int] = []

    def user() -> None:
        codes.append(
            main(
                [
                    "launch",
                    "drill",
                    *["--kill", "0", "--stop", "2", "--lose", "1", "--preempt", "0"],
                ]
            )
        )
        run.controller.stop()

    assert main(["launch", "drill", "--kill", "0"]) == 2
    assert "no run is named, and nothing is launched below runs/" in capsys.readouterr().err
    with run.files.held():
        assert run.code((10, user)) == 143, run.said
    assert codes == [0]
    assert run.faults() == [("killed", 0), ("stopped", 2), ("agent", 1), ("preempted", 0)]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" at step")[0] for line in lines] == [
        *("kill 0", "stop 2", "lose 1", "preempt 0")
    ]
    assert not [line for line in lines if "verdict" in line or "steps later" in line]


@pytest.mark.exhaustive
def test_a_drill_of_a_data_worker_is_followed_before_that_of_a_rank(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    run = Run(folder, steps=100_000, data_workers=2)
    words = ["launch", "drill", str(run.files.run_dir), "--kill", "data:1", "--stop", "2"]
    codes: list[int] = []

    def user() -> None:
        while not all(each.pid for each in read_status(run.files.run_dir).data_workers):
            time.sleep(0.01)
        codes.append(main(words))
        run.controller.stop()

    with run.files.held(), contextlib.closing(run):
        assert run.code((10, user)) == 143, run.said
    assert codes == [0]
    data, rank = capsys.readouterr().out.splitlines()
    assert data.startswith("kill data 1, process ")
    assert "another took its place after" in data
    assert rank.startswith("stop 2 at step ")
    assert run.faults() == [("stopped", 2)]
    events = read_json_lines(run.files.events)
    order = [n for n, e in enumerate(events) if "drill" in e or "another takes" in e.get("why", "")]
    killed, replaced, stopped = (events[n] for n in order)
    assert (killed["drill"], killed["data"]) == ("kill", 1)
    assert replaced["data"] == 1
    assert (stopped["drill"], stopped["rank"]) == ("stop", 2)


@pytest.mark.slow
def test_events_are_followed_while_a_run_goes_on(folder: Path):
    run = Run(folder, steps=100_000)
    code = "import sys; from fornax.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = [code, "launch", "events", str(run.files.run_dir), "--follow"]
    lines: list[str] = []

    def user() -> None:
        with subprocess.Popen([sys.executable, "-c", *words], stdout=-1, text=True) as following:
            assert following.stdout is not None
            for line in following.stdout:
                lines.append(line)
                if "epoch 1  running: " in line:  # it is there, and the run continues
                    drill(run.files.run_dir, "kill", 0)
                if "epoch 2  running: " in line:
                    run.controller.stop()
        codes.append(following.returncode)

    codes: list[int] = []
    with run.files.held():
        follower = threading.Thread(target=user, daemon=True)
        assert run.code((10, follower.start)) == 143, run.said
        follower.join(240)
    assert codes == [0]
    said = [line.split("  ", 1)[1] for line in lines]
    assert said[0].startswith("epoch 1  forming: 3 hosts")
    assert any(line.startswith("epoch 1  drill: kill rank 0") for line in said)
    assert any(line.startswith("epoch 1  teardown: ") for line in said)
    assert said[-1].startswith("epoch 2  ended: exit code 143")


@pytest.mark.slow
def test_others_are_ready_before_hosts_that_are_to_go_are_left(folder: Path):
    run = Run(folder, steps=100_000)
    agents: list[int] = []
    asked: list[float] = []

    def preempt() -> None:
        agents.extend(parent(run.pid(rank)) for rank in range(HOSTS))
        asked.append(time.time())
        for rank in (0, 2):
            drill(run.files.run_dir, "preempt", rank)
        run.wait_for("running", 2)
        agents.extend(parent(run.pid(rank)) for rank in range(HOSTS))
        run.controller.stop()

    assert run.code((10, preempt)) == 143, run.said
    assert {kind for kind, _ in run.faults()} == {"preempted"}
    assert agents[1] == agents[4]
    assert agents[0] != agents[3]
    for done in run.steps():
        assert done == list(range(1, len(done) + 1))  # none again, none left out
    ready = next(n for n, line in enumerate(run.said) if "all finish this step" in line)
    assert any("another is made ready" in line for line in run.said[:ready])
    notices = [e for e in read_json_lines(run.files.events) if "going" in e]
    left = run.teardowns()[0]
    assert {e["going"] for e in notices} == {0, 2}
    for notice in notices:
        assert notice["at_step"] >= 10
        assert {"rank", "host", "phase", "since", "last_line"} <= notice.keys()
        assert asked[0] - 0.1 < notice["since"] <= notice["time"] + 0.1
    assert left["step"] >= notices[0]["at_step"]
    assert left["since"] == pytest.approx(notices[0]["since"], abs=1.0)


@pytest.mark.slow
def test_a_stop_amid_that_waits_until_what_is_in_memory_can_be_saved(folder: Path):
    run = Run(folder, steps=100_000)

    def stop() -> None:
        drill(run.files.run_dir, "preempt", 1)
        while not any("leaves" in event for event in read_json_lines(run.files.events)):
            time.sleep(0.001)
        run.controller.stop()

    assert run.code((10, stop)) == 143, run.said
    states = [e["state"] for e in read_json_lines(run.files.events) if "state" in e]
    assert states[-2:] == ["running", "ended"]
    assert len({done[-1] for done in run.steps()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("aborts", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_one_that_is_cut_off_is_ended_by_its_agent_before_it_is_replaced(
    folder: Path, aborts: bool
):
    """Gloo may abort a worker whose peer ends: it is the one that is cut off that is named."""
    run = Run(folder, steps=1000)
    ended: list[float] = []

    def watch() -> None:
        pid = run.pid(1)
        drill(run.files.run_dir, "partition", 1)
        while alive(pid):
            time.sleep(0.005)
        ended.append(time.time())
        if aborts:
            os.kill(run.pid(0), signal.SIGABRT)
        run.wait_for("running", 2)
        run.controller.stop()

    assert run.code((10, watch)) == 143, run.said
    assert run.faults() == [("partition", 1)]
    named = run.teardowns()[0]
    assert ended[0] < named["time"]
    assert named.keys() >= FACTS
    assert named["step"] >= 1  # as it was received last
    assert named["phase"]
    assert 7.0 < named["time"] - named["since"] < 120.0  # since when nothing was received
    for done in run.steps():
        assert len(done) <= len(set(done)) + 1  # the step that it met
    assert any("nothing was received from it for 7.5 s" in line for line in run.said)


@pytest.mark.exhaustive
def test_a_controller_that_was_held_finds_all_ended_and_goes_on(folder: Path):
    """Their agents could not know whether it had replaced them; they stay, with their memory."""
    code = "import signal, sys; from pathlib import Path; from test_controller import Run\n"
    code += "controller = Run(Path(sys.argv[1]), steps=100_000).controller\n"
    code += "signal.signal(signal.SIGTERM, lambda number, frame: controller.stop())\n"
    code += "controller.run()"
    controller = subprocess.Popen([sys.executable, "-c", code, str(folder)])
    run = Run(folder)
    workers = [run.pid(rank, 10) for rank in range(HOSTS)]
    agents = [parent(pid) for pid in workers]
    controller.send_signal(signal.SIGSTOP)
    for pid in workers:
        while alive(pid):
            time.sleep(0.02)
    controller.send_signal(signal.SIGCONT)
    run.wait_for("running", 2)
    kept = [parent(run.pid(rank)) for rank in range(HOSTS)]
    faults = run.faults()
    controller.send_signal(signal.SIGTERM)
    controller.wait()
    assert kept == agents
    assert [kind for kind, _ in faults] == ["partition"]


LAUNCH = """
import sys
from pathlib import Path
from fornax.cluster import Job, launch
from fornax.config import ClusterError
folder = Path(sys.argv[1])
job = Job(hosts=2, program="ranks:main", words=(str(folder), "100000"))
try:
    code = launch(job, folder / "run", spare=False)
except ClusterError as error:
    sys.exit(str(error))
assert not [name for name in sys.modules if name.partition(".")[0] in ("jax", "numpy")]
sys.exit(code)
"""


def begin(folder: Path) -> subprocess.Popen[str]:
    """A launch of `ranks.py` as a user has it, its controller in a process of its own."""
    words = [sys.executable, "-c", LAUNCH, str(folder)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_nothing_is_left_when_the_launch_is_killed(folder: Path):
    """The kernel ends the controller with it, agents and service with that, and so on."""
    launch = begin(folder)
    Run(folder).pid(1, 10)
    assert len(processes(folder)) >= 2 + 1 + 2 * 2
    launch.kill()
    launch.communicate()
    deadline = time.monotonic() + 120
    while left := processes(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.slow
def test_another_controller_takes_the_place_of_one_that_was_killed(folder: Path):
    """Also of one that was held; what was asked of the run meanwhile is done, a stop too."""
    launch, run = begin(folder), Run(folder)
    first = run.pid(1, 10)
    run.files.ask("hosts", 1)
    controller = run.files.controller_pid()
    assert controller is not None
    os.kill(controller, signal.SIGSTOP)
    os.kill(controller, signal.SIGKILL)
    run.wait_for("running", 2)
    assert not alive(first)
    assert read_status(run.files.run_dir).controller == run.files.controller_pid() != controller
    launch.send_signal(signal.SIGTERM)
    _, said = launch.communicate()
    assert launch.returncode == 143, said
    assert f"the controller (process {controller}) was ended by SIGKILL" in said
    events = [e for e in read_json_lines(run.files.events) if "state" in e]
    assert [(e["kind"], e["rank"]) for e in events if e["state"] == "teardown"] == [
        ("controller", None)
    ]
    assert [e["hosts"] for e in events if "free" in e] == [2, 1]
    assert events[-1]["state"] == "ended"
    assert read_status(run.files.run_dir).controller is None
    done = [int(step) for step in (folder / "0.steps").read_text().split()]
    assert set(done) == set(range(1, done[-1] + 1))


def test_a_controller_that_is_lost_again_and_again_ends_the_launch(folder: Path):
    (folder / "1.fault-never").touch()  # however late it is killed, no step is made
    launch, run = begin(folder), Run(folder)
    for number in range(3):
        while (pid := run.files.controller_pid()) is None:
            assert launch.poll() is None
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        run.wait_for("teardown", number + 1)
    _, said = launch.communicate()
    assert launch.returncode == 1
    assert "failed 3 times without getting beyond the first step" in said
    assert "the controller (process" in said
    assert "controller.log" in said
    assert [e.get("code") for e in read_json_lines(run.files.events)][-1] == 1


@pytest.mark.slow
def test_a_mistake_of_the_user_is_not_tried_again(folder: Path):
    run = Run(folder)
    (folder / "2.fault-user").touch()
    assert run.code() == 2
    assert run.faults() == [("failed", 2)]
    assert any("error: a bad config" in line for line in run.said)


class NoOther(LocalLauncher):
    """Places for the hosts of a run and no more: an agent is started once another has ended."""

    def capacity(self) -> int:
        return HOSTS

    def start(self, ranks: Sequence[int]) -> dict[int, WorkerProcess]:
        agents = [pid for pid in processes(self.files.run_dir.parent) if "agent:run" in words(pid)]
        assert len(agents) + len(ranks) <= HOSTS, agents
        return super().start(ranks)


def words(pid: int) -> str:
    """The command of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", [LocalLauncher, NoOther])
def test_what_fails_without_getting_further_stops_and_is_named(
    folder: Path, launcher: type[LocalLauncher]
):
    """After the second time it is tried by another agent, though no other host is free."""
    run = Run(folder, launcher=launcher)
    with pytest.raises(ClusterError, match=r"failed 3 times.* rank 1 .*exit status 1") as caught:
        run.code((10, lambda: (folder / "1.fault-always").touch()))
    assert run.faults() == [("failed", 1)] * 3
    steps = {e["step"] for e in run.teardowns()}
    agents = [int(pid) for pid in (folder / "1.agents").read_text().split()]
    assert len(agents) == 3
    assert agents[0] == agents[1] != agents[2]  # another host after the second
    text = str(caught.value)
    assert len(steps) == 1
    assert text.startswith(f"step {steps.pop()} failed 3 times, on ")
    assert f"(agent {agents[0]}) and " in text
    assert f"(agent {agents[2]})" in text
    assert str(run.files.log(1)) in text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_all_ranks_at_one_step(folder: Path, number: int, code: int):
    run = Run(folder, steps=100_000)
    assert run.code((10, lambda: run.controller.stop(number))) == code
    assert len({done[-1] for done in run.steps()}) == 1
    assert read_status(run.files.run_dir).state == "ended"


STEPS = 300


@pytest.mark.exhaustive
def test_another_number_of_hosts_goes_on_from_the_step_that_all_saved(folder: Path):
    """Enough steps for the hosts that come to be made ready."""
    run = Run(folder, steps=STEPS, spare=True)
    code = run.code(
        (10, lambda: run.controller.resize(2)),
        (25, lambda: run.wait_for("forming", 2) or run.controller.resize(4)),
        (45, lambda: run.wait_for("running", 3) or drill(run.files.run_dir, "kill", 3)),
    )
    assert code == 0, run.said
    assert run.faults() == [("killed", 3)]
    first, second, third, fourth = (
        [int(step) for step in (folder / f"{rank}.steps").read_text().split()] for rank in range(4)
    )
    for done in (first, second):
        assert set(done) == set(range(1, STEPS + 1))
        assert len(done) <= STEPS + 2  # the killed step again
    saved = fourth[0] - 1
    shrunk = third.index(fourth[0])
    assert third[:shrunk] == list(range(1, shrunk + 1))
    assert shrunk < saved
    later = set(range(saved + 1, STEPS + 1))
    assert set(third[shrunk:]) == later
    assert set(fourth) <= later
    assert len(later - set(fourth)) <= 1  # killed in a step that the others had done
    assert not run.files.records()


def test_a_signal_while_forming_ends_at_once(folder: Path):
    run = Run(folder)
    beside = threading.Timer(0.5, run.controller.stop)
    (folder / "1.fault-data").touch()  # it never enters the first step
    beside.start()
    assert run.code() == 143
    beside.join()
    assert not (folder / "saved").exists()
