"""Several processes joined by jax.distributed: the same batches, losses and stops as one."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.ports import held_port
from tests.xla_flags import xla_flags

from fornax.checkpoint import Checkpointer
from fornax.checkpoint.records import json_copy, read_records
from fornax.config import from_mapping
from fornax.data import DataConfig, open_batches

pytestmark = [pytest.mark.slow]

DATA_PARALLEL = {"data": -1, "fsdp": 1}


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
    port = held_port()
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
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    assert [p.returncode for p in processes] == [code] * len(processes), outputs
    return outputs


def series(run_dir: Path, name: str) -> dict[int, Any]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {r["step"]: r.get(name) for r in map(json.loads, lines)}


@pytest.mark.exhaustive
def test_any_number_of_hosts_goes_on_where_others_stopped(
    start: Any, finish: Any, settings: dict[str, Any], tmp_path: Path
):
    """Token counts and positions are exact: every record once. Losses differ by rounding only.

    Eight rows in two micro-batches are padded to twelve on three hosts and to ten on five, and
    widths of 32 are divided over two hosts only. The same number of hosts gives the same bits.
    """
    changes: dict[str, Any] = {
        "accumulate": 2,
        "eval": {"every": 2, "batches": 2},
        "optim": {"schedule": {"type": "constant"}},
        "save_every": None,
    }
    code, output = finish(tmp_path / "one", **changes, steps=8)
    assert code == 0, output
    assert "is padded" not in output
    run_dir, again = tmp_path / "many", tmp_path / "again"
    flags = ["--accept-changes", "steps"]
    for hosts, steps, padded in ((2, 2, None), (3, 4, 12), (5, 6, 10)):
        for output in finish_all(
            start_hosts(start, run_dir, hosts, flags if steps > 2 else (), **changes, steps=steps)
        )[:1]:
            assert ("is padded to" in output) == (padded is not None)
            assert padded is None or f"is padded to {padded} rows" in output
            assert (f"mesh.fsdp is 1 and mesh.data {hosts}" in output) == (padded is not None)
        if hosts == 2:
            shutil.copytree(run_dir, again)
    finish_all(start_hosts(start, again, 3, flags, **changes, steps=6))
    code, output = finish(run_dir, flags, **changes, steps=8)
    assert code == 0, output

    for name in ("tokens", "eval/weight"):
        assert series(run_dir, name) == series(tmp_path / "one", name), name
    for name in ("loss", "eval/loss", "accuracy", "grad_norm"):
        whole = {k: v for k, v in series(tmp_path / "one", name).items() if v is not None}
        found = {k: v for k, v in series(run_dir, name).items() if v is not None}
        assert found == pytest.approx(whole, rel=1e-6), name
        three = {k: v for k, v in series(again, name).items() if k <= 4 and v is not None}
        assert three == {k: v for k, v in found.items() if k <= 4}, name
    assert set(series(again, "compilations").values()) == {1, 2}  # a step, an evaluation
    config = from_mapping(DataConfig, settings["data"])
    for directory, steps in ((again, 6), (run_dir, 8)):
        with open_batches(config, batch_size=8, seq_len=settings["seq_len"]) as batches:
            for _ in range(steps):
                next(batches)
            assert positions(directory, steps) == {
                shard: json_copy(state) for shard, state in batches.state().items()
            }


@pytest.mark.exhaustive
@pytest.mark.fault
def test_two_hosts_agree_on_computed_checkpoints_and_go_on_from_one(start: Any, tmp_path: Path):
    """Each measures other times than the other; a save that only one began would end nowhere."""
    fixed: dict[str, Any] = {"steps": 6, "save_every": None, "eval": {}}
    often = {"mtbf_hours": 1e-7, "keep_last": 20}
    auto = {**fixed, "save_every": "auto", "checkpoint": often}
    finish_all(start_hosts(start, tmp_path / "whole", 2, **fixed))
    run_dir = tmp_path / "run"
    processes = start_hosts(start, run_dir, 2, **auto)
    deadline = time.monotonic() + 240
    while not Checkpointer(run_dir / "checkpoints").all_steps():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for process in processes:
        process.kill()
        process.communicate()
    kept = Checkpointer(run_dir / "checkpoints").all_steps()
    assert kept[0] == 2
    finish_all(start_hosts(start, run_dir, 2, **auto))
    checkpoints = Checkpointer(run_dir / "checkpoints").all_steps()
    assert set(kept) < set(checkpoints)
    assert all(len(read_records(run_dir / "checkpoints" / str(n))) == 2 for n in checkpoints)
    assert series(run_dir, "loss") == series(tmp_path / "whole", "loss")


@pytest.mark.exhaustive
def test_two_slices_of_two_devices_train_as_one_device(start: Any, finish: Any, tmp_path: Path):
    """Each process is a slice: FSDP inside it, the batch over both."""

    def variables(port: int, count: int, number: int) -> dict[str, str]:
        return {**by_hand(port, count, number), "XLA_FLAGS": xla_flags(2)}

    changes: dict[str, Any] = {"steps": 6, "save_every": None, "eval": {}}
    code, output = finish(tmp_path / "one", **changes)
    assert code == 0, output
    two = tmp_path / "two"
    mesh = {"slice": 2, "fsdp": 2}
    finish_all(start_hosts(start, two, 2, variables=variables, mesh=mesh, **changes))
    assert series(two, "tokens") == series(tmp_path / "one", "tokens")
    for name in ("loss", "grad_norm"):
        expected = series(tmp_path / "one", name)
        assert series(two, name) == pytest.approx(expected, rel=1e-6), name


@pytest.mark.fault
@pytest.mark.exhaustive
def test_stages_over_two_slices_train_as_one_device_and_a_kill_changes_no_number(
    start: Any, finish: Any, settings: dict[str, Any], tmp_path: Path
):
    """Each process is a slice with two of four stages. Killed and started again, the bits are those
    of the run that continued."""

    def variables(port: int, count: int, number: int) -> dict[str, str]:
        return {**by_hand(port, count, number), "XLA_FLAGS": xla_flags(2)}

    changes: dict[str, Any] = {
        "steps": 6,
        "save_every": 2,
        "eval": {},
        "optim": {"schedule": {"type": "constant"}},
        "model": {**settings["model"], "num_layers": 4},
    }
    staged = {
        **changes,
        "mesh": {"slice": 2, "stage": 2, "across": "stage"},
        "pipeline": {"microbatches": 4},
    }
    run_dir, whole, one = (tmp_path / name for name in ("killed", "whole", "one"))
    outputs = finish_all(start_hosts(start, whole, 2, variables=variables, **staged))
    said = "a pipeline of 4 stages, 2 in each of 2 slices, for 4 microbatches"
    assert said in " ".join(outputs[0].split())
    processes = start_hosts(start, run_dir, 2, variables=variables, **staged)
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert all(p.poll() is None for p in processes), [p.communicate()[0] for p in processes]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for process in reversed(processes):
        process.kill()
        process.communicate()
    finish_all(start_hosts(start, run_dir, 2, variables=variables, **staged))
    for name in ("loss", "grad_norm", "tokens"):
        assert series(run_dir, name) == series(whole, name), name
    code, output = finish(one, **changes)
    assert code == 0, output
    assert series(run_dir, "tokens") == series(one, "tokens")
    for name in ("loss", "grad_norm"):
        assert series(run_dir, name) == pytest.approx(series(one, name), rel=1e-6), name


def positions(run_dir: Path, step: int) -> dict[int, Any]:
    """The data's position in a checkpoint, of all processes that saved it."""
    records = read_records(run_dir / "checkpoints" / str(step))
    return {shard: position for record in records for shard, position in record.data.items()}


