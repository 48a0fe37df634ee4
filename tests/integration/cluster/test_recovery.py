"""Real faults in a launched run: who is named, that it continues, and that no number changes."""

import contextlib
import logging
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration.cluster.load import OtherLoad, pace

from fornax.checkpoint import Checkpointer
from fornax.checkpoint.records import read_records, record_path
from fornax.cluster import drill, read_status, storm
from fornax.cluster.storm import STORM
from fornax.config.snapshot_file import FIRST

LARGER: dict[str, Any] = {"batch_size": 24, "seq_len": 128}
SAVED_EACH_STEP = ("--mtbf", "0.01s")

pytestmark = [pytest.mark.fault, pytest.mark.slow]


@pytest.mark.exhaustive
def test_the_survivor_stays_in_its_process_and_no_number_changes(
    launch: Any, undisturbed: list[tuple]
):
    """The third time as the first: nothing of an earlier group is left that breaks the next."""
    run = launch()
    survivor = run.wait_for_step(0, 6)
    replaced = [run.wait_for_step(1, 6)]
    for fault, step in (("kill", 6), ("stop", 10), ("kill", 14)):
        run.wait_for_step(0, step)
        drill(run.run_dir, fault, 1)
        run.wait_for_epoch(len(replaced) + 1)
        replaced.append(run.wait_for_step(1, step))
    assert run.wait_for_step(0, 16) == survivor, run.events()
    assert len(set(replaced)) == 4
    drill(run.run_dir, "kill", 0)
    code, output = run.finish()
    assert code == 0, output
    assert run.faults() == [("killed", 1), ("stopped", 1), ("killed", 1), ("killed", 0)], output
    assert run.exact() == undisturbed
    assert [e["free"] for e in run.events() if e.get("state") == "forming"] == [0, 1, 1, 1, 1]
    assert run.states() == [
        *["forming", "running", "suspect", "teardown"] * 4,
        *["forming", "running", "ended"],
    ]
    assert f"rank 0 on {os.uname().nodename}" in output
    assert "Traceback" not in output
    assert not run.descendants()
    assert not list((run.run_dir / "cluster").glob("*.record"))


