"""`fornax launch` from the outside: logs, exit codes, stops, what it refuses, its companions."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.cluster.conftest import CHANGES
from tests.integration.train.conftest import COMMAND

from fornax.checkpoint import Checkpointer
from fornax.cluster import read_status
from fornax.config.jsonl import read_json_lines

pytestmark = [pytest.mark.slow]


def fornax(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *words], capture_output=True, text=True, timeout=400
    )


@pytest.mark.exhaustive
@pytest.mark.fault
def test_signals_save_one_step_and_the_same_command_goes_on(launch: Any):
    """SIGTERM, then SIGKILL, which saves nothing and leaves nothing, then Ctrl-C."""
    run = launch(save_every=None, steps=5000)
    run.wait_for_step(1, 5)
    ranks = fornax("launch", "status", str(run.run_dir)).stdout
    assert "running" in ranks
    assert len(read_status(run.run_dir).ranks) == 2
    second = fornax("launch", "--", "train", "--run-dir", str(run.run_dir))
    assert second.returncode == 2
    assert "is in use by another fornax launch" in second.stderr
    run.process.send_signal(signal.SIGTERM)
    exit_code, output = run.finish()
    assert exit_code == 143, output
    assert "SIGTERM: all finish this step and save" in output
    records = [json.loads(x) for x in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    last = records[-1]["step"]
    assert Checkpointer(run.run_dir / "checkpoints").all_steps() == [last]
    assert not run.descendants()
    again = launch(save_every=None, steps=5000)
    again.wait_for_step(0, last + 2)
    again.process.kill()
    again.process.wait()
    deadline = time.monotonic() + 240
    while again.descendants():  # the kernel ends them, one after the other
        assert time.monotonic() < deadline, again.descendants()
        time.sleep(0.02)
    assert read_status(run.run_dir).state == "gone"
    assert not read_status(run.run_dir).ranks
    third = launch(save_every=None, steps=5000)
    third.wait_for_epoch(3)
    third.wait_for_step(0, last + 2)
    third.process.send_signal(signal.SIGINT)
    exit_code, output = third.finish()
    assert exit_code == 130, output
    assert "SIGINT: all finish this step and save" in output
    assert f"the run is at step {last} of 5000" in output
    assert "Traceback" not in output
    assert not third.descendants()
    steps = [step for step, *_ in third.exact()]
    assert steps == list(range(1, len(steps) + 1))
    events = fornax("launch", "events", str(run.run_dir)).stdout.splitlines()
    assert any("epoch 3  forming: 2 hosts" in event for event in events)
    assert "epoch 3  ended: exit code 130" in events[-1]


def listening(pids: set[int]) -> set[str]:
    """The addresses on which processes listen, hexadecimal as the kernel has them."""
    sockets = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(file))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(words[1].partition(":")[0])
    return found


def test_nothing_listens_beyond_this_machine(launch: Any):
    run = launch(save_every=None, steps=100_000)
    run.wait_for_step(1, 5)
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}  # of IPv4, and of IPv6 as it
    assert "0100007F" in listening(run.descendants()) <= loopback
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 130, output


def test_a_mistake_of_the_user_is_told_once_and_not_tried_again(launch: Any):
    run = launch(batch_size=7)
    code, output = run.finish()
    assert code == 2, output
    assert "batch_size=7 does not divide" in output
    assert "Traceback" not in output
    assert [e["epoch"] for e in run.events() if e.get("state") == "forming"] == [1]
    assert (run.run_dir / "cluster" / "rank-1.log").stat().st_size > 0
    assert not run.descendants()


def test_what_cannot_be_launched_or_drilled_is_refused(tmp_path: Path):
    for words, said in (
        (["launch"], "no command is named"),
        (["launch", "--", "serve", "DIR"], "serve is launched with --replicas"),
        (["launch", "--", "train", "--config", "x.yaml"], "x.yaml cannot be read"),
        (["launch", "--hosts", "0", "--", "train", "--run-dir", "r"], "must be 1 or more"),
        (["launch", "--hosts", "4..3", "--", "train", "--run-dir", "r"], "from fewer to more"),
        (["launch", "--engine", "slurm", "--", "train"], "engine"),
        (["launch", "--address", "auto", "--", "train", "--run-dir", "r"], "add --engine ray"),
        (["launch", "status", str(tmp_path)], "nothing was launched there"),
        (["launch", "drill", str(tmp_path), "--kill", "0"], "has no running worker of rank 0"),
        (["launch", "resize", str(tmp_path), "--hosts", "2"], "nothing was launched there"),
        (["launch", "resize", str(tmp_path)], "say how many hosts are to train"),
        (
            ["launch", "--local-checkpoints", "/dev/null/x", "--", "train", "--run-dir", "r"],
            "--local-checkpoints /dev/null/x cannot be written (Not a directory)",
        ),
        (
            ["launch", "--slices", "2", "--local-checkpoints", str(tmp_path), "--", "train"],
            "slices do not make",
        ),
        (
            ["launch", "--replicas", "2", "--local-checkpoints", "d", "--", "serve", "D"],
            "are for training commands",
        ),
        (["train", "--local-checkpoints", "d"], "local-checkpoints"),
        (["launch", "--private-network", "--", "train", "--run-dir", "r"], "add --engine ray"),
        (
            ["launch", "--replicas", "2", "--engine", "ray", "--slow", "evict", "--", "serve", "D"],
            "are for training commands",
        ),
        (["launch", "drill", str(tmp_path)], "write one of --kill RANK"),
    ):
        ended = fornax(*words)
        assert ended.returncode == 2, ended
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr


def text_data(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The data as text, which is tokenized as it is read."""
    built = Path(settings["data"]["source"]["path"])
    texts = folder / "text.jsonl"
    texts.write_text((built.parent / "text.jsonl").read_text())
    return {
        "source": {"type": "jsonl", "path": str(texts)},
        "transforms": [{"type": "tokenize", "tokenizer": str(built / "tokenizer")}],
        "prefetch": {"buffer": 2},
        "holdout": 0.1,
    }


