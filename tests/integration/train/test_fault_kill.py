"""`kill -9` at random moments, then the same command: the run goes as if nothing had happened."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tests.xla_flags import xla_flags

from fornax.checkpoint import Checkpointer
from fornax.train import summarise

pytestmark = [pytest.mark.fault, pytest.mark.slow]

EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "accuracy", "skipped", "eval/loss")


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def exact(found: list[dict[str, Any]]) -> list[tuple]:
    return [tuple(record.get(name) for name in EXACT) for record in found]


def kill_after(process: Any, run_dir: Path, steps: int, delay: float) -> bool:
    """Kill once that many steps are recorded and a moment passed; False when it ended before."""
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= steps:
            time.sleep(delay)
            break
        time.sleep(0.002)
    ended = process.poll() is not None
    process.kill()
    process.communicate()
    return not ended


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_kills_change_no_number_of_any_step(
    start: Any, finish: Any, uninterrupted: list[dict[str, Any]], tmp_path: Path, seed: int
):
    rng = random.Random(seed)
    run_dir = tmp_path / "run"
    killed = 0
    for steps in (rng.randint(0, 6), rng.randint(6, 12), rng.randint(12, 19)):
        killed += kill_after(start(run_dir), run_dir, steps, rng.uniform(0, 0.05))
    code, output = finish(run_dir)
    assert code == 0, output
    assert killed >= 1
    assert exact(records(run_dir)) == exact(uninterrupted)
    assert Checkpointer(run_dir / "checkpoints").latest_step() == 20
    goodput = summarise(run_dir / "goodput.jsonl")
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.wall_seconds)


@pytest.mark.exhaustive
def test_every_record_is_read_once_an_epoch_over_a_kill(
    start: Any, finish: Any, tmp_path: Path, settings: dict[str, Any]
):
    """One epoch, whatever was killed, holds as many tokens to learn from as one epoch has."""
    data = {**settings["data"], "epochs": 1}
    changes = {"data": data, "steps": 10_000, "save_every": 7, "eval": {}}
    code, output = finish(tmp_path / "whole", **changes)
    assert code == 0, output
    whole = records(tmp_path / "whole")
    run_dir = tmp_path / "killed"
    assert kill_after(start(run_dir, **changes), run_dir, len(whole) // 2, 0.0)
    code, output = finish(run_dir, **changes)
    assert code == 0, output
    assert "the data ended" in output
    assert exact(records(run_dir)) == exact(whole)


def test_a_kill_on_divided_experts_changes_no_number(
    start: Any, finish: Any, tmp_path: Path, settings: dict[str, Any]
):
    """Parameters, the optimizer's state and the biases for the choice come back bit for bit."""
    experts = {
        "num_experts": 4,
        "experts_per_token": 1,
        "intermediate_size": 32,
        "score": "sigmoid",
        "selection_bias": True,
    }
    changes = {
        "steps": 8,
        "save_every": 2,
        "eval": {},
        "model": {**settings["model"], "experts": experts},
        "optim": {"optimizer": {"type": "muon"}},
        "mesh": {"expert": 2, "fsdp": 2},
        "env": {"XLA_FLAGS": xla_flags(4), "NPROC": "16"},
    }
    code, output = finish(tmp_path / "whole", **changes)
    assert code == 0, output
    run_dir = tmp_path / "killed"
    assert kill_after(start(run_dir, **changes), run_dir, 4, 0.0)
    code, output = finish(run_dir, **changes)
    assert code == 0, output
    names = (*EXACT, "expert_load_max", "expert_load_min", "expert_tokens", "router_entropy")
    whole, killed = records(tmp_path / "whole"), records(run_dir)
    assert [[one.get(n) for n in names] for one in killed] == [
        [one.get(n) for n in names] for one in whole
    ]
    assert len(whole) == 8
    assert all(one["expert_load_max"] >= 1 for one in whole)
    loads = [max(tokens_E) * 4 / sum(tokens_E) for tokens_E in whole[-1]["expert_tokens"]]
    assert max(loads) == pytest.approx(whole[-1]["expert_load_max"])


@pytest.mark.exhaustive
def test_a_kill_in_a_pipeline_changes_no_number_and_one_device_goes_on(
    start: Any, finish: Any, tmp_path: Path, settings: dict[str, Any]
):
    """Two stages, each with two parts of the layers; then the same run without any."""
    changes = {
        "steps": 8,
        "save_every": 2,
        "optim": {"schedule": {"type": "constant"}},
        "batch_size": 16,
        "accumulate": 2,
        "eval": {"every": 4, "batches": 1},
        "model": {**settings["model"], "num_layers": 4, "tie_embeddings": True},
    }
    staged = {
        **changes,
        "mesh": {"stage": 2, "fsdp": 2},
        "pipeline": {"repeats": 2},
        "env": {"XLA_FLAGS": xla_flags(4), "NPROC": "16"},
    }
    code, output = finish(tmp_path / "whole", **staged)
    assert code == 0, output
    said = "a pipeline of 2 stages for 4 microbatches, of whose time 11% is the bubble"
    assert said in " ".join(output.split())
    run_dir = tmp_path / "killed"
    assert kill_after(start(run_dir, **staged), run_dir, 4, 0.0)
    code, output = finish(run_dir, **staged)
    assert code == 0, output
    assert exact(records(run_dir)) == exact(records(tmp_path / "whole"))
    for folder, flags in ((run_dir, ["--accept-changes", "steps"]), (tmp_path / "single", [])):
        code, output = finish(folder, flags, **{**changes, "steps": 10})
        assert code == 0, output
    found, expected = records(run_dir), records(tmp_path / "single")
    assert [one["step"] for one in found] == list(range(1, 11))
    for name in ("loss", "grad_norm", "accuracy"):
        assert [one[name] for one in found] == pytest.approx(
            [one[name] for one in expected], rel=1e-3
        )


def test_kills_between_checkpoints_of_a_computed_interval_change_no_number(
    start: Any, finish: Any, uninterrupted: list[dict[str, Any]], tmp_path: Path
):
    """Fails every 0.4 ms, by the config: each save is due as soon as the one before is complete."""
    run_dir = tmp_path / "run"
    changes = {"save_every": "auto", "checkpoint": {"mtbf_hours": 1e-7, "keep_last": 20}}
    process, deadline = start(run_dir, **changes), time.monotonic() + 240
    while not Checkpointer(run_dir / "checkpoints").all_steps():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert kill_after(process, run_dir, 0, 0.0)
    before = Checkpointer(run_dir / "checkpoints").all_steps()
    assert before[0] == 2
    code, output = finish(run_dir, **changes)
    assert code == 0, output
    after = Checkpointer(run_dir / "checkpoints").all_steps()
    assert set(before) < set(after)
    assert after[-1] == 20
    assert exact(records(run_dir)) == exact(uninterrupted)
