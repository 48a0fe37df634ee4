"""The table of support says what is so: the TPU compiler takes what it calls compiled."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fornax.config.environment import for_child, tpu_compiler

_COMPILE = """
import sys
import jax
from jax.experimental import topologies
from jax.sharding import PartitionSpec
from tests.kernel_calls import sample_call
from fornax import kernels
from fornax.mesh import MeshConfig, make_mesh
from fornax.plan.kernels.report import support_rows

topology = topologies.get_topology_desc(topology_name=sys.argv[1], platform="tpu")
mesh = make_mesh(MeshConfig(), topology.devices[:1])
for name, implementation, _, tpu, _ in support_rows():
    if tpu != "compiled" or implementation == "ring":  # which needs a mesh: test_ring_tpu.py
        continue
    operation = kernels.operations()[name]
    [one] = [each for each in operation.implementations if each.name == implementation]
    call = sample_call(name, implementation, "tpu")
    assert one.reason(call) is None, (name, implementation, one.reason(call))
    with kernels.target_platform("tpu"):
        work = operation.benchmark(call, one.run)
        # As one device's share: a kernel asks the mesh which chip it is compiled for.
        share = jax.shard_map(
            work, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False)
        jax.jit(share).lower().compile()
    print(name, implementation, flush=True)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)
@pytest.mark.tpu
@pytest.mark.slow
def test_the_tpu_compiler_takes_what_the_table_calls_compiled() -> None:
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, "v6e:2x2"],
        env={
            **for_child(tpu_compiler("v6e-4")),
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= 10
