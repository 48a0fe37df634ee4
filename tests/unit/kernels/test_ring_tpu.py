"""Ring attention for TPU: that the TPU compiler takes it, and sends keys while it computes."""

import importlib.util
import subprocess
import sys

import pytest

from fornax.config.environment import for_child, tpu_compiler

_COMPILE = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from fornax import kernels
from fornax.hlo import analyse, parse
from fornax.mesh import MeshConfig, make_mesh, use_mesh

topology = topologies.get_topology_desc(topology_name=sys.argv[1], platform="tpu")
mesh = make_mesh(MeshConfig(fsdp=1, context=4), topology.devices[:4])
B, T, N, K, H = 1, 8192, 8, 2, 128

def array(shape, dtype):
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(None, "context")))

ids = array((B, T), jnp.int32)
arrays = [array((B, T, n, H), jnp.bfloat16) for n in (N, K, K)]

def loss(q, k, v, positions, segments, sinks):
    o = kernels.attention(
        q, k, v, scale=0.1, positions_q_BT=positions, positions_k_BS=positions,
        segment_ids_q_BT=segments, segment_ids_k_BS=segments, consecutive=True,
        balanced=True, sinks_N=sinks, exchange="ring")
    return jnp.sum(o.astype(jnp.float32))

sinks = jax.ShapeDtypeStruct((N,), jnp.float32)
with kernels.target_platform("tpu"), use_mesh(mesh):
    lowered = jax.jit(jax.grad(loss, (0, 1, 2, 5))).lower(*arrays, ids, ids, sinks)
text = lowered.compile().as_text()
found = analyse(parse(text), dict(mesh.shape))
kinds = {each.kind for each in found.collectives}
assert kinds <= {"collective-permute", "all-reduce"}, kinds  # the sinks' gradient is added up
assert "collective-permute-start" in text
ideal = 7 * 2 * H * N * T * T / 2 / 4
assert ideal <= found.flops <= 1.1 * ideal, found.flops / ideal
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)
@pytest.mark.tpu
@pytest.mark.slow
def test_tpu_compiler_takes_a_ring_of_four_chips() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, "v5e:2x2"],
        env=for_child(tpu_compiler("v5e-4")),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