def test_a_run_without_a_directory_goes_where_the_command_alone_would_write(
    environment: dict[str, str], settings: dict[str, Any], tmp_path: Path
):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**settings, **CHANGES, "steps": 2}))
    words = ["launch", "--no-spares", "--", "train", "--config", "mine.yaml"]
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        env={**environment, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    run_dir = tmp_path / "runs" / "mine"
    assert [each["step"] for each in read_json_lines(run_dir / "metrics.jsonl")] == [1, 2]
    assert (run_dir / "cluster" / "rank-1.log").is_file()
    assert read_status(run_dir).state == "ended"


@pytest.mark.fault
@pytest.mark.exhaustive
def test_data_workers_make_the_batches_of_the_hosts_themselves(
    launch: Any, settings: dict[str, Any], tmp_path: Path, places: dict[str, str]
):
    """From text, tokenized elsewhere: also when a worker dies, and with none at all. Nothing is
    left in the home directory, in that for temporary files or in shared memory."""
    data = text_data(settings, tmp_path)
    plain = launch("plain", flags=("--no-spares",), data=data)
    assert plain.finish()[0] == 0
    run = launch("apart", flags=("--no-spares", "--data-workers", "2"), data=data, env=places)
    run.wait_for_step(0, 3)
    seen = read_status(run.run_dir).data_workers
    assert [worker.number for worker in seen] == [0, 1]
    assert sum(worker.records for worker in seen) > 0
    said = fornax("launch", "drill", str(run.run_dir), "--kill", "data:1")
    assert said.stdout.startswith("kill data 1, process"), said
    assert "another took its place after" in said.stdout
    run.wait_for_event(lambda e: e.get("data") == 1 and "another takes" in e.get("why", ""))
    code, output = run.finish()
    assert code == 0, output
    assert run.exact() == plain.exact()
    assert run.faults() == []
    assert not run.descendants()
    assert not list((run.run_dir / "cluster").glob("*.record"))
