"""Grouped products for TPU: that the TPU compiler takes the kernels with their gradients.

Legend: M rows, E groups, K inputs, N outputs.
"""

import importlib.util
import json
import subprocess
import sys

import pytest

from fornax.config.environment import for_child, tpu_compiler

_COMPILE = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from fornax import kernels
from fornax.mesh import MeshConfig, make_mesh, use_mesh

topology = topologies.get_topology_desc(topology_name=sys.argv[1], platform="tpu")
mesh = make_mesh(MeshConfig(fsdp=4), topology.devices[:4])
for M, E, K, N, dtype in json.loads(sys.argv[2]):
    def array(shape, dtype, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def local(x, w, sizes):
        y = kernels.grouped_matmul(x, w, sizes, implementation="megablox")
        return jnp.sum(y.astype(jnp.float32) ** 2)[None]

    def loss(x, w, sizes):
        rows = PartitionSpec("fsdp")
        run = jax.shard_map(
            local, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows, check_vma=False)
        return jnp.sum(run(x, w, sizes))

    arrays = [array((4 * M, K), dtype, "fsdp"), array((4 * E, K, N), dtype, "fsdp"),
              array((4 * E,), jnp.int32, "fsdp")]
    with kernels.target_platform("tpu"), use_mesh(mesh):
        text = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays).compile().as_text()
    calls = text.count('custom_call_target="tpu_custom_call"')
    assert calls == 3, calls
"""

_CASES = [
    (4096, 16, 2048, 768, "bfloat16"),
    (64, 32, 2048, 768, "bfloat16"),
    (1000, 3, 300, 129, "bfloat16"),
    (2048, 8, 2048, 1408, "float32"),
]
"""Of one device: a training step, decoding, sizes that tiles do not divide, float32."""
_WIDE = [(8192, 2, 4096, 14336, "bfloat16"), (8192, 2, 14336, 4096, "float32")]


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)
@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v6e:2x2"])
def test_tpu_compiler_takes_the_kernels(topology: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, topology, json.dumps(_CASES + _WIDE)],
        env=for_child(tpu_compiler(topology.split(":")[0] + "-4")),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
