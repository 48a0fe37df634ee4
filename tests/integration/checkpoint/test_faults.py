"""Kills, full disks and refused writes: the latest checkpoint always loads."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.xla_flags import xla_flags

from fornax.checkpoint import Checkpointer

HERE = Path(__file__).parent
KILLS = 20


def environment():
    return {**os.environ, "XLA_FLAGS": xla_flags(), "JAX_PLATFORMS": "cpu"}


@pytest.mark.fault
@pytest.mark.slow
def test_the_latest_checkpoint_loads_after_twenty_kills(tmp_path):
    root = tmp_path / "checkpoints"
    delays, longest = random.Random(0), 0.6
    resumed, leftovers = [], 0
    with subprocess.Popen(
        [sys.executable, str(HERE / "kill_server.py"), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as server:
        try:
            for number in range(4 * KILLS):
                server.stdin.write(f"{delays.uniform(0.0, longest)}\n")
                server.stdin.flush()
                resumed.append(server.stdout.readline().strip())
                assert resumed[-1].lstrip("-").isdecimal(), resumed
                if resumed[-1] in resumed[:-1]:  # no save was done; a busy machine needs longer
                    longest *= 1.3
                complete = {str(step) for step in Checkpointer(root).all_steps()}
                # A kill may come before the first save has made the directory.
                names = {path.name for path in root.glob("*") if path.is_dir()}
                leftovers += bool(names - complete)
                saves = len(set(resumed)) - 1
                if number >= KILLS and saves >= KILLS // 2 and leftovers >= 3:
                    break
        finally:
            server.kill()
    steps = [int(step) for step in resumed]
    assert steps == sorted(steps), "a kill lost a checkpoint that was complete"
    assert steps[0] == -1
    assert saves >= KILLS // 2, f"too few saves to prove anything: {steps}"
    assert leftovers >= 3, f"only {leftovers} kills hit a save"


WRITER = """
import resource, shutil, sys
import jax, jax.numpy as jnp
from fornax.checkpoint import Checkpointer
from fornax.config.errors import CheckpointError

root, limit, leave = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
small, large = {"w": jnp.ones((100, 100))}, {"w": jnp.ones((1000, 1000))}
it = Checkpointer(root)
it.save(1, state=small, force=True)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
if leave:
    with open(root + ".filler", "wb") as file:
        file.write(bytes(shutil.disk_usage(root).free - leave))
try:
    it.save(2, state=large)
    while it.saving:
        pass
    print("begun")
    it.check()
except CheckpointError as error:
    print(type(error).__name__, "refused:", error)
wanted = {"w": jax.ShapeDtypeStruct((100, 100), jnp.float32)}
print("steps", it.all_steps(), "sum", float(it.restore(wanted).state["w"].sum()))
it.save(3, state=small, force=True)
print("steps", it.all_steps())
it.close()
"""


def write(root, limit=0, leave=0):
    return subprocess.run(
        [sys.executable, "-c", WRITER, str(root), str(limit), str(leave)],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment(),
    )


@pytest.mark.slow
def test_a_file_that_cannot_grow_fails_at_the_next_check_and_harms_nothing(tmp_path):
    done = write(tmp_path / "run", limit=1_000_000)
    assert "refused: saving step 2" in done.stdout, done.stdout + done.stderr
    assert "file-size limit" in done.stdout
    assert "Step 1 is intact" in done.stdout
    assert "steps [1] sum 10000.0" in done.stdout
    assert "steps [1, 3]" in done.stdout


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MB; needs the right to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk is not permitted here; the file-size test covers it")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.fault
@pytest.mark.parametrize("leave", [3_000_000, 4_008_000])
def test_a_full_disk_fails_before_the_save_or_at_the_next_check_and_harms_nothing(
    small_disk, leave: int
):
    """Where the arrays, 4 MB, do not fit, it is not begun; where their index does not, it fails."""
    done = write(small_disk / "run", leave=leave)
    assert "DiskFullError refused: saving step 2" in done.stdout, done.stdout + done.stderr
    assert ("begun" in done.stdout) == (leave > 4_000_000)
    assert "no space left on the disk" in done.stdout
    assert "Step 1 is intact" in done.stdout
    assert "steps [1] sum 10000.0" in done.stdout
    assert "steps [1, 3]" in done.stdout


@pytest.mark.fault
def test_a_read_only_disk_is_refused_and_still_restores(small_disk):
    import jax
    import jax.numpy as jnp

    from fornax.config.errors import CheckpointError

    root = small_disk / "run"
    with Checkpointer(root) as it:
        it.save(1, state={"w": jnp.ones(3)}, force=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with Checkpointer(root) as it:
        with pytest.raises(CheckpointError, match="Read-only file system"):
            it.save(2, state={"w": jnp.ones(3)})
        wanted = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
        assert it.restore(wanted).step == 1
