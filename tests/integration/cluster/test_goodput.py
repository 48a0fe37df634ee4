"""Where the time of a real launch with faults went, and what the simulator makes of its figures."""

import itertools
import json
from typing import Any

import pytest

from fornax.cli.main import main
from fornax.cluster import drill, read_status
from fornax.config.goodput import attribute

pytestmark = [pytest.mark.fault, pytest.mark.slow]


def test_every_second_of_a_launch_has_one_cause(launch: Any, capsys: pytest.CaptureFixture[str]):
    run = launch(flags=("--mtbf", "1s"), steps=90)
    for fault, rank, step in (("kill", 1, 20), ("stop", 0, 40), ("preempt", 1, 60)):
        run.wait_for_step(0, step)
        drill(run.run_dir, fault, rank)
        run.wait_for_event(
            lambda e, n=step // 20 + 1: e["epoch"] == n and e.get("state") == "running"
        )
    code, output = run.finish()
    assert code == 0, output
    account, goodput = attribute(run.run_dir), read_status(run.run_dir).goodput
    assert goodput is not None
    events = [e for e in run.events() if "state" in e]
    elapsed = events[-1]["time"] - events[0]["time"]
    assert all(a.end == b.begin for a, b in itertools.pairwise(account.spans))
    assert goodput.wall_seconds == pytest.approx(elapsed, abs=0.002)
    assert goodput.down_seconds == pytest.approx(0, abs=0.002)
    assert [(f.drill, f.kind, f.rank) for f in account.faults] == [
        ("kill", "killed", 1),
        ("stop", "stopped", 0),
        ("preempt", "preempted", 1),
    ]
    assert account.steps == 90
    known = [*account.faults, None]
    for fault, following in itertools.pairwise(known):
        assert fault is not None
        assert fault.began <= fault.named < fault.formed
        until = following.began if following else account.spans[-1].end
        after = {s.cause for s in account.spans if fault.named <= s.begin < until}
        assert {"recovery", "compile", "restore", "step"} <= after
        assert "initialise" not in after  # of a group that forms anew it is recovery
    by_cause = goodput.seconds
    assert by_cause["detection"] >= 1.0  # a stop counts after a second
    assert by_cause["lost"] > 0
    assert by_cause["snapshot"] > 0
    assert main(["launch", "status", str(run.run_dir), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["goodput"]
    assert sum(said["seconds"].values()) == pytest.approx(said["wall_seconds"])
    assert said["share"] == by_cause["step"] / goodput.wall_seconds
    ranks = sorted(p.name for p in (run.run_dir / "cluster").glob("*.goodput.jsonl"))
    assert ranks == ["rank-1.goodput.jsonl"]
