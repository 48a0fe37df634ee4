"""Paged attention's contract: what it refuses, writes, copies, and never lets depend on the batch.

Legend: T tokens of the step, N query heads, K key/value heads, H head width, L layers, P pages,
S slots of a page, R rows (sequences), W pages of a table's row.
"""

import functools
import itertools
import os
import re
import subprocess
import sys
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.cases import one_in
from tests.numerics.kernels.paged_codes import DTYPES, encoded, pages_of
from tests.xla_flags import xla_flags

from fornax import kernels
from fornax.kernels._paged_attention.call import PagedCall, WriteCall

pytestmark = pytest.mark.usefixtures("small_process")

L, P, S, K, H, N = 2, 40, 8, 2, 32, 4
LENGTH = 600


def _arguments(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "q_TNH": jnp.ones((3, N, H)),
        "kv_LPSCH": jnp.ones((L, P, S, 2 * K, H)),
        "layer": 0,
        "page_table_RW": jnp.ones((2, 4), jnp.int32),
        "query_start_R1": jnp.asarray([0, 1, 3], jnp.int32),
        "context_lens_R": jnp.asarray([5, 2], jnp.int32),
        "scale": 1.0,
    }
    return {**arguments, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_TNH": jnp.ones((3, N, H, 1))}, "three and five dimensions"),
        ({"q_TNH": jnp.ones((3, N, 2 * H))}, "differ in head width"),
        ({"q_TNH": jnp.ones((3, 3, H))}, "3 query heads do not divide over 2 key heads"),
        ({"q_TNH": jnp.ones((0, N, H))}, "must not be empty"),
        ({"q_TNH": jnp.ones((3, N, H), jnp.int32)}, "q is int32"),
        ({"kv_LPSCH": jnp.ones((L, P, S, 3, H))}, "twice the number of key heads"),
        ({"kv_LPSCH": jnp.ones((L, P, S, 2 * K, H), jnp.int8)}, "or QuantizedPages for codes"),
        (
            {
                "kv_LPSCH": kernels.QuantizedPages(
                    jnp.ones((L, P, S, 2 * K, H), jnp.int8), jnp.ones((L, P, 2 * K, S))
                )
            },
            r"with float32 scales of shape \(2, 40, 1, 32\)",
        ),
        ({"page_table_RW": jnp.ones((4,), jnp.int32)}, r"must be \[rows, pages\]"),
        ({"page_table_RW": jnp.ones((2, 4))}, "page_table_RW is float32"),
        ({"context_lens_R": jnp.ones((3,), jnp.int32)}, "for a page table of 2 rows"),
        ({"window": 0}, "window=0 sees nothing"),
        ({"softcap": -1.0}, "softcap=-1.0 must be above 0"),
        ({"sinks_N": jnp.ones(3)}, "one value per query head"),
        ({"implementation": "fastest"}, "is unknown; use one of: native"),
    ],
)
def test_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(kernels.KernelError, match=message):
        kernels.paged_attention(**_arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": L}, "layer=2 of 2"),
        ({"page_table_RW": jnp.full((2, 4), P, jnp.int32)}, "row 0 names page 40 of 40"),
        ({"context_lens_R": jnp.asarray([33, 2], jnp.int32)}, "row 0 has context_lens=33"),
        ({"context_lens_R": jnp.asarray([5, 1], jnp.int32)}, "row 1 has context_lens=1"),
        ({"query_start_R1": jnp.asarray([0, 1, 4], jnp.int32)}, "row 1 has query_start outside"),
    ],
)
def test_native_reads_nothing_outside_the_arrays(changes: dict[str, Any], message: str) -> None:
    # Which of the two depends on whether the call was dispatched at once or queued.
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(
            kernels.paged_attention(**_arguments(implementation="native", **changes))
        )


