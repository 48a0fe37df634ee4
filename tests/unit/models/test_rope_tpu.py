"""Rotary embeddings by the TPU compiler: what a rotation and its gradient move."""

import importlib.util
import subprocess
import sys

import pytest

from fornax.config.environment import for_child, tpu_compiler

_COMPILE = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from fornax import kernels
from fornax.hlo import analyse, parse
from fornax.mesh import MeshConfig, make_mesh

B, T, N, H, D = 2, 8192, 32, 128, 4096
topology = topologies.get_topology_desc(topology_name="v6e:2x2", platform="tpu")
mesh = make_mesh(MeshConfig(fsdp=4), topology.devices[:4])

def array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

def rotated(x, w, cos, sin, dy):
    # Projected before and laid out by heads after, as in a layer.
    def queries(x, w):
        return kernels.rotary_embedding((x @ w).reshape(B, T, N, H), cos, sin).swapaxes(1, 2)
    q, back = jax.vjp(queries, x, w)
    return q, back(dy)

angles = array((B, T, H // 2), jnp.float32)
with kernels.target_platform("tpu"):
    lowered = jax.jit(rotated).lower(
        array((B, T, D)), array((D, N * H)), angles, angles, array((B, N, T, H)))
facts = analyse(parse(lowered.compile().as_text()), dict(mesh.shape))
print(facts.bytes / (2 * B * T * N * H))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)
@pytest.mark.tpu
@pytest.mark.slow
def test_a_rotation_reads_its_input_and_writes_its_result() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env=for_child(tpu_compiler("v6e-4")),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Arrays of the queries' size: the product writes one, its gradients read two and write one, a
    # gradient that comes in by heads is laid out again by two, and each rotation takes two.
    assert float(done.stdout) < 11
