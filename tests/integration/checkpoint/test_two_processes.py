"""Two real processes save one checkpoint together; one process, or two, restore it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.checkpoint import Checkpointer

WORKER = Path(__file__).parent / "one_of_two.py"


def run_two(root, task):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
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
        done = [worker.communicate(timeout=90) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, done, strict=True):
        assert worker.returncode == 0, errors[-3000:]
    return [out for out, _ in done]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("shared")
    for out in run_two(root, "save"):
        assert "saved 5" in out
    assert Checkpointer(root).all_steps() == [3, 4, 5]
    return root


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


def test_both_processes_refuse_a_file_that_one_finds_damaged(root):
    files = [path for path in (root / "5").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    outs = run_two(root, "refuse")
    largest.write_bytes(content)
    assert all("refused step 5" in out for out in outs), outs
    assert any(str(largest) in out for out in outs)