@pytest.mark.slow
def test_nan_of_one_sequence_stays_its_own_and_is_not_hidden() -> None:
    kv = jnp.ones((L, P, S, 2 * K, H)).at[:, 2].set(jnp.nan)
    table = jnp.asarray([[1, 0, 0, 0], [2, 0, 0, 0]], jnp.int32)
    for implementation in ("native", "xla", "reference"):
        o = kernels.paged_attention(
            **_arguments(kv_LPSCH=kv, page_table_RW=table, implementation=implementation)
        )
        assert not jnp.isnan(o[0]).any()
        assert jnp.isnan(o[1:]).all()


def _sequence() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = [(LENGTH, N, H), (LENGTH, K, H), (LENGTH, K, H)]
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


ROWS, TOKENS, WIDTH = 10, 1024, LENGTH // S + 1
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 90},
    "softcap and sinks": {"softcap": 3.0, "sinks_N": np.arange(N, dtype=np.float32)},
    "shared": {"shared": True},
}


def _parts(options: str) -> int:
    """Vectors of a token and key head in the cache."""
    return 1 if "shared" in OPTIONS[options] else 2


def _cache(kv: jax.Array, dtype: Any) -> kernels.Pages:
    """The cache in `dtype`; of codes as they may come, with scales that are not numbers."""
    if dtype not in DTYPES:
        return kv.astype(dtype)
    scales = jnp.full((*kv.shape[:2], 1, kv.shape[2] * kv.shape[3]), jnp.nan)
    return kernels.QuantizedPages(kv.astype(DTYPES[dtype][0]), scales)


@functools.cache
def _program(dtype: Any, options: str) -> Any:
    """Write the sequence into a cache and attend, compiled once for every step of a test."""

    def run(kv: jax.Array, slots_T: jax.Array, q_TNH: jax.Array, **rows: Any) -> jax.Array:
        _, k, v = map(jnp.asarray, _sequence())
        values = v if _parts(options) == 2 else None
        kv = kernels.paged_write(_cache(kv, dtype), k, values, layer=1, slots_T=slots_T)
        return kernels.paged_attention(
            q_TNH,
            kv,
            layer=1,
            scale=H**-0.5,
            implementation="native",
            **rows,
            **OPTIONS[options],
        )

    return jax.jit(run)


@functools.cache
def _alone(dtype: Any, options: str) -> np.ndarray:
    """The whole sequence as one prompt, alone in the step: [LENGTH, N, H]."""
    return _in_company(dtype, options, first=0, count=LENGTH, company=[], seed=0)


def _in_company(
    dtype: Any,
    options: str,
    *,
    first: int,
    count: int,
    company: list[tuple[int, int]],
    seed: int,
) -> np.ndarray:
    """Tokens [first, first + count) of the sequence, beside rows of (context, tokens)."""
    rng = np.random.default_rng(seed)
    q, _, _ = _sequence()
    place = int(rng.integers(0, len(company) + 1))
    rows = [*company[:place], (first + count, count), *company[place:]]
    rows += [(0, 0)] * (ROWS - len(rows))
    table = 1 + rng.permutation(ROWS * WIDTH).reshape(ROWS, WIDTH)
    shape = (L, 1 + ROWS * WIDTH, S, _parts(options) * K, H)
    kv = rng.normal(size=shape).astype(np.float32)
    token = np.arange(LENGTH)
    slots = np.where(token < first + count, table[place, token // S] * S + token % S, 0)
    start = np.concatenate([[0], np.cumsum([tokens for _, tokens in rows])])
    queries = rng.normal(size=(TOKENS, N, H)).astype(np.float32)
    queries[start[place] : start[place + 1]] = q[first : first + count]
    o = _program(dtype, options)(
        kv,
        slots.astype(np.int32),
        queries,
        page_table_RW=table.astype(np.int32),
        query_start_R1=start.astype(np.int32),
        context_lens_R=np.asarray([context for context, _ in rows], np.int32),
    )
    return np.asarray(o)[start[place] : start[place + 1]]


COMPANY = st.lists(
    st.tuples(st.integers(1, LENGTH), st.integers(1, 90)).map(lambda r: (r[0], min(r))), max_size=9
)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *one_in(3, itertools.product((jnp.float32, jnp.bfloat16), OPTIONS)),
        ("int8", "window"),
        ("fp8", "softcap and sinks"),
        pytest.param("int8", "shared", marks=pytest.mark.slow),
    ],
)
@hypothesis.settings(max_examples=25)
@hypothesis.given(
    first=st.integers(0, LENGTH - 1),
    count=st.integers(1, 100),
    company=COMPANY,
    seed=st.integers(0, 2**32 - 1),
)
def test_token_is_bitwise_the_same_in_any_chunk_and_company(
    dtype: Any, options: str, first: int, count: int, company: Any, seed: int
) -> None:
    count = min(count, LENGTH - first)
    found = _in_company(dtype, options, first=first, count=count, company=company, seed=seed)
    np.testing.assert_array_equal(found, _alone(dtype, options)[first : first + count])


