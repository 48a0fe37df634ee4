"""Paged attention for TPU: what it declines, how it cuts a step, and that the compiler takes it.

Its numbers are compared in `tests/numerics/kernels/test_paged_attention.py`, interpreted.
Legend: T tokens of the step, R rows (sequences).
"""

import importlib.util
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import kernels
from fornax.config.environment import for_child, tpu_compiler
from fornax.kernels._paged_attention import tpu_items
from fornax.kernels._paged_attention.call import PagedInputs

_COMPILE = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from fornax import kernels
from fornax.mesh import MeshConfig, make_mesh, use_mesh

topology = topologies.get_topology_desc(topology_name=sys.argv[1], platform="tpu")
mesh = make_mesh(MeshConfig(fsdp=1), topology.devices[:1])
ints, L, P = jnp.int32, 4, 2000

def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

def check(tokens, rows, width, heads, kv_heads, head_dim, *, dtype=jnp.bfloat16, cached=None,
          page=16, sinks=False, **options):
    cached = jnp.dtype(cached or dtype)
    half, joined = kernels.paged_head_layout(head_dim, kv_heads, cached.name)
    assert half == head_dim
    slot = (kv_heads, 2 * head_dim) if joined else (2 * kv_heads, head_dim)

    def step(kv, q, k, v, slots, table, start, lens, sinks_N):
        prepared = kernels.prepare_paged_attention(
            q, kv, page_table_RW=table, query_start_R1=start, context_lens_R=lens,
            sinks=sinks, **options)
        def layer(carry, index):
            kv, q = carry
            o, kv = kernels.paged_attention_update(
                q, k, v, kv, layer=index, slots_T=slots, page_table_RW=table,
                query_start_R1=start, context_lens_R=lens, scale=0.1, prepared=prepared,
                sinks_N=sinks_N if sinks else None, implementation="pallas_tpu", **options)
            return (kv, o), None
        return jax.lax.scan(layer, (kv, q), jnp.arange(L, dtype=ints))[0]

    cache = jax.tree.map(
        lambda x: array(x.shape, x.dtype),
        jax.eval_shape(lambda: kernels.empty_pages((L, P, page, *slot), 2 * kv_heads, cached)))
    new = array((tokens, kv_heads, head_dim), dtype)
    arguments = (
        array((tokens, heads, head_dim), dtype), new, new, array((tokens,), ints),
        array((rows, width), ints), array((rows + 1,), ints), array((rows,), ints),
        array((heads,), jnp.float32))
    with kernels.target_platform("tpu"), use_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=0).lower(cache, *arguments).compile()
    memory = compiled.memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    # The cache is written where it lies: nothing as large as a layer of it is made.
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / L, memory
    text = compiled.as_text()
    assert "tpu_custom_call" in text and " scatter(" not in text
    if tokens <= rows and width * page >= 8192 and not options:
        # Beside the kernel, which is counted as reading full contexts once, little is moved.
        ideal = tokens * width * page * 2 * kv_heads * kernels.cache_vector_bytes(head_dim, cached)
        assert compiled.cost_analysis()["bytes accessed"] < 1.1 * ideal

for call in sys.argv[2:]:
    eval(f"check({call})")
