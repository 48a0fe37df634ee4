"""Several processes joined by jax.distributed: the same batches, losses and stops as one."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fornax.checkpoint import Checkpointer

pytestmark = [pytest.mark.slow]

DATA_PARALLEL = {"data": -1, "fsdp": 1}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def by_hand(port: int, count: int, number: int) -> dict[str, str]:
    return {
        "FORNAX_COORDINATOR": f"localhost:{port}",
        "FORNAX_NUM_PROCESSES": str(count),
        "FORNAX_PROCESS_ID": str(number),
    }


def by_slurm(port: int, count: int, number: int) -> dict[str, str]:
    """What `srun` sets in each task of a step, all on this host."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
        "JAX_COORDINATOR_PORT": str(port),
    }


def start_hosts(
    start: Any,
    run_dir: Path | Sequence[Path],
    count: int,
    flags: Sequence[str] = (),
    variables: Callable[[int, int, int], dict[str, str]] = by_hand,
    **changes: Any,
) -> list[subprocess.Popen]:
    """Processes of one run directory, or each of its own; `variables` tell each which it is."""
    port = free_port()
    directories = [run_dir] * count if isinstance(run_dir, Path) else run_dir
    return [
        start(
            directories[number],
            flags,
            env=variables(port, count, number),
            **changes,
        )
        for number in range(count)
    ]


def finish_all(processes: Sequence[subprocess.Popen], code: int = 0) -> list[str]:
    outputs = [process.communicate(timeout=150)[0] for process in processes]
    assert [p.returncode for p in processes] == [code] * len(processes), outputs
    return outputs


def series(run_dir: Path, name: str) -> dict[int, Any]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {r["step"]: r.get(name) for r in map(json.loads, lines)}


def test_saved_at_two_hosts_and_resumed_at_one_and_four(
    start: Any, finish: Any, uninterrupted: list[dict[str, Any]], tmp_path: Path
):
    """Token counts are exact: the same rows. Losses differ by rounding only."""
    two = tmp_path / "two"
    changes: dict[str, Any] = {
        "mesh": DATA_PARALLEL,
        "eval": {},
        "optim": {"schedule": {"type": "constant"}},
    }
    finish_all(start_hosts(start, two, 2, **changes, steps=5))
    assert Checkpointer(two / "checkpoints").latest_step() == 5
    changes["steps"] = 8
    flags = ["--accept-changes", "steps"]
    one, four = tmp_path / "one", tmp_path / "four"
    for copy in (one, four):
        subprocess.run(["cp", "-r", str(two), str(copy)], check=True)
    code, output = finish(one, flags, **changes)
    assert code == 0, output
    finish_all(start_hosts(start, four, 4, flags=flags, **changes))
    tokens = {r["step"]: r["tokens"] for r in uninterrupted if r["step"] <= 8}
    assert series(one, "tokens") == series(four, "tokens") == tokens
    one_loss, four_loss = series(one, "loss"), series(four, "loss")
    assert four_loss == pytest.approx(one_loss, rel=1e-5)
    assert one_loss[1] == pytest.approx(uninterrupted[0]["loss"], rel=1e-6)


def test_a_signal_to_one_process_stops_all_at_one_step(start: Any, tmp_path: Path):
    run_dir = tmp_path / "run"
    processes = start_hosts(
        start, run_dir, 2, mesh=DATA_PARALLEL, steps=100_000, save_every=None, eval={}
    )
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 90
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert all(p.poll() is None for p in processes), [p.communicate()[0] for p in processes]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(processes[1].pid, signal.SIGTERM)
    outputs = finish_all(processes, 143)
    last = max(series(run_dir, "step"))
    assert Checkpointer(run_dir / "checkpoints").all_steps() == [last], outputs


def test_hosts_whose_directories_stand_at_other_steps_do_not_train(start: Any, tmp_path: Path):
    """A copy of the directory that lags by one checkpoint would mix two states."""
    changes: dict[str, Any] = {"mesh": DATA_PARALLEL, "eval": {}, "save_every": 2}
    ahead, behind = tmp_path / "ahead", tmp_path / "behind"
    finish_all(start_hosts(start, ahead, 2, **changes, steps=6))
    shutil.copytree(ahead, behind)
    shutil.rmtree(behind / "checkpoints" / "6")
    flags = ["--accept-changes", "steps"]
    hosts = start_hosts(start, [ahead, behind], 2, flags, **changes, steps=8)
    for output in finish_all(hosts, 2):
        assert "goes on from step 6 and has steps 2, 4, 6; process 1 on" in output
        assert "has steps 2, 4, or another step 6" in output
        assert "Traceback" not in output
    assert Checkpointer(ahead / "checkpoints").latest_step() == 6


def test_hosts_with_different_configs_do_not_train(start: Any, tmp_path: Path):
    port, processes = free_port(), []
    for number, rate in enumerate((1e-3, 2e-3)):
        flags = ["--optim.learning-rate", str(rate)]
        told = by_hand(port, 2, number)
        processes.append(start(tmp_path / "run", flags, env=told, mesh=DATA_PARALLEL))
    for output in finish_all(processes, 2):
        assert "process 1 has optim.learning_rate: 0.001 -> 0.002" in output
        assert "Traceback" not in output


def test_two_hosts_end_a_finite_run_and_an_evaluation_where_one_does(
    start: Any, finish: Any, settings: dict[str, Any], tmp_path: Path
):
    """No host knows beforehand how many batches there are. SLURM's variables tell who is who."""
    changes: dict[str, Any] = {
        "data": {**settings["data"], "epochs": 1},
        "steps": 10_000,
        "save_every": 7,
        "eval": {"every": 20},
        "optim": {"schedule": {"type": "constant"}},
    }
    code, output = finish(tmp_path / "one", **changes)
    assert code == 0, output
    for output in finish_all(
        start_hosts(start, tmp_path / "two", 2, mesh=DATA_PARALLEL, **changes)
    ):
        assert "Traceback" not in output
    one, two = (series(tmp_path / name, "tokens") for name in ("one", "two"))
    assert one == two
    one, two = (series(tmp_path / name, "eval/weight") for name in ("one", "two"))
    assert one == two
    assert any(one.values())


def test_processes_that_do_not_all_join_refuse_to_train(start: Any, tmp_path: Path):
    process = start(
        tmp_path / "run",
        env=by_hand(free_port(), 2, 0),
        processes={"join_timeout": 3},
    )
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 2, output
    assert "process 1 of 2 did not join within 3 s; start all 2 processes" in output
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
