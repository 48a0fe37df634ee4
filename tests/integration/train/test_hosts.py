"""Several processes joined by jax.distributed: the same batches, losses and stops as one."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
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


def start_hosts(
    start: Any, run_dir: Path, count: int, flags: Sequence[str] = (), **changes: Any
) -> list[subprocess.Popen]:
    port = free_port()
    return [
        start(
            run_dir,
            flags,
            env={
                "FORNAX_COORDINATOR": f"localhost:{port}",
                "FORNAX_NUM_PROCESSES": str(count),
                "FORNAX_PROCESS_ID": str(number),
            },
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
    return {r["step"]: r[name] for r in map(json.loads, lines)}


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


def test_processes_that_do_not_all_join_refuse_to_train(start: Any, tmp_path: Path):
    process = start(
        tmp_path / "run",
        env={
            "FORNAX_COORDINATOR": f"localhost:{free_port()}",
            "FORNAX_NUM_PROCESSES": "2",
            "FORNAX_PROCESS_ID": "0",
        },
        processes={"join_timeout": 3},
    )
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 2, output
    assert "process 1 of 2 did not join within 3 s; start all 2 processes" in output
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