@pytest.mark.exhaustive
def test_a_signal_to_one_process_stops_all_at_one_step(start: Any, tmp_path: Path):
    run_dir = tmp_path / "run"
    processes = start_hosts(
        start, run_dir, 2, mesh=DATA_PARALLEL, steps=100_000, save_every=None, eval={}
    )
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert all(p.poll() is None for p in processes), [p.communicate()[0] for p in processes]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(processes[1].pid, signal.SIGTERM)
    outputs = finish_all(processes, 143)
    last = max(series(run_dir, "step"))
    assert Checkpointer(run_dir / "checkpoints").all_steps() == [last], outputs


@pytest.mark.exhaustive
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
        assert "resumes from step 6 and has steps 2, 4, 6; process 1 on" in output
        assert "has steps 2, 4, or another step 6" in output
        assert "Traceback" not in output
    assert Checkpointer(ahead / "checkpoints").latest_step() == 6


def test_hosts_with_different_configs_do_not_train(start: Any, tmp_path: Path):
    port, processes = held_port(), []
    for number, rate in enumerate((1e-3, 2e-3)):
        flags = ["--optim.learning-rate", str(rate)]
        told = by_hand(port, 2, number)
        processes.append(start(tmp_path / "run", flags, env=told, mesh=DATA_PARALLEL))
    for output in finish_all(processes, 2):
        assert "process 1 has optim.learning_rate: 0.001 -> 0.002" in output
        assert "Traceback" not in output


@pytest.mark.exhaustive
def test_three_hosts_end_a_finite_run_and_an_evaluation_where_one_does(
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
        start_hosts(start, tmp_path / "three", 3, mesh=DATA_PARALLEL, **changes)
    ):
        assert "Traceback" not in output
    one, three = (series(tmp_path / name, "tokens") for name in ("one", "three"))
    assert one == three
    one, three = (series(tmp_path / name, "eval/weight") for name in ("one", "three"))
    assert one == three
    assert any(one.values())


def test_processes_that_do_not_all_join_refuse_to_train(start: Any, tmp_path: Path):
    process = start(
        tmp_path / "run",
        env=by_hand(held_port(), 2, 0),
        processes={"join_timeout": 3},
    )
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 2, output
    assert "process 1 of 2 did not join within 3 s; start all 2 processes" in output
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
