"""Where the time of a real launch with faults went, and what the simulator makes of its figures."""

import itertools
import json
import logging
import random
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fornax.cli.main import main
from fornax.cluster import drill, read_status
from fornax.config.goodput import Account, attribute
from fornax.plan.goodput import RunSpec, measure
from fornax.plan.goodput.inputs import Policy
from fornax.plan.goodput.simulate import Failure, simulate

pytestmark = [pytest.mark.fault, pytest.mark.slow]


@pytest.mark.exhaustive
def test_every_second_of_a_launch_has_one_cause(launch: Any, capsys: pytest.CaptureFixture[str]):
    run = launch(flags=("--mtbf", "1s"), steps=100_000, save_every=None)
    for fault, rank, step in (("kill", 1, 20), ("stop", 0, 40), ("preempt", 1, 60)):
        run.wait_for_step(0, step)
        drill(run.run_dir, fault, rank)
        run.wait_for_event(
            lambda e, n=step // 20 + 1: e["epoch"] == n and e.get("state") == "running"
        )
    began = [e["step"] for e in run.events() if e.get("state") == "running" and "step" in e][-1]
    run.wait_for_step(0, began + 10)
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 130, output
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
    assert account.steps == len(run.exact())
    known = [*account.faults, None]
    for fault, following in itertools.pairwise(known):
        assert fault is not None
        assert fault.began <= fault.named < fault.formed
        until = following.began if following else account.spans[-1].end
        after = {s.cause for s in account.spans if fault.named <= s.begin < until}
        assert {"recovery", "compile", "restore", "step"} <= after
        assert "initialise" not in after  # of a group that forms again it is recovery
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


KILLS = 5
DOWN = ("detection", "recovery", "waiting", "initialise", "restore", "compile")


@pytest.mark.exhaustive
def test_a_launch_with_random_kills_comes_to_what_is_simulated(launch: Any):
    """What the run's own record says of a step, a snapshot, detection, recovery and compilation
    goes in, and how long it trained before each kill. How far each was from a snapshot is chance:
    the mean over shifts of each by up to a snapshot's interval is compared, and its spread is the
    standard error of what one run comes to."""
    rng = random.Random(15)
    run = launch(flags=("--mtbf", "10min"), steps=100_000, save_every=None)
    for number in range(KILLS + 1):
        run.wait_for_epoch(number + 1)
        began = [e["step"] for e in run.events() if e.get("state") == "running" and "step" in e][-1]
        for rank in range(2):
            run.wait_for_step(rank, began + 10)
        time.sleep(rng.uniform(5, 40))
        if number < KILLS:
            drill(run.run_dir, "kill", rng.randrange(2))
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 130, output
    measured, mean, error = compared(run.run_dir, rng)
    said = f"measured {measured:.4f}, simulated {mean:.4f}, standard error {error:.4f}"
    logging.getLogger(__name__).info(said)
    assert error < 0.05 * mean, said  # or the comparison would say nothing
    assert mean < 0.95, said  # the kills cost something
    assert measured == pytest.approx(mean, rel=0.1)


def compared(run_dir: Path, rng: random.Random) -> tuple[float, float, float]:
    """Goodput of a run from its first step on, that of the simulator, and its standard error."""
    account, found = attribute(run_dir), measure(run_dir)
    assert found.faults == KILLS
    assert found.copy is not None
    assert found.interval is not None
    assert found.detection is not None
    assert found.recovery is not None
    begin, end = training(account)
    horizon = end - begin
    kept = sum(s.seconds for s in account.spans if s.cause == "step" and s.begin >= begin)
    spec = RunSpec(
        hosts=found.hosts,
        step=found.step,
        state=found.state,
        rates={},
        memory_rate=found.state / found.hosts / found.copy,
        peer_rate=1e12,
        disk_rate=1e12,
        store_rate=1e12,
        detection=found.detection,
        recovery=found.recovery,
        compile=found.compile or 0.0,
        repair=0.0,
        slice_hosts=1,
    )
    policy = Policy(steps=max(1, round(found.interval)), every={"memory": 1}, spares=0)
    lasted = uptimes(account, begin, end)
    goodputs = [simulated(spec, policy, lasted, rng) for _ in range(400)]
    return kept / horizon, statistics.mean(goodputs), statistics.stdev(goodputs)


def training(account: Account) -> tuple[float, float]:
    """From the first step after the program was compiled to the end of the last."""
    first = account.faults[0].began
    compiled = max(s.end for s in account.spans if s.cause == "compile" and s.end <= first)
    return compiled, max(span.end for span in account.spans if span.cause == "step")


def uptimes(account: Account, begin: float, end: float) -> list[float]:
    """How long the run trained before each fault, and after the last."""
    found, since = [], begin
    for fault, following in itertools.pairwise([*account.faults, None]):
        assert fault is not None
        until = following.began if following else end
        after = [s for s in account.spans if fault.began <= s.begin < until]
        found.append(fault.began - since)
        since = max(span.end for span in after if span.cause in DOWN)
    return [*found, end - since]


def simulated(spec: RunSpec, policy: Policy, lasted: Sequence[float], rng: random.Random) -> float:
    """Goodput with failures after as long a training, up to a snapshot's interval more or less."""
    most = policy.steps * spec.step
    down = spec.detection + spec.recovery + spec.copy_seconds + spec.compile
    now, failures = 0.0, []
    for seconds in lasted[:-1]:
        now += max(0.0, seconds + rng.uniform(-most, most))
        failures.append(Failure(now, "process"))
        now += down
    horizon = now + lasted[-1]
    return simulate(spec, policy, failures, horizon)["step"] / horizon
