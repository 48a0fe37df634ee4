"""A launched run on a real file system that is full: it trains on, and says what is not saved."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fornax.checkpoint import Checkpointer

pytestmark = [pytest.mark.fault, pytest.mark.slow]


INSIDE = "FORNAX_TEST_NAMESPACE"
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.fixture
def run_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path | None]:
    """The run's directory, on a disk of 40 MB. Who may not mount one may in a namespace of their
    own, in which the test is then run: None."""
    path = tmp_path / "run"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if not mounted.returncode:
        yield path
        subprocess.run(["umount", "--lazy", str(path)], check=True)
        return
    assert INSIDE not in os.environ, mounted.stderr
    test = str(request.config.rootpath / request.node.nodeid)
    ended = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", test],
        env={**os.environ, INSIDE: "1"},
        cwd=request.config.rootpath,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert not ended.returncode, ended.stdout
    assert "1 passed" in ended.stdout
    yield None


def fill(filler: Path, leave: int) -> None:
    with filler.open("ab", buffering=0) as file:
        while (free := shutil.disk_usage(filler.parent).free) > leave:
            file.write(bytes(min(free - leave, 1 << 20)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("freed", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_full_disk_costs_checkpoints_and_nothing_else(
    launch: Any, run_dir: Path | None, freed: bool
):
    if run_dir is None:
        return
    run = launch(save_every=20, steps=100_000)
    run.wait_for_step(1, 45)
    filler = run_dir / "filler"
    fill(filler, leave=200_000)  # a checkpoint takes 480 kB, the lines of a step 400 bytes
    run.wait_for_event(lambda e: "unsaved" in e)
    told = next(e for e in run.events() if "unsaved" in e)
    at = told["unsaved"]
    assert told["rank"] in (0, 1)
    assert told["host"] == os.uname().nodename
    assert told["at_step"] >= at
    assert {"phase", "since", "last_line"} <= told.keys()
    assert f"rank {told['rank']} on {told['host']}" in told["why"]
    if freed:
        fill(filler, leave=0)  # now lines have no room either, and wait in memory
    run.wait_for_step(1, at + 50)
    saved = Checkpointer(run_dir / "checkpoints").all_steps()
    assert saved
    assert max(saved) < at
    if freed:
        filler.unlink()
        run.wait_for_step(1, at + 100)
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    steps = [step for step, *_ in run.exact()]
    assert steps == list(range(1, len(steps) + 1)), output
    assert not run.descendants()
    assert "no space left on the disk" in output
    assert "Training continues; the next save tries again" in output
    now = Checkpointer(run_dir / "checkpoints").all_steps()
    if freed:
        assert code == 130, output
        assert now[-1] == steps[-1]
        assert not run.faults()
    else:
        assert code == 2, output
        assert now == saved  # whole and restorable
        assert f"the run is at step {steps[-1]} of 100000, and that is not saved" in output
        assert run.faults() == [("failed", 0)] or run.faults() == [("failed", 1)]
        assert "not saved" in next(e for e in run.events() if "last_line" in e)["last_line"]


@pytest.mark.exhaustive
def test_a_full_local_disk_costs_copies_and_nothing_else(launch: Any, run_dir: Path | None):
    """Each host says once that it is full, and once that copies continue."""
    if run_dir is None:
        return
    flags = ("--local-checkpoints", str(run_dir / "local"), "--mtbf", "0.01s")
    run = launch(flags=flags, save_every=None, steps=100_000)

    def said(rank: int) -> list[bool]:
        events = [e for e in run.events() if "local_checkpoints" in e and e["rank"] == rank]
        return [e["local_checkpoints"] for e in events]

    step, filler = 10, run_dir / "filler"
    run.wait_for_step(1, step)
    for rank in (0, 1):
        while not list(run_dir.glob(f"local/*/host-{rank}/{rank}-*")):
            run.wait_for_step(1, step := step + 1)
    full = 0
    while full < 3:  # what a copy that had begun gives back is filled too
        fill(filler, leave=100_000)
        run.wait_for_step(1, step := step + 10)
        full = full + 1 if all(said(rank)[-1:] == [False] for rank in (0, 1)) else 0
        assert step < 2000, run.events()
    before = {path.name for path in run_dir.glob("local/*/*/*")}
    run.wait_for_step(1, step := step + 20)
    assert {path.name for path in run_dir.glob("local/*/*/*")} == before
    filler.unlink()
    while not all(said(rank)[-1:] == [True] for rank in (0, 1)):
        run.wait_for_step(1, step := step + 1)
    run.wait_for_step(1, step := step + 20)
    assert {path.name for path in run_dir.glob("local/*/*/*")} != before
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 130, output
    assert not run.faults()
    for rank in (0, 1):
        assert all(a != b for a, b in pairwise([True, *said(rank)]))
    assert "have no room or fail: it has less than" in output
    steps = [step for step, *_ in run.exact()]
    assert steps == list(range(1, len(steps) + 1)), output
    assert not run.descendants()
