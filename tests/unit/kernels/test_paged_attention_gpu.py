"""Paged attention for Hopper: what it declines, that real sizes lower, and what they move.

Its numbers are compared in `tests/numerics/kernels/test_paged_attention_hopper.py`, interpreted.
Legend: T tokens of the step, N query heads, K key/value heads, H head width, L layers, P pages,
S slots of a page, R rows (sequences), W pages of a table's row.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.cuda import lower_for_cuda

from fornax import kernels
from fornax.kernels._paged_attention.call import PagedCall
from fornax.mesh import MeshConfig, make_mesh, use_mesh

CALL = PagedCall(
    "gpu", 32, 32, 512, 16, 32, 8, 128, "bfloat16", "bfloat16", None, None, False, False
)


def _reason(**changes: Any) -> str:
    call = dataclasses.replace(CALL, **changes)
    return kernels.paged_attention_operation.explain(call)["pallas_gpu"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "tpu"}, "runs on gpu, not on tpu"),
        ({"dtype": "float32", "cache_dtype": "float32"}, "bfloat16 and float16, not float32"),
        ({"cache_dtype": "float8_e4m3fn"}, "a cache of the queries' bfloat16, not float8_e4m3fn"),
        ({"shared": True}, "reads keys and values apart"),
        ({"head_dim": 96}, "width 64, 128 and 256, not 96"),
        ({"heads": 128, "kv_heads": 1}, "up to 64 query heads a key head, not 128"),
        ({"page_size": 24}, "8, 16, 32 or a multiple of 64 tokens, not 24"),
        ({"capability": 8.0}, "those of a Hopper (9.0), which a GPU of 8.0 does not have"),
        ({"capability": 10.0}, "which a GPU of 10.0 does not have"),
    ],
    ids=str,
)
def test_declines_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in _reason(**changes)
    assert kernels.paged_attention_operation.choice(CALL).implementation == "pallas_gpu"


def test_declines_where_jax_cannot_interpret_it() -> None:
    with kernels.target_platform("gpu", interpret=True):
        assert "no public interpreter" in _reason()


def _lower(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    rows: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    page: int = 16,
    joined: bool = False,
    sinks: bool = False,
    dtype: Any = jnp.bfloat16,
    **options: Any,
) -> str:
    """The program of one call of a stack of layers, as StableHLO."""
    slot = (kv_heads, 2 * head_dim) if joined else (2 * kv_heads, head_dim)
    ints, array = jnp.int32, jax.ShapeDtypeStruct

    def attend(q: jax.Array, kv: jax.Array, sinks_N: jax.Array, *rows: jax.Array) -> jax.Array:
        layer, table, start, lens = rows
        return kernels.paged_attention(
            q, kv, layer=layer, page_table_RW=table, query_start_R1=start, context_lens_R=lens,
            sinks_N=sinks_N if sinks else None, scale=0.1, **options,
        )  # fmt: skip

    return lower_for_cuda(
        monkeypatch, attend, array((tokens, heads, head_dim), dtype),
        array((4, 20_000, page, *slot), dtype), array((heads,), jnp.float32), array((), ints),
        array((rows, width), ints), array((rows + 1,), ints), array((rows,), ints),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param((1, 256, 512, 32, 8, 128), {}, id="Llama, one sequence"),
        pytest.param((2048, 256, 512, 32, 8, 128), {"dtype": jnp.float16}, id="Llama, prompts"),
        pytest.param((256, 256, 8192, 64, 8, 64), {"sinks": True, "window": 128}, id="gpt-oss"),
        pytest.param((64, 64, 512, 8, 4, 256), {"window": 4096, "softcap": 50.0}, id="Gemma"),
        pytest.param((32, 32, 512, 28, 4, 128), {"page": 64, "joined": True}, id="Qwen, joined"),
    ],
)
def test_real_sizes_lower_for_cuda(
    sizes: tuple[int, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = _lower(monkeypatch, *sizes, **options)
    assert text.count("custom_call @mosaic_gpu") == 1
    # The kernel has the cache as it lies, in another shape; nothing is gathered from it.
    lines = [line for line in text.splitlines() if "tensor<4x20000x" in line]
    assert [line.split(" = ")[-1].split(" ")[0] for line in lines[1:]] == ["stablehlo.reshape"]


def test_an_engine_of_two_devices_prepares_once_and_runs_it_in_a_scan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    T, R, W, N, K, H, ints = 32, 32, 64, 8, 4, 64, jnp.int32
    array = jax.ShapeDtypeStruct

    def step(kv: jax.Array, q: jax.Array, k: jax.Array, *rows: jax.Array) -> jax.Array:
        slots, table, start, lens = rows
        given = {"page_table_RW": table, "query_start_R1": start, "context_lens_R": lens}
        prepared = kernels.prepare_paged_attention(q, kv, **given)
        assert prepared.implementation == "pallas_gpu"

        def layer(carry: tuple[jax.Array, jax.Array], index: jax.Array) -> tuple[Any, None]:
            kv, q = carry
            q, kv = kernels.paged_attention_update(
                q, k, k, kv, layer=index, slots_T=slots, scale=0.1, prepared=prepared, **given
            )
            return (kv, q), None

        return jax.lax.scan(layer, (kv, q), jnp.arange(4, dtype=ints))[0][1]

    with use_mesh(make_mesh(MeshConfig(fsdp=1, tensor=2), jax.devices()[:2])):
        text = lower_for_cuda(
            monkeypatch, step, array((4, 200, 16, 2 * K, H), jnp.bfloat16),
            array((T, N, H), jnp.bfloat16), array((T, K, H), jnp.bfloat16), array((T,), ints),
            array((R, W), ints), array((R + 1,), ints), array((R,), ints),
        )  # fmt: skip
    [call] = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    assert f"tensor<{4 * 200 * 16}x{2 * K * H // 2}xbf16>" in call  # a device's half of the heads


def test_moves_little_beside_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3 8B, 32 sequences of 4,096 tokens: queries and parts' sums are written and read."""
    text = _lower(monkeypatch, 32, 32, 512, 32, 8, 128)
    [types] = re.findall(r"custom_call @mosaic_gpu.*: \((tensor.*)\n", text)
    size = {"i32": 4, "bf16": 2, "f32": 4}
    arrays = [
        math.prod(map(int, shape.split("x"))) * size[dtype]
        for shape, dtype in re.findall(r"tensor<([\dx]+)x([a-z]\w*)>", types)
    ]
    cache = 4 * 20_000 * 16 * 16 * 128 * 2
    arrays.remove(cache)
    keys_and_values = 32 * 4096 * 16 * 128 * 2
    moved = keys_and_values + 2 * sum(arrays)
    assert moved / keys_and_values < 1.01
