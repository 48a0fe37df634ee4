"""Flash attention for TPU: that the TPU compiler takes the kernel, on meshes and for all widths."""

import importlib.util
import json
import subprocess
import sys

import pytest

from fornax.config.environment import for_child, tpu_compiler

_COMPILE = """
import json, re, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from fornax import kernels
from fornax.kernels._attention.blocks import choose_blocks
from fornax.mesh import MeshConfig, make_mesh, use_mesh

topology = topologies.get_topology_desc(topology_name=sys.argv[1], platform="tpu")
for case in json.loads(sys.argv[2]):
    N, K, T, H = case.pop("N", 8), case.pop("K", 4), case.pop("T", 2048), case.pop("H", 128)
    dtype = case.pop("dtype", "bfloat16")
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **case.pop("mesh", {"tensor": 2, "fsdp": 2})}),
                     topology.devices[:4])

    def array(shape, dtype, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    ids = array((2, T), jnp.int32, "fsdp", "context")
    arrays = [array((2, T, n, H), dtype, "fsdp", "context", "tensor") for n in (N, K, K)]

    def loss(q, k, v, positions, segments):
        o = kernels.attention(
            q, k, v, scale=0.1, positions_q_BT=positions, positions_k_BS=positions,
            segment_ids_q_BT=segments, segment_ids_k_BS=segments, consecutive=True,
            implementation="splash", **case)
        return jnp.sum(o.astype(jnp.float32))

    with kernels.target_platform("tpu"), use_mesh(mesh):
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays, ids, ids)
    text = lowered.compile().as_text()
    calls = text.count('custom_call_target="tpu_custom_call"')
    costs = re.findall(r'op_name="[^"]*splash:fwd=[0-9]+,dkv=[0-9]+,dq=[0-9]+/[^"]*_call"', text)
    itemsize = jnp.dtype(dtype).itemsize
    parts = mesh.shape["context"] * (2 if case.get("balanced") else 1)
    blocks = choose_blocks(T // parts, T, H, itemsize, case.get("window"))
    assert calls == (2 if blocks.fused else 3), (calls, blocks)
    assert len(costs) >= calls
"""

_CASES = [
    {},
    {"window": 1024, "softcap": 50.0, "T": 4096},
    {"mesh": {"context": 4}, "T": 4096},
    {"mesh": {"context": 4}, "T": 4096, "balanced": True},
    {"H": 64},
    {"H": 256},
    {"dtype": "float32"},
]
_MANY = [
    {"T": 8192},
    {"T": 16384},
    {"T": 8192, "H": 256, "window": 1024},
    {"T": 8192, "H": 256},
    {"T": 8192, "H": 96, "softcap": 30.0},
    {"T": 8192, "H": 80, "K": 8},
    {"T": 8192, "dtype": "float32"},
    {"T": 8192, "dtype": "float32", "H": 256, "softcap": 30.0},
    {"T": 32768, "mesh": {"context": 4}, "balanced": True},
]


def _compile(topology: str, cases: list[dict]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, topology, json.dumps(cases)],
        env=for_child(tpu_compiler(topology.split(":")[0] + "-4")),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.slow
def test_tpu_compiler_takes_the_kernel() -> None:
    _compile("v5e:2x2", _CASES)


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "topology", ["v5p:2x2x1", pytest.param("tpu7x:2x2x1", marks=pytest.mark.exhaustive)]
)
def test_blocks_fit_the_smallest_fast_memories(topology: str) -> None:
    _compile(topology, _MANY)
