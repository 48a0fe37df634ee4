"""Two real processes save one checkpoint together; one process, or two, restore it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.ports import held_port
from tests.xla_flags import xla_flags

from fornax.checkpoint import Checkpointer

WORKER = Path(__file__).parent / "one_of_two.py"


def run_two(root, task, codes=(0, 0)):
    port = held_port()
    environment = {
        **os.environ,
        "XLA_FLAGS": xla_flags(2),
        "NPROC": "16",
        "JAX_PLATFORMS": "cpu",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(root), str(process), str(port), task],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for process in range(2)
    ]
    try:
        done = [worker.communicate(timeout=400) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, code, (_, errors) in zip(workers, codes, done, strict=True):
        assert worker.returncode == code, errors[-3000:]
    return [out for out, _ in done]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("shared")
    for out in run_two(root, "save"):
        assert "saved 5" in out
    assert Checkpointer(root).all_steps() == [3, 4, 5]
    return root


@pytest.mark.slow
def test_one_process_restores_what_two_saved(root):
    wanted = {
        "w": jax.ShapeDtypeStruct((8, 64), jnp.bfloat16),
        "count": jax.ShapeDtypeStruct((), jnp.int32),
    }
    restored = Checkpointer(root).restore(wanted)
    want = np.arange(8 * 64, dtype=np.float32).reshape(8, 64) + 5
    np.testing.assert_array_equal(restored.state["w"], want.astype(jnp.bfloat16))
    assert restored.data == {shard: {"at": [5, shard]} for shard in range(4)}
    assert restored.config_yaml == "hosts: 2\n"
    assert int(restored.state["count"]) == 5


def test_two_processes_restore_what_two_saved(root):
    for out in run_two(root, "restore"):
        assert "restored 5 [0, 1, 2, 3]" in out


def test_a_step_with_one_record_of_two_is_not_complete(root):
    record = root / "5" / "fornax.1.json"
    content = record.read_bytes()
    record.unlink()
    assert Checkpointer(root).all_steps() == [3, 4]
    record.write_bytes(content)
    assert Checkpointer(root).all_steps() == [3, 4, 5]


@pytest.mark.slow
def test_both_processes_refuse_a_file_that_one_finds_damaged(root):
    files = [path for path in (root / "5").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    outs = run_two(root, "refuse")
    largest.write_bytes(content)
    assert all(" step 5: " in out and str(largest) in out for out in outs), outs


@pytest.mark.slow
def test_two_directories_with_other_steps_are_refused_by_both(root, tmp_path):
    """Process 0 would continue from 5 and process 1 from 4, each with its own arrays."""
    for process in range(2):
        shutil.copytree(root, tmp_path / str(process))
    shutil.rmtree(tmp_path / "1" / "5")
    for out in run_two(tmp_path, "apart"):
        assert "resumes from step 5 and has steps 3, 4, 5" in out
        assert "process 1 on " in out
        assert "has steps 3, 4, or another step 5. Give all of them one directory" in out


@pytest.mark.slow
def test_two_directories_with_another_step_of_one_number_are_refused(root, tmp_path):
    for process in range(2):
        shutil.copytree(root, tmp_path / str(process))
    for name in ("fornax.0.json", "fornax.1.json"):
        shutil.copyfile(root / "4" / name, tmp_path / "1" / "5" / name)
    for out in run_two(tmp_path, "apart"):
        assert "refused the processes do not share" in out


@pytest.mark.slow
def test_a_process_that_starts_anew_beside_one_that_has_steps_is_refused(root, tmp_path):
    (tmp_path / "0").mkdir()
    shutil.copytree(root, tmp_path / "1")
    for out in run_two(tmp_path, "apart"):
        assert "starts from scratch and has none; process 1 on" in out


@pytest.mark.slow
def test_a_save_that_fails_in_one_process_is_refused_by_both(tmp_path):
    for out in run_two(tmp_path / "new", "full"):
        assert "refused process" in out
        assert "saving step 1" in out
        assert "process 1: " in out


@pytest.mark.slow
@pytest.mark.fault
def test_no_process_waits_for_one_that_cannot_begin_a_save(tmp_path):
    """It may open no file, so it never comes to where Orbax has all processes wait for it."""
    for out in run_two(tmp_path / "new", "begin"):
        assert "saved 1" in out
        assert "saving step 2" in out
        assert "process 1: " in out
        assert "Too many open files" in out
        assert "saved 3" in out
    assert Checkpointer(tmp_path / "new").all_steps() == [1, 3]


@pytest.mark.slow
@pytest.mark.fault
def test_no_process_waits_in_a_save_for_one_that_is_gone(tmp_path):
    """It was killed after its part had begun; Orbax would wait for it for minutes."""
    first, second = run_two(tmp_path / "new", "gone", codes=(0, -9))
    assert "lost after" in first
    assert "lost after" not in second
    assert Checkpointer(tmp_path / "new").all_steps() == []
