"""Loss spikes of `fornax train` as real processes, beside runs that left the batches out."""

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration.train.test_hosts import DATA_PARALLEL, finish_all, start_hosts

from fornax.train import summarise

pytestmark = [pytest.mark.slow]

EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "accuracy", "skipped", "eval/loss")
STEPS, NAN, NOISE = 40, 17, 29
SPIKES = {
    "warmup": 4,
    "window": 16,
    "loss": {"deviations": 6.0, "rise": 0.01},
    "grad_norm": {"deviations": 20.0, "rise": 4.0},
    "snapshot_every": 8,
    "drill": {"nan": [NAN], "noise": [NOISE]},
}
OPTIM = {"learning_rate": 0.02}


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def exact(run_dir: Path) -> list[tuple]:
    return [tuple(record.get(name) for name in EXACT) for record in records(run_dir)]


def left_out(run_dir: Path) -> list[list[int]]:
    lines = (run_dir / "spikes.jsonl").read_text().splitlines()
    return [json.loads(line)["skipped"] for line in lines]


def never_had(settings: dict[str, Any]) -> dict[str, Any]:
    """Changes to a run that is given the skip list from the start, and no guard."""
    ranges = [{"start": n, "stop": n + 1} for n in (NAN, NOISE)]
    return {"steps": STEPS, "optim": OPTIM, "data": {**settings["data"], "skip_steps": ranges}}


@pytest.mark.exhaustive
def test_a_drill_ends_as_a_run_that_had_the_list_from_the_start(
    start: Any, finish: Any, settings: dict[str, Any], tmp_path: Path
):
    code, output = finish(tmp_path / "never", **never_had(settings))
    assert code == 0, output
    changes = {"steps": STEPS, "optim": OPTIM, "spikes": SPIKES}
    code, output = finish(tmp_path / "drill", **changes)
    assert code == 0, output
    assert left_out(tmp_path / "drill") == [[NAN], [NOISE]], output
    assert (
        f"step {NAN + 1} (batch {NAN}): loss nan is not finite: back to step 16 (in memory), "
        in (output)
    )
    assert exact(tmp_path / "drill") == exact(tmp_path / "never")
    kill_and_finish(start, finish, tmp_path, changes)


def kill_and_finish(start: Any, finish: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    """`kill -9` around and during rewinds, at random moments: the same losses and the same list."""
    rng, run_dir = random.Random(3), tmp_path / "killed"
    seen = []
    for marks in (1, 2, 2):
        process = start(run_dir, **changes)
        deadline, path = time.monotonic() + 240, run_dir / "goodput.jsonl"
        while process.poll() is None and time.monotonic() < deadline:
            text = path.read_text() if path.exists() else ""
            if text.count("rewind_to") >= marks:
                break
            time.sleep(0.001)
        time.sleep(rng.choice([0.0, 0.0, 0.02]))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        seen.append(process.returncode)
    code, output = finish(run_dir, **changes)
    assert code == 0, output
    assert -signal.SIGKILL in seen
    assert exact(run_dir) == exact(tmp_path / "never")
    assert left_out(run_dir) == [[NAN], [NOISE]]
    goodput = summarise(run_dir / "goodput.jsonl")
    assert goodput.seconds["spikes"] > 0


@pytest.mark.exhaustive
def test_two_processes_go_back_to_one_step(start: Any, settings: dict[str, Any], tmp_path: Path):
    """One from memory, one from a checkpoint; the same as two that never had the batches."""
    two: dict[str, Any] = {"mesh": DATA_PARALLEL}
    finish_all(start_hosts(start, tmp_path / "never", 2, **two, **never_had(settings)))
    changes = {"steps": STEPS, "optim": OPTIM, "spikes": SPIKES}
    outputs = finish_all(start_hosts(start, tmp_path / "memory", 2, **two, **changes))
    assert left_out(tmp_path / "memory") == [[NAN], [NOISE]], outputs
    assert exact(tmp_path / "memory") == exact(tmp_path / "never")
    changes["spikes"] = {**SPIKES, "snapshot_every": None, "skip_before": 1}
    outputs = finish_all(start_hosts(start, tmp_path / "disk", 2, **two, **changes))
    assert left_out(tmp_path / "disk") == [[NAN - 1, NAN], [NOISE - 1, NOISE]], outputs
    lines = (tmp_path / "disk" / "spikes.jsonl").read_text().splitlines()
    sources = [json.loads(line)["source"] for line in lines]
    assert sources == ["checkpoint", "checkpoint"]
