"""Captures of `fornax train` in processes of its own: by a signal, by several, through a kill."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.train.test_hosts import finish_all, series, start_hosts

from fornax import profile
from fornax.checkpoint import Checkpointer
from fornax.cli.main import main
from fornax.config.run_requests import answer_of, ask

pytestmark = [pytest.mark.slow]

LONG: dict[str, Any] = {"steps": 100_000, "save_every": None, "eval": {}}


def wait_for(what: Callable[[], Any], *processes: subprocess.Popen, seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        ended = [p.communicate()[0] for p in processes if p.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.05)
    return found


def recorded(run_dir: Path, steps: int) -> Callable[[], bool]:
    metrics = run_dir / "metrics.jsonl"
    return lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= steps


def answered(path: Path, *processes: subprocess.Popen) -> dict[str, Any]:
    done = wait_for(lambda: answer_of(path), *processes)
    assert "result" in done, done
    return done["result"]


def test_a_signal_asks_for_a_profile_and_a_file_for_a_checkpoint_and_a_stop(
    start: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, **LONG)
    wait_for(recorded(run_dir, 3), process)
    process.send_signal(signal.SIGUSR1)
    (asked,) = wait_for(lambda: list((run_dir / "requests").glob("*-profile.done.json")), process)
    told = answered(asked.with_name(asked.name.replace(".done", "")), process)
    assert len(told["steps"]) == 2
    first, last = told["steps"]
    found = profile.read(Path(told["directory"]))
    assert [step.number for step in found.steps] == list(range(first, last + 1)) != []
    assert {row.key for row in found.ops(by="module").rows} >= {"layers/attention/q", "optimizer"}
    saved = answered(ask(run_dir, "checkpoint"), process)["step"]
    stopped = answered(ask(run_dir, "stop"), process)["step"]
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 130, output
    assert "are captured: fornax profile show" in output
    assert Checkpointer(run_dir / "checkpoints").all_steps() == [saved, stopped]


def test_a_command_captures_steps_shows_them_and_leaves_nothing_else(
    settings: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, out = tmp_path / "run.yaml", tmp_path / "prof"
    # A schedule as long as the run, of which a few steps are made.
    file.write_text(yaml.safe_dump({**settings, "steps": 5000, "eval": {}, "save_every": 2}))
    monkeypatch.chdir(tmp_path)
    words = ["profile", "train", "--config", str(file), "--out", str(out), "--seq-len", "16"]
    assert main([*words, "--steps", "4..5"]) == 0
    assert [step.number for step in profile.read(out).steps] == [4, 5]
    assert "2 steps of train (4 to 5)" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "prof"}


@pytest.mark.exhaustive
def test_a_command_says_where_the_data_ends_before_the_window(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "run.yaml", tmp_path / "prof"
    file.write_text(yaml.safe_dump({**settings, "steps": 5000, "eval": {}}))
    words = ["profile", "train", "--config", str(file), "--out", str(out)]
    once = ["--data.epochs", "1", "--batch-size", "64"]
    assert main([*words, *once, "--steps", "2..150"]) == 0
    assert "the data ended after step" in capsys.readouterr().out
    assert main([*words, *once, "--steps", "140..150"]) == 2
    assert "nothing is captured: the data ended" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_two_processes_capture_and_save_and_stop_at_the_same_steps(
    start: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    processes = start_hosts(start, run_dir, 2, **LONG)
    wait_for(recorded(run_dir, 3), *processes)
    told = answered(ask(run_dir, "profile", steps=3), *processes)
    folder = Path(told["directory"])
    wait_for(lambda: len(list(folder.glob("*.xplane.pb"))) == 2, *processes)
    found = profile.read(folder)
    first, last = told["steps"]
    assert last == first + 2
    assert sorted((step.rank, step.number) for step in found.steps) == [
        (rank, step) for rank in (0, 1) for step in range(first, last + 1)
    ]
    saved = answered(ask(run_dir, "checkpoint"), *processes)["step"]
    # Any of the processes may get the signal.
    processes[1].send_signal(signal.SIGUSR1)
    wait_for(lambda: len(list((run_dir / "requests").glob("*-profile.done.json"))) == 2, *processes)
    stopped = answered(ask(run_dir, "stop"), *processes)["step"]
    finish_all(processes, 130)
    assert Checkpointer(run_dir / "checkpoints").all_steps() == [saved, stopped]


@pytest.mark.exhaustive
@pytest.mark.fault
def test_a_kill_during_a_capture_leaves_a_run_that_goes_on(
    start: Any, finish: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    flags = ["--profile.steps", "7..200", "--steps", "1000"]
    process = start(run_dir, flags)
    wait_for(recorded(run_dir, 9), process)
    wait_for(lambda: Checkpointer(run_dir / "checkpoints").all_steps(), process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list((run_dir / "profile").glob("plugins/profile/*/*.xplane.pb"))
    done = max(series(run_dir, "loss"))
    flags = ["--steps", str(done + 20), "--accept-changes", "steps"]
    window = f"{done + 10}..{done + 11}"
    code, output = finish(run_dir, [*flags, "--profile.steps", window])
    assert code == 0, output
    found = profile.read(run_dir / "profile")
    assert [step.number for step in found.steps] == [done + 10, done + 11]
    assert sorted(series(run_dir, "loss")) == list(range(1, done + 21))
