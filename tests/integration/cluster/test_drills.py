"""Faults of many kinds, one after the other, in one launched run of four processes, which is
compared with one that nothing disturbed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fornax.checkpoint import Checkpointer
from fornax.checkpoint.records import read_records
from fornax.cluster import drill
from fornax.cluster.drill import Fault
from fornax.cluster.files import ClusterFiles
from fornax.cluster.storm import follow

pytestmark = [pytest.mark.fault, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
PROXIED = """
import signal
import sys
from pathlib import Path
from fornax.cluster import Job, Limits
from fornax.cluster.files import ClusterFiles
from fornax.cluster.launch import opened_run
from fornax.cluster.local import LocalEngine
from tests.integration.cluster.tcp_proxy import ProxiedLauncher

class Engine(LocalEngine):
    def launcher(self, files, *, spare):
        return ProxiedLauncher(files=files, spare=spare)

hosts, run_dir, config = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
words = ("train", "--config", config, "--run-dir", str(run_dir))
job = Job(hosts=hosts, program="_drills:train", words=words, limits=Limits(lease=6.0), mtbf=0.01)
files, engine = ClusterFiles(run_dir), Engine(hosts)
announce = lambda line: print(line, flush=True)
with files.held(), opened_run(job, files, engine, spare=True, announce=announce) as controller:
    signal.signal(signal.SIGINT, lambda number, frame: controller.stop(number))
    sys.exit(controller.run())
"""
"""Ranks that hang when told, one of them behind TCP proxies, and a snapshot of nearly each step."""


@pytest.fixture
def drilled(launch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start such a run."""
    folders = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.syspath_prepend(folders[1])

    def begin(hosts: int, **changes: Any) -> Any:
        env = {"PYTHONPATH": os.pathsep.join(folders)}
        return launch("drilled", hosts=hosts, script=PROXIED, env=env, **changes)

    return begin


def cut_off(run: Any) -> int:
    """Cut rank 1's host off from all others and from the controller; its worker."""
    links = set((run.run_dir / "links").read_text().split())
    assert links == {"coordination", "collectives", "snapshots"}
    worker = run.wait_for_step(1, 0)
    (run.run_dir / "cut").touch()
    drill(run.run_dir, "partition", 1)
    return worker


def hang(run: Any, rank: int, what: str) -> None:
    """Have a rank hang for ever, in its code or in a call that holds Python's lock."""
    import _drills

    _drills.make_hang(ClusterFiles(run.run_dir), rank, what)


def wait_for_steps(run: Any, count: int) -> None:
    """Until all ranks have made so many steps more."""
    ranks = sorted(ClusterFiles(run.run_dir).records())
    begun = len(run.exact())
    for rank in ranks:
        run.wait_for_step(rank, begun + count)


def wait_until_over(run: Any, faults: int) -> None:
    """Until so many faults have been torn down, and the group after the last makes steps."""
    deadline = time.monotonic() + 300
    while True:
        states = [e["state"] for e in run.events() if "state" in e]
        if states.count("teardown") >= faults:
            later = states[len(states) - states[::-1].index("teardown") :]
            if "running" in later:
                return
        assert run.process.poll() is None, run.output()
        assert time.monotonic() < deadline, run.events()
        time.sleep(0.02)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that compute all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def stopped(run: Any) -> None:
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 130, output
    assert not run.descendants()


FOLLOWED: tuple[tuple[Fault, int, str], ...] = (
    ("kill", 2, "killed"),
    ("kill", 0, "killed"),
    ("stop", 3, "stopped"),
    ("lose", 1, "agent"),
    ("preempt", 2, "preempted"),
)


ENDLESS: dict[str, Any] = {"steps": 100_000, "save_every": None}


