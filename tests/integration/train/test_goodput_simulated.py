"""The simulator of `fornax plan goodput` beside a real run that is killed again and again."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from fornax.plan.goodput.inputs import Policy, RunSpec
from fornax.plan.goodput.simulate import Failure, simulate

pytestmark = [pytest.mark.fault, pytest.mark.exhaustive]

EVERY, KILLS = 40, 6


def lines(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def first_step(process: Any, run_dir: Path) -> float:
    """When the first step of this process was recorded."""
    before = lines(run_dir)
    while process.poll() is None:
        if (now := lines(run_dir)) != before:
            if now > before:
                return time.monotonic()
            before = now  # what came after the checkpoint was cut off
        time.sleep(0.002)
    raise AssertionError(process.communicate()[0])


def test_a_run_with_kills_comes_to_what_is_simulated(start: Any, tmp_path: Path):
    """Step, save and restart are measured in the run; what is simulated is how they add up."""
    rng = random.Random(0)
    run_dir = tmp_path / "run"
    changes = {"steps": 100_000, "save_every": EVERY, "seq_len": 256, "eval": {}}
    began, killed, recoveries = [], [], []
    for _ in range(KILLS):
        process = start(run_dir, **changes)
        began.append(first_step(process, run_dir))
        if killed:
            recoveries.append(began[-1] - killed[-1])
        time.sleep(rng.uniform(4, 12))
        process.kill()
        killed.append(time.monotonic())
        process.communicate()
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    step = sum(r["step_seconds"] for r in records) / len(records)
    horizon = killed[-1] - began[0]
    run = RunSpec(
        hosts=1,
        step=step,
        state=1.0,
        rates={},
        memory_rate=1e6,
        peer_rate=1.0,
        disk_rate=1.0,
        store_rate=1e6,
        detection=0.0,
        recovery=sum(recoveries) / len(recoveries),
        repair=0.0,
        slice_hosts=1,
    )
    failures = [Failure(when - began[0], "process") for when in killed[:-1]]
    policy = Policy(steps=EVERY, every={"store": 1}, spares=0)
    simulated = simulate(run, policy, failures, horizon)
    assert records[-1]["step"] * step / horizon == pytest.approx(
        simulated["step"] / horizon, rel=0.1
    )
