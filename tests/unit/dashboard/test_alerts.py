"""What a run's numbers warn of."""

import math

import numpy as np

from fornax.dashboard.alerts import (
    Alert,
    SpikeWatch,
    of_disk,
    of_events,
    of_metrics,
    of_silence,
)
from fornax.dashboard.series import Table


def alerts(records: list[dict], pieces: int = 1) -> list[Alert]:
    table, spikes = Table(), SpikeWatch()
    for part in np.array_split(np.arange(len(records)), pieces):
        table.append([records[n] for n in part])
        spikes.look(table)
    return of_metrics(table, spikes)


def run(count: int = 400) -> list[dict]:
    rng = np.random.default_rng(1)
    return [
        {"step": n, "loss": 2 + 0.02 * float(rng.normal()), "grad_norm": 1.0}
        for n in range(1, count + 1)
    ]


def test_a_quiet_run_warns_of_nothing() -> None:
    assert alerts(run()) == []


def test_a_spike_has_its_step() -> None:
    records = run()
    records[299]["loss"] = 9.0
    for pieces in (1, 7):
        (found,) = alerts(records, pieces)
        assert (found.kind, found.step, found.metric) == ("spike", 300, "loss")
        assert "9" in found.message
        assert "step 300" in found.message


def test_values_that_are_not_finite() -> None:
    records = run()
    records[99]["loss"] = None
    records[100]["loss"] = math.inf
    (found,) = alerts(records)
    assert (found.kind, found.level, found.step) == ("nan", "warning", 100)
    assert "2 times from step 100 to 101" in found.message
    records[-1]["grad_norm"] = math.nan
    assert [a.level for a in alerts(records)] == ["warning", "error"]  # it is so still


def test_missing_evaluations_are_no_nan() -> None:
    records = run()
    for record in records:
        record["reward_part"] = None
    records[50]["eval/loss"] = 2.0
    assert alerts(records) == []


def test_rewards_without_variance() -> None:
    records = [{"step": n, "loss": 0.0, "reward_std": 0.3} for n in range(1, 10)]
    assert alerts(records) == []
    for record in records[-5:]:
        record["reward_std"] = 0.0
    (found,) = alerts(records)
    assert (found.kind, found.step) == ("reward", 9)
    shares = [{"step": n, "loss": 0.0, "zero_variance_groups": 0.95} for n in range(1, 6)]
    assert "95%" in alerts(shares)[0].message


def test_silence_is_measured_in_the_usual_intervals() -> None:
    times = np.arange(0.0, 1000.0, 100.0)
    assert of_silence(1000.0, times, 1900.0, 7) is None
    found = of_silence(1000.0, times, 2100.0, 7)
    assert found is not None
    assert (found.kind, found.step, found.time) == ("stall", 7, 1000.0)
    assert of_silence(1000.0, np.empty(0), 1030.0, None) is None


def test_a_full_disk() -> None:
    gib = 1 << 30
    assert of_disk(100 * gib, 1000 * gib, 10 * gib) is None
    assert of_disk(15 * gib, 1000 * gib, 10 * gib) is not None  # not two checkpoints
    found = of_disk(gib // 2, 1000 * gib, 0)
    assert found is not None
    assert found.level == "error"


def test_faults_of_a_launch() -> None:
    events = [
        {"state": "running", "why": "", "time": 1.0},
        {"state": "teardown", "why": "rank 3 was killed", "time": 2.0},
        {"state": "running", "why": "", "time": 3.0},
    ]
    (found,) = of_events(events)
    assert (found.level, found.time, found.message) == ("warning", 2.0, "rank 3 was killed")
    assert [a.level for a in of_events([{"state": "ended", "code": 1, "why": "x"}])] == ["error"]
    assert of_events([{"state": "ended", "code": 143, "why": "stopped"}]) == []