_HASH = """
import hashlib, sys
import jax, jax.numpy as jnp, numpy as np
from fornax import kernels
rng = np.random.default_rng(0)
kv = jnp.asarray(rng.normal(size=(1, 101, 16, 4, 64)), jnp.float32)
table = jnp.asarray(1 + np.arange(100).reshape(2, 50), jnp.int32)
q = jnp.asarray(rng.normal(size=(74, 4, 64)), jnp.float32)
o = kernels.paged_attention(
    q, kv, layer=0, page_table_RW=table, query_start_R1=jnp.asarray([0, 1, 74], jnp.int32),
    context_lens_R=jnp.asarray([799, 700], jnp.int32), scale=0.125, implementation="native")
print(hashlib.sha256(np.asarray(o).tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_token_is_bitwise_the_same_with_any_number_of_threads() -> None:
    hashes = set()
    for threads in ("1", "2", "5"):
        environment = {**os.environ, "NPROC": threads, "XLA_FLAGS": xla_flags()}
        done = subprocess.run(
            [sys.executable, "-c", _HASH],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        )
        hashes.add(done.stdout.strip())
    assert len(hashes) == 1


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("cache_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_write_puts_keys_and_values_where_slots_say(
    dtype: Any, cache_dtype: Any, implementation: str
) -> None:
    rng = np.random.default_rng(0)
    T = 90
    kv = np.asarray(jnp.asarray(rng.normal(size=(L, P, S, 2 * K, H)), cache_dtype))
    k, v = (jnp.asarray(rng.normal(size=(T, K, H)), dtype) for _ in range(2))
    slots = np.asarray(S + rng.permutation((P - 1) * S)[:T], np.int32)
    expected = kv.copy().reshape(L, P * S, 2 * K, H)
    expected[1, slots, 0::2] = np.asarray(k.astype(cache_dtype))
    expected[1, slots, 1::2] = np.asarray(v.astype(cache_dtype))
    found = kernels.paged_write(
        jnp.asarray(kv), k, v, layer=1, slots_T=jnp.asarray(slots), implementation=implementation
    )
    np.testing.assert_array_equal(np.asarray(found), expected.reshape(kv.shape))


VECTORS = {
    "zeros": 0.0,
    "too small for a scale": 1e-37,
    "small": 1e-33,
    "large": 3e38,
    "infinite": np.inf,
    "no number": np.nan,
}
"""The last number of a vector, which is its largest."""


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("codes", DTYPES)
@pytest.mark.parametrize(("width", "shared"), [(32, False), (20, True)])
def test_codes_and_scales_are_those_of_the_formula(
    width: int, shared: bool, codes: str, dtype: Any, implementation: str
) -> None:
    """Bit for bit, in the slots that are written and in all others."""
    rng = np.random.default_rng(0)
    T, parts = 90, 1 if shared else 2
    before = rng.normal(size=(L, P, S, parts * K, width))
    cache = pages_of(before, codes)
    k, v = rng.normal(size=(2, T, K, width)) * np.exp(4 * rng.normal(size=(2, T, K, 1)))
    for t, last in enumerate(VECTORS.values()):
        k[t, 1], k[t, 1, -1] = k[t, 1] * min(0.1 * abs(last), 1.0), last
    k, v = jnp.asarray(k, dtype), jnp.asarray(v, dtype)
    slots = np.asarray(S + rng.permutation((P - 1) * S)[:T], np.int32)
    found = kernels.paged_write(
        cache,
        k,
        None if shared else v,
        layer=1,
        slots_T=jnp.asarray(slots),
        implementation=implementation,
    )
    values, scales = (x.copy() for x in encoded(before, codes))
    for part, new in enumerate((k, v)[:parts]):
        written = encoded(np.asarray(new.astype(jnp.float32)), codes)
        values[1, slots // S, slots % S, part::parts] = written[0]
        scales[1, slots // S, slots % S, part::parts] = written[1]
    assert isinstance(found, kernels.QuantizedPages)
    bits = np.asarray(found.codes_LPSCH).view(np.uint8)
    np.testing.assert_array_equal(bits, values.view(np.uint8))
    scales = np.swapaxes(scales, 2, 3).reshape(L, P, 1, -1)
    np.testing.assert_array_equal(np.asarray(found.scales_LP1X), scales)
    assert np.isnan(scales).sum() == 2


@pytest.mark.parametrize("codes", one_in(2, DTYPES))
def test_what_is_no_number_in_a_cache_of_codes_stays_its_sequences_own(codes: str) -> None:
    """Zeros, of which the scale is 0, are numbers."""
    numbers = np.ones((L, P, S, 2 * K, H))
    numbers[:, 1], numbers[:, 2, 0, 0, 3] = 0, np.inf
    kv, table = pages_of(numbers, codes), jnp.asarray([[1, 0, 0, 0], [2, 0, 0, 0]], jnp.int32)
    for implementation in ("native", "xla", "reference"):
        o = kernels.paged_attention(
            **_arguments(kv_LPSCH=kv, page_table_RW=table, implementation=implementation)
        )
        np.testing.assert_array_equal(o[0], 0)
        assert jnp.isnan(o[1:, :2]).all()
        np.testing.assert_allclose(o[1:, 2:], 1, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_write_of_keys_that_are_values_puts_them_once(implementation: str) -> None:
    rng = np.random.default_rng(0)
    kv = np.asarray(jnp.asarray(rng.normal(size=(L, P, S, K, H)), jnp.bfloat16))
    k = jnp.asarray(rng.normal(size=(90, K, H)), jnp.float32)
    slots = np.asarray(S + rng.permutation((P - 1) * S)[:90], np.int32)
    expected = kv.copy().reshape(L, P * S, K, H)
    expected[1, slots] = np.asarray(k.astype(jnp.bfloat16))
    found = kernels.paged_write(
        jnp.asarray(kv), k, None, layer=1, slots_T=jnp.asarray(slots), implementation=implementation
    )
    np.testing.assert_array_equal(np.asarray(found), expected.reshape(kv.shape))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_TKH": None}, "holds 4 heads of width 32, but k"),
        ({"v_TKH": jnp.ones((3, K, H), jnp.bfloat16)}, "keys and values of one dtype"),
        ({"k_TKH": jnp.ones((3, 1, H)), "v_TKH": jnp.ones((3, 1, H))}, "they must agree"),
        ({"slots_T": jnp.ones(2, jnp.int32)}, r"must be int32 of shape \(3,\)"),
    ],
)
def test_write_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "kv_LPSCH": jnp.ones((L, P, S, 2 * K, H)),
        "k_TKH": jnp.ones((3, K, H)),
        "v_TKH": jnp.ones((3, K, H)),
        "slots_T": jnp.arange(3, dtype=jnp.int32),
        "layer": 0,
    }
    with pytest.raises(kernels.KernelError, match=message):
        kernels.paged_write(**{**arguments, **changes})


@pytest.mark.parametrize("slot", [-1, P * S])
def test_native_write_refuses_slots_outside_the_cache(slot: int) -> None:
    k = jnp.ones((1, K, H))
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match=f"token 0 names slot {slot}"
    ):
        jax.block_until_ready(
            kernels.paged_write(
                jnp.ones((L, P, S, 2 * K, H)), k, k, layer=0, slots_T=jnp.full(1, slot, jnp.int32)
            )
        )


@pytest.mark.parametrize("dtype", [jnp.float32, *DTYPES])
def test_step_over_layers_copies_no_cache(dtype: Any) -> None:
    """Write and attention in a scan over layers touch the donated cache in place."""

    def step(kv: kernels.Pages, q: jax.Array, slots: jax.Array, *rows: jax.Array) -> Any:
        table, start, lens = rows

        def body(carry: tuple[kernels.Pages, jax.Array], layer: jax.Array) -> Any:
            kv, q = carry
            kv = kernels.paged_write(kv, q[:, :K], q[:, K:], layer=layer, slots_T=slots)
            o = kernels.paged_attention(
                q,
                kv,
                layer=layer,
                page_table_RW=table,
                query_start_R1=start,
                context_lens_R=lens,
                scale=1.0,
            )
            return (kv, o), None

        return jax.lax.scan(body, (kv, q), jnp.arange(L, dtype=jnp.int32))[0]

    arguments = _arguments()
    rows = [arguments[name] for name in ("page_table_RW", "query_start_R1", "context_lens_R")]
    slots = jnp.asarray([12, 8, 9], jnp.int32)
    kv = _cache(arguments["kv_LPSCH"], dtype)
    lowered = jax.jit(step, donate_argnums=0).lower(kv, arguments["q_TNH"], slots, *rows)
    text = str(lowered.compile().as_text())
    assert "fornax_paged_write" in text
    for shape in {leaf.shape for leaf in jax.tree.leaves(kv)}:
        cache = re.escape(f"[{','.join(map(str, shape))}]")
        assert re.findall(rf"\w+{cache}", text)
        assert not re.findall(rf"= \w+{cache}\S* copy\(", text)


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_calls_with_codes_can_be_raced(implementation: str) -> None:
    """Native and XLA compute the same from the same random pages."""
    shared = {
        "platform": "cpu", "tokens": 4, "kv_heads": K, "head_dim": H, "page_size": S,
        "dtype": "float32", "cache_dtype": "int8", "shared": False, "scaled": True,
    }  # fmt: skip
    call = PagedCall(
        **shared, rows=4, table_width=4, heads=N, window=None, softcap=None, sinks=False
    )
    operation = kernels.paged_attention_operation
    o = operation.benchmark(call, operation.choose(call, implementation).run)()
    reference = operation.benchmark(call, operation.choose(call, "reference").run)()
    np.testing.assert_allclose(o, reference, rtol=2e-5, atol=2e-5)
    write = kernels.paged_write_operation
    written = write.benchmark(
        WriteCall(**shared), write.choose(WriteCall(**shared), implementation).run
    )()
    assert isinstance(written, kernels.QuantizedPages)
    np.testing.assert_array_equal(written.codes_LPSCH.reshape(-1, 2 * K, H)[:4], 127)


def test_copies_pages_in_order_in_all_layers() -> None:
    kv = jnp.arange(L * 5 * S * 2 * K * H, dtype=jnp.float32).reshape(L, 5, S, 2 * K, H)
    sources, targets = jnp.asarray([1, 3, 0], jnp.int32), jnp.asarray([3, 2, 0], jnp.int32)
    found = kernels.copy_pages(kv, sources, targets)
    np.testing.assert_array_equal(found, kv[:, jnp.asarray([0, 1, 1, 1, 4])])
    pages = pages_of(np.asarray(kv), "int8")
    found = kernels.copy_pages(pages, sources, targets)
    for copied, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(pages), strict=True):
        np.testing.assert_array_equal(copied, leaf[:, jnp.asarray([0, 1, 1, 1, 4])])
    with pytest.raises(kernels.KernelError, match="two lists of one length"):
        kernels.copy_pages(kv, sources, targets[:2])
