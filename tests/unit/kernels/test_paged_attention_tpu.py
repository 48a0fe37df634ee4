"""Paged attention for TPU: what we hand to JAX's kernel, and that the TPU compiler takes it.

Legend: T tokens of the step, R rows (sequences).
"""

import functools
import importlib.util
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as upstream

from fornax import kernels
from fornax.config.environment import for_child, tpu_compiler
from fornax.kernels._paged_attention import tpu

_COMPILE = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from fornax import kernels
from fornax.mesh import MeshConfig, make_mesh, use_mesh

topology = topologies.get_topology_desc(topology_name=sys.argv[1], platform="tpu")
mesh = make_mesh(MeshConfig(fsdp=1, tensor=4), topology.devices[:4])
K = 16

def step(kv, q, slots, table, start, lens):
    def layer(carry, index):
        kv, q = carry
        kv = kernels.paged_write(kv, q[:, :K], q[:, :K], layer=index, slots_T=slots)
        o = kernels.paged_attention(
            q, kv, layer=index, page_table_RW=table, query_start_R1=start, context_lens_R=lens,
            scale=0.1, window=1024, softcap=50.0, implementation="pallas_tpu")
        return (kv, o), None
    return jax.lax.scan(layer, (kv, q), jnp.arange(4, dtype=jnp.int32))[0]

def array(shape, dtype, *axes):
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

ints = jnp.int32
cache = array((4, 200, 16, 2 * K, 128), jnp.bfloat16, None, None, None, "tensor")
arguments = (
    array((64, 64, 128), jnp.bfloat16, None, "tensor"),
    array((64,), ints), array((32, 64), ints), array((33,), ints), array((32,), ints))
with kernels.target_platform("tpu"), use_mesh(mesh):
    compiled = jax.jit(step, donate_argnums=0).lower(cache, *arguments).compile()
text = compiled.as_text()
assert "tpu_custom_call" in text
assert not [line for line in text.splitlines() if " copy(" in line and "[4,200,16,8,128]" in line]
"""


@pytest.mark.tpu
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
def test_tpu_compiler_takes_the_kernel_and_copies_no_cache(topology: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, topology],
        env=for_child(tpu_compiler(topology.split(":")[0] + "-4")),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def _arguments(dtype: Any, **changes: Any) -> dict[str, Any]:
    """A decode, chunks of prompts, two rows without tokens; five padding tokens."""
    rng = np.random.default_rng(0)
    pages = np.resize(1 + rng.permutation(11), (8, 5))
    arguments: dict[str, Any] = {
        "q_TNH": jnp.asarray(rng.normal(size=(36, 8, 128)), dtype),
        "kv_LPSCH": jnp.asarray(rng.normal(size=(2, 12, 4, 8, 128)), dtype),
        "layer": 1,
        "page_table_RW": jnp.asarray(pages, jnp.int32),
        "query_start_R1": jnp.asarray([0, 1, 2, 16, 17, 20, 31, 31, 31], jnp.int32),
        "context_lens_R": jnp.asarray([9, 1, 20, 5, 3, 17, 0, 0], jnp.int32),
        "scale": 0.1,
    }
    return {**arguments, **changes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (8, {}),
        (8, {"window": 5}),
        (8, {"softcap": 2.0}),
        pytest.param(4, {}, marks=pytest.mark.slow),
        pytest.param(1, {"window": 5}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_hands_rows_pages_and_options_to_the_kernel(
    options: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX's own reference stands in for its kernel, which runs on TPUs only.

    Scalar memory holds the page table of all eight rows, or of so few that the step runs in chunks.
    """
    seen = []

    def reference(q: np.ndarray, *arrays: np.ndarray, **options: Any) -> np.ndarray:
        o = upstream.kernel.ref_ragged_paged_attention(*map(jnp.asarray, (q, *arrays)), **options)
        padding = np.full((len(q) - len(o), *q.shape[1:]), np.nan, q.dtype)
        return np.concatenate([np.asarray(o), padding])

    def stand_in(q: jax.Array, *arrays: jax.Array, **options: Any) -> jax.Array:
        assert options.pop("num_kv_pages_per_block") == 5
        assert options.pop("num_queries_per_block") == min(32, len(q))
        seen.append((len(q), arrays[2].shape))
        run = functools.partial(reference, **options)
        return jax.pure_callback(run, jax.ShapeDtypeStruct(q.shape, q.dtype), q, *arrays)

    monkeypatch.setattr(upstream, "ragged_paged_attention", stand_in)
    monkeypatch.setattr(tpu, "_TABLE_BYTES", rows * 128 * 4)
    arguments = _arguments(jnp.float32, **options)
    expected = kernels.paged_attention(**arguments, implementation="reference")
    with kernels.target_platform("tpu"):
        found = kernels.paged_attention(**arguments, implementation="pallas_tpu")
    assert seen == [(36 if rows == 8 else rows, (rows, 5))]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    if rows < 8:  # the reference ran hundreds of shapes, each a program that nothing else needs
        jax.clear_caches()


def test_takes_as_many_rows_as_half_of_scalar_memory_holds() -> None:
    assert tpu.rows_at_once(256, 512) == 256
    assert tpu.rows_at_once(256, 8192) == 16
    assert tpu.rows_at_once(256, 8193) == 8
    assert tpu.rows_at_once(256, 2**20) == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"q_TNH": jnp.ones((36, 8, 64)), "kv_LPSCH": jnp.ones((2, 12, 4, 8, 64))},
            "multiple of 128",
        ),
        ({"sinks_N": jnp.ones(8)}, "knows no sinks"),
        ({"shared": True}, "keys and values apart"),
        (
            {"q_TNH": jnp.ones((36, 6, 128)), "kv_LPSCH": jnp.ones((2, 12, 4, 6, 128))},
            "cannot tile 3",
        ),
        ({"kv_LPSCH": jnp.ones((2, 12, 4, 8, 128), jnp.float8_e4m3fn)}, "float8_e4m3fn"),
        ({"page_table_RW": jnp.ones((8, 2**18), jnp.int32)}, "larger pages"),
    ],
)
def test_declines_and_leaves_to_xla(changes: dict[str, Any], reason: str) -> None:
    arguments = _arguments(jnp.float32, **changes)
    with kernels.target_platform("tpu"):
        with pytest.raises(kernels.KernelError, match=reason):
            kernels.paged_attention(**arguments, implementation="pallas_tpu")
        assert kernels.paged_attention(**arguments).shape == arguments["q_TNH"].shape