"""
CODES = (
    "256, 256, 512, 32, 8, 128, cached='int8'",
    "2048, 64, 512, 8, 4, 256, window=4096, softcap=50.0, cached='float8_e4m3fn'",
)
LLAMA_DECODE = "256, 256, 512, 32, 8, 128"
LLAMA_PROMPT = "2048, 256, 512, 32, 8, 128"
GPT_OSS = "256, 256, 8192, 64, 8, 64, sinks=True, window=128"
GEMMA = "2048, 64, 512, 8, 4, 256, window=4096, softcap=50.0"
LARGEST = "2048, 64, 512, 32, 16, 256, dtype=jnp.float32"


@pytest.mark.tpu
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)
@pytest.mark.parametrize(
    ("topology", "calls"),
    [
        ("v6e:2x2", (LLAMA_DECODE, LLAMA_PROMPT, GPT_OSS, GEMMA, LARGEST)),
        ("v6e:2x2", CODES),
        ("v5p:2x2x1", (LLAMA_PROMPT, GPT_OSS, GPT_OSS + ", cached='int8'")),
        ("v5e:2x2", ("256, 256, 512, 4, 1, 128", "1, 8, 512, 28, 4, 128, dtype=jnp.float32")),
        ("v5e:2x2", ("64, 64, 64, 16, 8, 192", "64, 64, 64, 4, 2, 64, page=128")),
        ("v5e:2x2", (CODES[0], "64, 64, 64, 4, 2, 128, page=128, cached='float8_e4m3fn'")),
    ],
    ids=["v6e", "v6e, codes", "v5p", "v5e", "v5e, other widths and pages", "v5e, codes"],
)
def test_tpu_compiler_takes_real_sizes_and_copies_no_cache(
    topology: str, calls: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, topology, *calls],
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


def test_cuts_a_step_where_rows_and_blocks_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is in one item and is written by one, whole pages where a row has them."""
    monkeypatch.setattr(tpu_items, "_BLOCK_TOKENS", 8)
    inputs = PagedInputs(
        **{**_arguments(jnp.float32), "layer": jnp.int32(1)},
        sinks_N=None,
        window=None,
        softcap=None,
    )
    items = tpu_items.prepare(inputs)
    names = ("block", "row", "token", "count", "position", "write", "write_end")
    fields = dict(zip(names, np.asarray(items.fields).reshape(len(names), -1), strict=True))
    found = np.stack([fields[name] for name in names], axis=1)
    assert items.count == 8
    np.testing.assert_array_equal(
        found[:8],
        [
            [0, 0, 0, 1, 8, 0, 1],
            [0, 1, 1, 1, 0, 1, 2],
            [0, 2, 2, 6, 6, 2, 8],
            [1, 2, 0, 8, 12, 8, 16],
            [2, 3, 0, 1, 4, 16, 17],
            [2, 4, 1, 3, 0, 17, 20],
            [2, 5, 4, 4, 6, 20, 26],  # positions 6 to 11: a page is written as a whole
            [3, 5, 0, 7, 10, 26, 31],
        ],
    )
    assert not found[8:].any()


@pytest.mark.parametrize(
    ("width", "kv_heads", "dtype", "layout"),
    [
        (64, 8, "bfloat16", (64, True)),
        (64, 1, "bfloat16", (128, False)),  # two rows share 32 bits
        (64, 1, "float32", (64, True)),
        (64, 8, "float8_e4m3fn", (64, True)),
        (64, 2, "int8", (128, False)),  # four rows share 32 bits
        (64, 1, "int8", (64, True)),  # which the kernel cannot tile, and XLA takes
        (96, 8, "bfloat16", (128, False)),
        (128, 8, "bfloat16", (128, False)),
        (192, 8, "bfloat16", (192, True)),
        (256, 4, "bfloat16", (256, False)),
    ],
)
def test_a_cache_fills_lanes(
    width: int, kv_heads: int, dtype: str, layout: tuple[int, bool]
) -> None:
    assert kernels.paged_head_layout(width, kv_heads, dtype) == layout


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"q_TNH": jnp.ones((36, 8, 64)), "kv_LPSCH": jnp.ones((2, 12, 4, 8, 64))},
            "multiples of 128",
        ),
        ({"shared": True}, "keys and values apart"),
        (
            {"q_TNH": jnp.ones((36, 6, 128)), "kv_LPSCH": jnp.ones((2, 12, 4, 6, 128))},
            "cannot tile 3",
        ),
        ({"kv_LPSCH": jnp.ones((2, 12, 4, 8, 128), jnp.float8_e4m3fn)}, "float8_e4m3fn"),
        ({"kv_LPSCH": jnp.ones((2, 12, 3, 8, 128))}, "power of two"),
        ({"kv_LPSCH": kernels.empty_pages((2, 12, 16, 4, 128), 4, jnp.int8)}, "not 64"),
        ({"kv_LPSCH": kernels.empty_pages((2, 12, 64, 2, 128), 2, jnp.int8)}, "cannot tile 1"),
        ({"kv_LPSCH": jnp.ones((1, 2, 1024, 8, 128)), "layer": 0}, "2,097,152 bytes"),
    ],
)
def test_declines_and_leaves_to_xla(changes: dict[str, Any], reason: str) -> None:
    arguments = _arguments(jnp.float32, **changes)
    with kernels.target_platform("tpu"):
        with pytest.raises(kernels.KernelError, match=reason):
            kernels.paged_attention(**arguments, implementation="pallas_tpu")
        assert jax.eval_shape(lambda: kernels.paged_attention(**arguments)).shape == (
            arguments["q_TNH"].shape
        )