def test_faults_of_many_kinds_change_no_number(launch: Any, drilled: Any):
    """A partition, kills, rank 0's among them, a stop, a lost host, a notice, a call that holds
    Python's lock, and a second death while the group forms. Nothing is on disk."""
    run = drilled(4, **ENDLESS)
    run.wait_for_step(1, 8)
    cut_off(run)
    wait_until_over(run, 1)
    for fault, rank, verdict in FOLLOWED:
        wait_for_steps(run, 5)
        seen = follow(run.run_dir, fault, rank)
        assert not seen.over, seen
        assert run.faults()[-1] == (verdict, rank)
    wait_for_steps(run, 5)
    with busy(2):
        known = len(run.faults())
        wait_for_steps(run, 20)
        assert len(run.faults()) == known, run.output()
    hang(run, 3, "lock")
    wait_until_over(run, 7)
    wait_for_steps(run, 5)
    drill(run.run_dir, "kill", 1)
    epoch = run.events()[-1]["epoch"] + 1
    run.wait_for_event(lambda e: e.get("state") == "forming" and e["epoch"] == epoch)
    run.wait_for_worker(0, epoch)
    drill(run.run_dir, "kill", 0)
    wait_until_over(run, 9)
    wait_for_steps(run, 5)
    stopped(run)
    wanted = [("partition", 1), *((verdict, rank) for _, rank, verdict in FOLLOWED)]
    wanted += [("frozen", 3), ("killed", 1), ("killed", 0)]
    assert run.faults() == wanted, run.output()
    assert_as_undisturbed(run, launch, 4)


def assert_as_undisturbed(run: Any, launch: Any, hosts: int) -> None:
    """Every number of every step is that of a run that nothing disturbs."""
    calm = launch("calm", hosts=hosts, flags=("--no-spares",), **ENDLESS)
    made = run.exact()
    calm.wait_for_step(0, len(made) + 2)
    stopped(calm)
    assert [step for step, *_ in made] == list(range(1, len(made) + 1))
    assert made == calm.exact()[: len(made)]


@pytest.mark.exhaustive
def test_data_that_never_comes_and_two_deaths_soon_after_each_other(launch: Any, drilled: Any):
    """The second death is as soon as the group makes steps after the first."""
    run = drilled(2, **ENDLESS)
    run.wait_for_step(1, 8)
    hang(run, 1, "data")
    wait_until_over(run, 1)
    wait_for_steps(run, 5)
    drill(run.run_dir, "kill", 0)
    wait_until_over(run, 2)
    drill(run.run_dir, "kill", 1)
    wait_until_over(run, 3)
    wait_for_steps(run, 5)
    stopped(run)
    assert run.faults() == [("stuck", 1), ("killed", 0), ("killed", 1)], run.output()
    stacks = "".join(event.get("stacks", "") for event in run.events())
    assert "in hang" in stacks
    assert_as_undisturbed(run, launch, 2)


@pytest.mark.exhaustive
def test_a_host_that_is_cut_off_saves_nothing_once_others_took_over(
    drilled: Any, undisturbed: list[tuple]
):
    """Its agent ends it before it is replaced, and what is on disk says which group saved it."""
    run = drilled(2, save_every=1, checkpoint={"keep_last": 100})
    run.wait_for_step(1, 8)
    ended = wait_for_end(cut_off(run))
    code, output = run.finish()
    assert code == 0, output
    assert run.faults() == [("partition", 1)], output
    assert ended < next(e["time"] for e in run.events() if e.get("state") == "teardown")
    assert run.exact() == undisturbed
    records = [read_records(path) for path in step_folders(run.run_dir)]
    for each in (record for step in records for record in step):
        assert each.epoch == 2 or each.saved_at < ended
    assert {each.epoch for step in records for each in step} == {1, 2}
    assert not run.descendants()


def wait_for_end(pid: int) -> float:
    """Until a process has ended; when that was."""
    with contextlib.suppress(OSError):
        while Path(f"/proc/{pid}/maps").read_text():  # a zombie has none
            time.sleep(0.005)
    return time.time()


def step_folders(run_dir: Path) -> list[Path]:
    """Of the complete checkpoints."""
    steps = Checkpointer(run_dir / "checkpoints").all_steps()
    return [run_dir / "checkpoints" / str(step) for step in steps]
