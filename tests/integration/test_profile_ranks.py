"""Two processes of one program captured together: one folder, one clock, the late rank named; and
two of a server, of which the first is asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import held_port
from tests.xla_flags import xla_flags

from fornax import profile

pytestmark = pytest.mark.slow

STEPS, LATE = 6, 0.5

PROGRAM = """
import sys, time
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from fornax import profile

rank, port, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("127.0.0.1:" + port, 2, rank)
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("data"))
x = jax.make_array_from_callback((8, 64), sharding, lambda index: jnp.ones((8, 64))[index])
step = jax.jit(lambda x: (x @ x.T).sum())
step(x).block_until_ready()
with profile.capture(out):
    for number in range({steps}):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            time.sleep({late} * rank)
            step(x).block_until_ready()
"""


SERVER = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from fornax import profile
from fornax.config.errors import ProfileError
from fornax.mesh.group import Leader, join_group
from fornax.mesh.startup import initialize

initialize()
joined = join_group({})
compute = jax.jit(lambda x: jnp.tanh(x @ x))
x = jnp.ones((64, 64))
compute(x).block_until_ready()

if isinstance(joined, Leader):
    joined.watch(lambda error: None)
    captures = profile.OnDemand(Path(sys.argv[1]), joined)
    for _ in range(2):
        captures.start(60)
        for _ in range(5):
            joined.tell("compute")
            compute(x).block_until_ready()
        try:
            print("whole", captures.stop().name)
        except ProfileError as error:
            print("failed", error)
        joined.tell("no folder any more")
    joined.close()
else:
    captures = profile.FollowedCaptures(Path(sys.argv[1]), joined)
    for operation in joined.operations():
        if operation.name == profile.CAPTURE:
            captures.carry_out(operation.facts)
        elif operation.name == "compute":
            compute(x).block_until_ready()
        else:
            captures = profile.FollowedCaptures(None, joined)
"""


def run_two(program: Path, *words: str, **variables: str) -> list[str]:
    """What two processes of a program say, which are given their number and words."""
    environment = {**os.environ, "XLA_FLAGS": xla_flags()}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), *(word.format(rank=rank) for word in words)],
            env={**environment, **{n: v.format(rank=rank) for n, v in variables.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=400)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    return told


def test_a_server_of_two_processes_is_captured_in_both(tmp_path: Path):
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    told, _ = run_two(
        program,
        str(tmp_path / "prof"),
        FORNAX_COORDINATOR=f"127.0.0.1:{held_port()}",
        FORNAX_NUM_PROCESSES="2",
        FORNAX_PROCESS_ID="{rank}",
    )
    first, second = profile.captures(tmp_path / "prof")
    assert f"whole {first.name}" in told
    read = profile.read(first)
    assert read.info.ranks == (0, 1)
    assert {row.rank for row in read.rows if row.kind == "operations"} == {0, 1}
    assert not [note for note in read.info.notes if "ranks are not" in note]
    assert f"failed the profile in {second} lacks a process: process 1: it was started" in told
    assert "1 of 2 ranks are not in this folder" in profile.read(second).info.notes


def test_ranks_share_a_folder_and_a_late_one_is_named(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(steps=STEPS, late=LATE))
    out = tmp_path / "prof"
    run_two(program, "{rank}", str(held_port()), str(out))
    (folder,) = profile.captures(out)
    assert sorted(path.name for path in folder.glob("*.json")) == [
        "capture-0.json",
        "capture-1.json",
    ]
    read = profile.read(out)
    assert read.info.ranks == (0, 1)
    assert read.info.devices == 2
    assert len([program for program in read.programs if "lambda" in program.name]) == 1
    skew = read.skew()
    assert [each.number for each in skew] == list(range(STEPS))
    assert sum(each.late_rank == 1 for each in skew) > STEPS // 2
    ends = {(step.rank, step.number): step.end for step in read.steps}
    apart = sorted(abs(ends[0, number] - ends[1, number]) for number in range(STEPS))
    assert apart[STEPS // 2] < LATE * 1e9 / 2