SHRINKS = """
import sys
from pathlib import Path
from fornax.cluster import Job
from fornax.cluster.files import ClusterFiles
from fornax.cluster.launch import opened_run
from fornax.cluster.local import LocalEngine, LocalLauncher

hosts, run_dir = int(sys.argv[1]), Path(sys.argv[2])

class Launcher(LocalLauncher):
    def capacity(self):
        return hosts - (run_dir / "lost").exists()

class Engine(LocalEngine):
    def launcher(self, files, *, spare):
        return Launcher(files=files, spare=spare)

words = ("train", "--config", sys.argv[3], "--run-dir", str(run_dir))
job = Job(hosts=hosts, least=hosts - 1, words=words, mtbf=0.01)
files, engine = ClusterFiles(run_dir), Engine(hosts)
announce = lambda line: print(line, flush=True)
with files.held(), opened_run(job, files, engine, spare=True, announce=announce) as controller:
    code = controller.run()
    print(files.log(0).read_text())
sys.exit(code)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("hosts", "mesh"),
    [
        (2, {"data": 1, "fsdp": -1}),
        pytest.param(4, {"data": -1, "fsdp": 1}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_smaller_group_goes_on_from_memory(
    hosts: int, mesh: dict[str, int], launch: Any, undisturbed: list[tuple]
):
    """Nothing is on disk, and no host comes for the one that is lost."""
    run = launch(hosts=hosts, script=SHRINKS, save_every=None, mesh=mesh)
    run.wait_for_step(1, 12)
    (run.run_dir / "lost").touch()
    drill(run.run_dir, "lose", 1)
    code, output = run.finish()
    assert code == 0, output
    started = [e["step"] for e in run.events() if e.get("state") == "running" and "step" in e]
    formed = [e["hosts"] for e in run.events() if e.get("state") == "forming" and "hosts" in e]
    assert formed == [hosts, hosts - 1], output
    assert started[1] > 0, output  # which one depends on how soon replicas are whole
    assert "of 24, in memory" in output
    for found, wanted in zip(run.exact(), undisturbed, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
    assert [x[4] for x in run.exact()] == [x[4] for x in undisturbed]  # tokens
    assert not (run.run_dir / "cluster" / "snapshots").exists()
    assert not run.descendants()


@pytest.mark.exhaustive
def test_memory_is_enough_for_a_second_death_while_the_group_forms(
    launch: Any, undisturbed: list[tuple]
):
    """Nothing is saved to disk: every step is in the agents' memory, which outlives the ranks."""
    run = launch(flags=SAVED_EACH_STEP, save_every=None)
    run.wait_for_step(1, 12)
    drill(run.run_dir, "kill", 0)
    run.wait_for_event(lambda e: e.get("state") == "forming" and e["epoch"] == 2)
    run.wait_for_worker(1, 2)
    drill(run.run_dir, "kill", 1)
    code, output = run.finish()
    assert code == 0, output
    assert run.faults()[0] == ("killed", 0), output
    assert ("killed", 1) in run.faults()
    assert run.exact() == undisturbed
    started = [e["step"] for e in run.events() if e.get("state") == "running" and "step" in e]
    assert started[-1] >= 7, output  # four steps at most wait for the replica of one before
    assert "of 24, in memory" in output
    assert not run.descendants()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("hosts", "deaths"),
    [
        (2, ["running"]),
        pytest.param(4, ["running"], marks=pytest.mark.exhaustive),
        pytest.param(2, ["running", "running"], marks=pytest.mark.exhaustive),
        pytest.param(2, ["running", "forming"], marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_run_goes_on_from_memory_when_its_controller_is_killed(
    hosts: int, deaths: list[str], launch: Any, undisturbed: list[tuple]
):
    """Nothing is on disk; agents and workers end with it, and what is in memory does not."""
    run = launch(hosts=hosts, flags=SAVED_EACH_STEP, save_every=None)
    for number, state in enumerate(deaths):
        if state == "running":
            run.wait_for_step(1, 12 + 4 * number)
        else:
            run.wait_for_worker(1, number + 1)
        at = time.time()
        pid = drill(run.run_dir, "controller")
        run.wait_for_event(lambda e, at=at: e.get("kind") == "controller" and e["time"] >= at)
        assert f"the controller (process {pid}) was ended by SIGKILL" in run.output()
        run.wait_for_event(
            lambda e, number=number: e.get("kept") and e["epoch"] == number + 2,
        )
    code, output = run.finish()
    assert code == 0, output
    assert run.faults() == [("controller", None)] * len(deaths), output
    if hosts == 2:
        assert run.exact() == undisturbed
    else:
        for found, wanted in zip(run.exact(), undisturbed, strict=True):
            assert found == pytest.approx(wanted, rel=1e-4)
    started = [e["step"] for e in run.events() if e.get("state") == "running" and "step" in e]
    assert started[-1] >= 7, output  # four steps at most wait for the replica of one before
    kept = [e for e in run.events() if "kept" in e]
    assert {e["rank"] for e in kept} == set(range(hosts))
    assert started[-1] - 1 in kept[-1]["kept"]
    assert "of 24, in memory" in output
    assert not run.descendants()
    assert not list((run.run_dir / "cluster").glob("*.record"))


@pytest.mark.exhaustive
def test_a_host_that_is_taken_away_with_notice_loses_no_step(launch: Any, undisturbed: list[tuple]):
    """Nothing is on disk: the new agent has the step from the memory of the one that goes."""
    run = launch(save_every=None, steps=2000)
    survivor = run.wait_for_step(1, 20)
    drill(run.run_dir, "preempt", 0)
    run.wait_for_event(lambda e: e.get("state") == "teardown")
    done = max(step for step, *_ in run.exact())
    run.wait_for_epoch(2)
    assert run.wait_for_step(1, done + 1) == survivor
    assert not Checkpointer(run.run_dir / "checkpoints").all_steps()
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 130, output
    assert run.faults() == [("preempted", 0)]
    restarted = [e["step"] for e in run.events() if e.get("state") == "running" and "step" in e]
    steps = [step for step, *_ in run.exact()]
    assert steps == list(range(1, len(steps) + 1))
    at = next(e["step"] for e in run.events() if e.get("drill") == "preempt")
    assert len(restarted) == 2
    assert at < restarted[1] <= done + 1  # the step that was worked on is done, and kept
    (fetched,) = [e for e in run.events() if "fetched" in e]
    assert fetched["rank"] == 0
    assert max(fetched["fetched"]) == restarted[1] - 1
    assert "in memory" in output
    # The numbers are those of a longer schedule, the learning rate is; the data is the same.
    found = [x[4] for x in run.exact()[:24]]
    assert len(found) > at
    assert found == [x[4] for x in undisturbed[: len(found)]]
    assert not run.descendants()


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["evict", "report"])
def test_a_slow_rank_is_named_and_replaced_where_that_is_the_policy(launch: Any, policy: str):
    """No code of the worker's is slow: the process is stopped for three quarters of the time."""
    run = launch(hosts=3, flags=("--slow", policy), save_every=None, steps=100_000, **LARGER)
    run.wait_for_step(2, 20)
    slow = run.wait_for_step(1, 20)
    assert not [e for e in run.events() if e.get("slow") is not None]
    assert drill(run.run_dir, "slow", 1) == slow
    named = next(e for e in run.events() if e.get("slow") is not None)
    at = next(e["step"] for e in run.events() if e.get("drill") == "slow")
    assert named["slow"] == 1
    assert named["own_seconds"] - named["others_seconds"] > named["step_seconds"] / 3
    assert (named["rank"], named["host"]) == (1, os.uname().nodename)
    assert named["phase"]
    assert abs(named["since"] - named["time"]) < 30
    assert "loop.py" in named.get("stacks", "loop.py")  # held at that moment, it may show none
    assert "stack" in named or "shows no stack" in named["no_stack"]
    if policy == "evict":
        run.wait_for_epoch(2)
        assert run.faults() == [("slow", 1)]
        assert run.wait_for_step(1, at + 20) != slow
    else:
        status = read_status(run.run_dir)
        assert [r.rank for r in status.ranks if r.slow > 0] == [1]
        run.wait_for_event(lambda e: "slow" in e and e["slow"] is None)
        assert not run.faults()
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 130, output
    steps = [step for step, *_ in run.exact()]
    assert steps == list(range(1, len(steps) + 1))
    assert "rank 1 is slow: it holds each step up by" in output


@pytest.mark.exhaustive
def test_the_state_of_a_host_that_is_lost_comes_from_the_memory_of_another(
    launch: Any, undisturbed: list[tuple]
):
    """The agent is killed, and with it worker and memory; nothing is on disk."""
    run = launch(flags=SAVED_EACH_STEP, save_every=None)
    survivor = run.wait_for_step(0, 12)
    drill(run.run_dir, "lose", 1)
    run.wait_for_epoch(2)
    assert run.wait_for_step(0, 18) == survivor  # a few steps, for the new host to hold a replica
    drill(run.run_dir, "lose", 0)
    code, output = run.finish()
    assert code == 0, output
    assert run.faults() == [("agent", 1), ("agent", 0)], output
    assert run.exact() == undisturbed
    fetched = [(e["rank"], e["fetched"]) for e in run.events() if "fetched" in e]
    assert [rank for rank, _ in fetched] == [1, 0]
    started = [e["step"] for e in run.events() if e.get("state") == "running" and "step" in e]
    for (_, steps), step in zip(fetched, started[1:], strict=True):
        assert step - 1 in steps, output
    assert started[1] > 2, output  # without memory it would be 1: nothing is on disk
    assert not run.descendants()


@pytest.mark.exhaustive
def test_when_a_host_and_its_replica_are_lost_the_newest_checkpoint_is_taken(
    launch: Any, undisturbed: list[tuple]
):
    run = launch(flags=SAVED_EACH_STEP, save_every=5)
    run.wait_for_step(0, 13)
    drill(run.run_dir, "lose", 0)
    drill(run.run_dir, "lose", 1)
    code, output = run.finish()
    assert code == 0, output
    assert run.exact() == undisturbed
    assert not [e for e in run.events() if "fetched" in e]
    started = [e["step"] for e in run.events() if e.get("state") == "running" and "step" in e]
    assert started[1] in (6, 11), output
    assert "in memory" not in output
    assert not run.descendants()


def on_disk(directory: Path, host: int, rank: int) -> set[int]:
    """The steps of a rank's snapshots on a host's disk."""
    return {int(path.name.partition("-")[2]) for path in directory.glob(f"*/host-{host}/{rank}-*")}


def complete(directory: Path) -> set[int]:
    """The steps of which each rank's snapshot is on some host's disk."""
    return set.intersection(
        *({step for host in (0, 1) for step in on_disk(directory, host, rank)} for rank in (0, 1))
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "lost",
    [
        "nothing",
        pytest.param("a disk", marks=pytest.mark.exhaustive),
        pytest.param("all disks", marks=pytest.mark.exhaustive),
        pytest.param("a bit", marks=pytest.mark.exhaustive),
        pytest.param("the run directory", marks=pytest.mark.exhaustive),
        pytest.param("Ray", marks=pytest.mark.exhaustive),
    ],
)
def test_a_launch_that_is_killed_goes_on_from_the_disks_of_its_hosts(
    launch: Any, undisturbed: list[tuple], tmp_path: Path, lost: str
):
    """All processes at once, and with them all memory; on disk are later steps than in the newest
    checkpoint, of which each host has the other's too."""
    disk = tmp_path / "disk"
    flags = ("--no-spares", "--local-checkpoints", str(disk), *SAVED_EACH_STEP)
    if lost == "Ray":
        pytest.importorskip("ray")
        flags += ("--engine", "ray")
    run = launch(flags=flags, save_every=10)
    run.wait_for_step(1, 3)
    started = run.descendants()
    places = [(host, rank) for host in (0, 1) for rank in (0, 1)]
    deadline = time.monotonic() + 240
    while max(set.intersection(*(found := [on_disk(disk, *at) for at in places])), default=0) < 12:
        assert time.monotonic() < deadline, found
        time.sleep(0.005)
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    run.process.wait()
    saved = Checkpointer(run.run_dir / "checkpoints").all_steps()[-1]
    (own,) = disk.iterdir()
    newest = max(complete(disk))
    assert newest > saved
    damaged = []
    if lost == "a disk":
        shutil.rmtree(own / "host-1")
    elif lost == "all disks":
        shutil.rmtree(disk)
    elif lost == "a bit":
        for path in own.glob(f"host-*/1-{newest}"):
            whole = bytearray(path.read_bytes())
            whole[FIRST + 70_000] ^= 1
            path.write_bytes(whole)
            damaged.append(path)
    elif lost == "the run directory":
        shutil.rmtree(run.run_dir)
        saved = 0
    left = complete(disk) - ({newest} if damaged else set()) if saved else set()
    expected, tier = max((step, "local disk") for step in left) if left else (saved, "checkpoint")
    assert (tier == "local disk") == (lost in ("nothing", "a disk", "a bit", "Ray"))
    again = launch(flags=flags, save_every=10)
    code, output = again.finish()
    assert code == 0, output
    assert again.exact() == undisturbed
    restored = [(e["step"], e["restored"]) for e in again.events() if "restored" in e]
    assert restored == ([(expected, tier)] if expected else []), output
    named = [e["why"] for e in again.events() if " is damaged, and is not used" in e.get("why", "")]
    assert {str(path) for path in damaged} <= {each.split()[2] for each in named}
    if lost == "nothing":
        assert f"the run is at step {expected} of 24, on local disk" in output
        said = f"resumes after step {expected}, from local disk"
        assert said in read_status(again.run_dir).restored
        assert {e["rank"] for e in again.events() if expected in e.get("on_disk", [])} == {0, 1}
        assert not list(disk.iterdir())  # of a run that is done nobody needs them
    assert not again.descendants()


def test_a_death_while_saving_and_that_of_the_coordination_service(
    launch: Any, undisturbed: list[tuple]
):
    """The step that was being saved is not complete and never becomes so by half."""
    run = launch(save_every=3)
    saving = stop_while_saving(run, rank=1)
    drill(run.run_dir, "kill", 1)
    run.wait_for_epoch(2)
    run.wait_for_step(1, saving + 2)
    for pid in run.descendants():
        with contextlib.suppress(OSError):
            if b"coordination:serve" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    code, output = run.finish()
    assert code == 0, output
    assert run.faults() == [("killed", 1), ("service", 0)], output
    assert run.exact() == undisturbed
    started = [e["step"] for e in run.events() if e.get("state") == "running" and "step" in e]
    assert started[1] != saving + 1, output
    assert len(started) == 3
    assert Checkpointer(run.run_dir / "checkpoints").all_steps()[-1] == 24
    assert not run.descendants()


def stop_while_saving(run: Any, rank: int) -> int:
    """Hold a rank whose part of a checkpoint is not whole yet; the step that is saved."""
    pid, root = run.wait_for_step(rank, 1), run.run_dir / "checkpoints"
    while True:
        names = {path.name.partition(".")[0] for path in root.glob("*")}
        steps = sorted(int(name) for name in names if name.isdecimal())
        if steps and not record_path(root / str(steps[-1]), rank).exists():
            os.kill(pid, signal.SIGSTOP)
            if not record_path(root / str(steps[-1]), rank).exists():
                return steps[-1]
            os.kill(pid, signal.SIGCONT)
        assert run.process.poll() is None
        time.sleep(0.001)


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [6, 50])
def test_random_faults_change_no_number(launch: Any, count: int):
    """Four hosts; every number of every step is that of a run without any, each step is done once,
    and both end at the same position in the data.

    Each fault is within its limits. Those in seconds are of a machine that does nothing else: what
    other programs took of it while the fault was got over is measured, and so is how fast it runs
    Python; they are so many times as long.
    """
    steps = 400 + 20 * count
    settings: dict[str, Any] = {"steps": steps, "save_every": 50, **LARGER}
    run = launch("stormy", hosts=4, flags=SAVED_EACH_STEP, **settings)
    run.wait_for_step(0, 2)
    outcomes, slower = [], pace()
    with OtherLoad(run.descendants) as load:
        for each in storm(run.run_dir, count, seed=15):
            slowdown = slower * load.slowdown(each.stepped)
            logging.getLogger(__name__).info("%s; %.2f times as slow", each, slowdown)
            assert not each.over, each
            assert not each.late(slowdown), (each, slowdown)
            outcomes.append(each)
    code, output = run.finish(1800)
    assert code == 0, output
    replaced = [(each.verdict, each.rank) for each in outcomes if each.fault != "slow"]
    assert run.faults() == replaced
    assert count < 50 or {each.fault for each in outcomes} == set(STORM)
    calm = launch("calm", hosts=4, flags=("--no-spares",), **settings)
    code, output = calm.finish(1800)
    assert code == 0, output
    assert run.exact() == calm.exact()
    assert [step for step, *_ in run.exact()] == list(range(1, steps + 1))
    assert positions(run.run_dir, steps) == positions(calm.run_dir, steps)
    assert not run.descendants()


def positions(run_dir: Path, step: int) -> dict[int, Any]:
    """Where each virtual shard is in its records, as a checkpoint has it."""
    records = read_records(run_dir / "checkpoints" / str(step))
    return {shard: at for record in records for shard, at in record.data.items()}
