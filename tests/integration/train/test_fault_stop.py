"""Signals: the first finishes the step and saves, a second Ctrl-C exits now."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fornax.checkpoint import Checkpointer

pytestmark = [pytest.mark.fault, pytest.mark.slow]

LONG = {"steps": 5000, "save_every": None, "eval": {}}


def wait_for_steps(process: Any, run_dir: Path, steps: int) -> None:
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.exhaustive)],
)
def test_a_signal_saves_the_last_step_and_the_same_command_goes_on(
    start: Any, tmp_path: Path, number: int, code: int
):
    run_dir = tmp_path / "run"
    process = start(run_dir, **LONG)
    wait_for_steps(process, run_dir, 3)
    process.send_signal(number)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == code, output
    assert "finishing this step and saving a checkpoint" in output
    assert "Traceback" not in output
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert Checkpointer(run_dir / "checkpoints").all_steps() == [last]
    assert (run_dir / "report.html").exists()
    process = start(run_dir, **LONG)
    wait_for_steps(process, run_dir, last + 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=400)
    steps = [json.loads(x)["step"] for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= last + 2


def test_a_second_interrupt_exits_now(start: Any, tmp_path: Path):
    """Sent while the first step compiles, when no Python handler gets its turn."""
    run_dir = tmp_path / "run"
    process = start(run_dir, env={"FORNAX_COMPILATION_CACHE": "0"}, **LONG)
    deadline = time.monotonic() + 240
    while not (run_dir / "goodput.jsonl").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    # Two that wait to be delivered are one.
    assert any("Ctrl-C again exits now" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 130, output
    # It waited for no step, and saved none.
    assert not Checkpointer(run_dir / "checkpoints").all_steps()
    assert not (run_dir / "report.html").exists()
