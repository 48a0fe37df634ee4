"""Every paged attention implementation against attention written out in float64 numpy.

Legend: T tokens of the step, N query heads, K key/value heads, H head width, L layers, P pages,
S slots of a page, R rows (sequences), W pages of a table's row.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.cases import one_in
from tests.numerics.kernels.paged_codes import dequantized, pages_of

from fornax import kernels
from fornax.kernels._paged_attention import tpu as tpu_kernel
from fornax.kernels._paged_attention import tpu_block, tpu_items

L = 3


@dataclasses.dataclass
class Step:
    """A ragged step with a cache of shuffled pages, unused slots full of NaN."""

    q_TNH: np.ndarray
    kv_LPSCH: np.ndarray
    page_table_RW: np.ndarray
    query_start_R1: np.ndarray
    context_lens_R: np.ndarray
    expected_TNH: np.ndarray
    options: dict[str, Any]


def _attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, options: dict[str, Any]
) -> np.ndarray:
    """One token's heads [N, H] over its sequence's keys and values [length, K, H]."""
    N, K = q.shape[0], k.shape[1]
    first = max(0, position + 1 - (options.get("window") or position + 1))
    out = np.zeros(q.shape)
    for n in range(N):
        kv = n // (N // K)
        scores = k[first : position + 1, kv] @ q[n] * options["scale"]
        if options.get("softcap"):
            scores = options["softcap"] * np.tanh(scores / options["softcap"])
        sinks = options.get("sinks_N")
        extra = [] if sinks is None else [float(sinks[n])]
        weights = np.exp(np.array([*scores, *extra]) - max([*scores, *extra]))
        weights /= weights.sum()
        out[n] = weights[: len(scores)] @ v[first : position + 1, kv]
    return out


def make_step(
    rows: list[tuple[int, int]],
    *,
    n: int = 4,
    k: int = 2,
    h: int = 16,
    page: int = 4,
    padding: int = 3,
    unused_rows: int = 2,
    dtype: Any = np.float32,
    cache_dtype: Any = np.float32,
    garbage: float = np.nan,
    codes: str | None = None,
    **options: Any,
) -> Step:
    """Rows are (context length, tokens of this step at its end). With `codes` keys and values are
    what such a cache makes of them."""
    parts = 1 if options.get("shared") else 2
    rng = np.random.default_rng(0)
    options = {"scale": h**-0.5, **options}
    R = len(rows) + unused_rows
    W = max((-(-context // page) for context, _ in rows), default=0) + 1
    P = sum(-(-context // page) for context, _ in rows) + 3
    free = list(rng.permutation(np.arange(1, P)))
    kv = np.full((L, P, page, parts * k, h), garbage, np.float64)
    kv[:, 0] = 7.0
    table = np.zeros((R, W), np.int32)
    start = np.zeros(R + 1, np.int32)
    context_lens = np.zeros(R, np.int32)
    queries, expected = [], []
    for r, (context, count) in enumerate(rows):
        keys = rng.normal(size=(context, k, h)).astype(cache_dtype).astype(np.float64)
        values = rng.normal(size=(context, k, h)).astype(cache_dtype).astype(np.float64)
        if codes is not None:
            keys, values = dequantized(keys, codes), dequantized(values, codes)
        values = keys if parts == 1 else values
        q = rng.normal(size=(count, n, h)).astype(dtype).astype(np.float64)
        seen = context - count - (options.get("window") or context) + 1
        for position in range(context):
            if position % page == 0 and position + page > seen:
                table[r, position // page] = free.pop()
            if position + page > seen:
                where = (1, table[r, position // page], position % page)
                kv[where][0::parts] = keys[position]
                kv[where][parts - 1 :: parts] = values[position]
        for i in range(count):
            expected.append(_attend(q[i], keys, values, context - count + i, options))
        queries.append(q)
        start[r + 1] = start[r] + count
        context_lens[r] = context
    start[len(rows) + 1 :] = start[len(rows)]
    queries.append(np.ones((padding, n, h)))
    expected.append(np.zeros((padding, n, h)))
    return Step(
        q_TNH=np.concatenate(queries),
        kv_LPSCH=kv,
        page_table_RW=table,
        query_start_R1=start,
        context_lens_R=context_lens,
        expected_TNH=np.concatenate([np.asarray(e).reshape(-1, n, h) for e in expected]),
        options=options,
    )


def _quickly(implementation: str) -> dict[str, Any]:
    """Options of a compiler that would take longer to optimise what is interpreted than to run."""
    return {"xla_backend_optimization_level": 0} if implementation == "pallas_tpu" else {}


def run(
    step: Step, implementation: str, dtype: Any, cache_dtype: Any, *, joined: bool = False
) -> np.ndarray:
    """Compute the step's layer 1 under jit; `joined` puts a value beside its key."""
    options = dict(step.options)
    sinks = options.pop("sinks_N", None)

    @functools.partial(jax.jit, compiler_options=_quickly(implementation))
    def attend(q: jax.Array, kv: jax.Array, layer: jax.Array, *rows: jax.Array) -> jax.Array:
        table, start, lens = rows
        return kernels.paged_attention(
            q,
            kv,
            layer=layer,
            page_table_RW=table,
            query_start_R1=start,
            context_lens_R=lens,
            sinks_N=None if sinks is None else jnp.asarray(sinks, jnp.float32),
            implementation=implementation,
            **options,
        )

    rows = (step.page_table_RW, step.query_start_R1, step.context_lens_R)
    kv = pages_of(step.kv_LPSCH, cache_dtype, joined=joined)
    out = attend(jnp.asarray(step.q_TNH, dtype), kv, jnp.int32(1), *rows)
    assert out.dtype == dtype
    return np.asarray(out.astype(jnp.float32))


MIXED = [(9, 1), (6, 6), (21, 1), (130, 40), (1, 1), (70, 70), (300, 1)]
CASES: dict[str, dict[str, Any]] = {
    "mixed": {"rows": MIXED},
    "decode": {"rows": [(5, 1), (64, 1), (65, 1), (257, 1), (1, 1)], "padding": 0},
    "decode, no group": {"rows": [(5, 1), (64, 1), (600, 1)], "n": 2, "k": 2},
    "prefill": {"rows": [(100, 100)], "unused_rows": 0, "padding": 0},
    "chunk": {"rows": [(700, 37)], "page": 16},
    "one key head": {"rows": MIXED, "n": 6, "k": 1},
    "wide group": {"rows": MIXED, "n": 9, "k": 1, "page": 16},
    "window": {"rows": MIXED, "window": 7},
    "window over blocks": {"rows": MIXED, "window": 100, "page": 16},
    "softcap": {"rows": MIXED, "softcap": 2.0},
    "sinks": {"rows": MIXED, "sinks_N": np.array([0.5, -1.0, 2.0, 30.0])},
    "odd width": {"rows": MIXED, "h": 20, "page": 3},
    "wide head": {"rows": [(9, 1), (80, 70)], "h": 128, "page": 16},
    "large page": {"rows": MIXED, "page": 256},
    "keys that are values": {"rows": MIXED, "n": 6, "k": 1, "h": 20, "shared": True},
    "two heads of them": {"rows": MIXED, "h": 32, "softcap": 2.0, "window": 7, "shared": True},
    "a released latent": {"rows": [(9, 1), (80, 3)], "n": 16, "k": 1, "h": 576, "shared": True},
    "latents for many heads": {"rows": [(9, 1), (70, 2)], "n": 128, "k": 1, "shared": True},
}
ON_CPU = ["reference", "xla", "native"]


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("case", one_in(2, CASES))
def test_agrees_with_float64(case: str, implementation: str) -> None:
    step = make_step(**CASES[case])
    found = run(step, implementation, jnp.float32, jnp.float32)
    np.testing.assert_allclose(found, step.expected_TNH, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "tolerance"),
    [
        (jnp.float32, jnp.bfloat16, 2e-5),
        (jnp.bfloat16, jnp.bfloat16, 2e-2),
        (jnp.bfloat16, jnp.float32, 2e-2),
    ],
)
def test_dtypes_may_differ(
    dtype: Any, cache_dtype: Any, tolerance: float, implementation: str
) -> None:
    step = make_step(MIXED, dtype=dtype, cache_dtype=cache_dtype)
    found = run(step, implementation, dtype, cache_dtype)
    np.testing.assert_allclose(found, step.expected_TNH, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_latents_may_be_bfloat16(implementation: str) -> None:
    step = make_step(MIXED, n=6, k=1, h=48, cache_dtype=jnp.bfloat16, shared=True)
    found = run(step, implementation, jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(found, step.expected_TNH, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_cache_may_be_float8(implementation: str) -> None:
    step = make_step(MIXED, cache_dtype=jnp.float8_e4m3fn)
    found = run(step, implementation, jnp.float32, jnp.float8_e4m3fn)
    np.testing.assert_allclose(found, step.expected_TNH, rtol=2e-5, atol=2e-5)


CODES_CASES = (
    "mixed", "wide group", "window over blocks", "softcap", "sinks", "odd width", "wide head",
    "keys that are values", "two heads of them", "a released latent",
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "codes", "implementation"),
    [
        *((case, codes, "native") for case in CODES_CASES for codes in ("int8", "fp8")),
        ("mixed", "fp8", "xla"),
        ("window over blocks", "int8", "xla"),
        ("keys that are values", "fp8", "xla"),
        ("sinks", "int8", "xla"),
    ],
)
def test_codes_are_read_exactly(case: str, codes: str, implementation: str) -> None:
    """What no token sees has NaN scales."""
    step = make_step(**CASES[case], codes=codes)
    found = run(step, implementation, jnp.float32, codes)
    np.testing.assert_allclose(found, step.expected_TNH, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_codes_may_lie_beside_each_other_and_meet_bfloat16(codes: str, implementation: str) -> None:
    step = make_step(MIXED, codes=codes, dtype=jnp.bfloat16)
    found = run(step, implementation, jnp.bfloat16, codes, joined=True)
    np.testing.assert_allclose(found, step.expected_TNH, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_a_value_may_lie_beside_its_key(implementation: str) -> None:
    step = make_step(MIXED)
    found = run(step, implementation, jnp.float32, jnp.float32, joined=True)
    np.testing.assert_allclose(found, step.expected_TNH, rtol=2e-5, atol=2e-5)


ROWS = [(9, 1), (6, 6), (37, 1), (130, 40), (1, 1), (16, 16), (160, 37), (200, 1), (33, 33)]
"""Contexts within a page, at its border and beyond, of several fetches; prompts longer than a block
of queries, and blocks with several rows."""
ON_TPU: dict[str, dict[str, Any]] = {
    "mixed": {"h": 128},
    "decode": {"rows": [(5, 1), (128, 1), (129, 1), (257, 1), (1, 1)], "h": 128, "padding": 0},
    "one token": {"rows": [(1, 1)], "h": 128, "unused_rows": 0, "padding": 0},
    "no tokens": {"rows": [], "h": 128, "padding": 8},
    "a long prompt": {"rows": [(300, 150)], "h": 128, "n": 2, "k": 2},
    "one key head": {"h": 128, "n": 6, "k": 1},
    "wide group": {"h": 128, "n": 17, "k": 1},
    "window": {"h": 128, "window": 7},
    "window over fetches": {"h": 128, "window": 140},
    "softcap": {"h": 256, "softcap": 2.0},
    "width 256 of one head": {"h": 256, "n": 2, "k": 1},
    "sinks and a window": {"h": 64, "window": 20, "sinks_N": np.array([0.5, -1.0, 2.0, 30.0])},
    "width 192": {"h": 192},
}
LONGEST = ("decode", "one token", "no tokens", "wide group", "width 256 of one head", "width 192")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of queries and fetches of keys in small steps; interpreted, all is slow."""
    monkeypatch.setattr(tpu_kernel, "_BUFFER_KEYS", 128)
    monkeypatch.setattr(tpu_items, "_BLOCK_TOKENS", 32)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.exhaustive if c in LONGEST else ()) for c in ON_TPU],
)
def test_the_tpu_kernel_agrees_with_float64(case: str) -> None:
    step = make_step(**{"rows": ROWS, "page": 16, **ON_TPU[case]})
    with kernels.target_platform("tpu", interpret=True):
        joined = ON_TPU[case]["h"] % 128 != 0
        found = run(step, "pallas_tpu", jnp.float32, jnp.float32, joined=joined)
    np.testing.assert_allclose(found, step.expected_TNH, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "h", "tolerance"),
    [
        (jnp.float32, jnp.bfloat16, 128, 2e-5),
        (jnp.bfloat16, jnp.bfloat16, 256, 2e-2),
        (jnp.bfloat16, jnp.bfloat16, 64, 2e-2),
    ],
)
def test_dtypes_may_differ_on_tpu(dtype: Any, cache_dtype: Any, h: int, tolerance: float) -> None:
    step = make_step(ROWS, h=h, page=16, dtype=dtype, cache_dtype=cache_dtype)
    with kernels.target_platform("tpu", interpret=True):
        found = run(step, "pallas_tpu", dtype, cache_dtype, joined=h == 64)
    np.testing.assert_allclose(found, step.expected_TNH, rtol=tolerance, atol=tolerance)


CODES_ON_TPU: dict[str, dict[str, Any]] = {
    "mixed": {"h": 128, "k": 4},
    "softcap, pages of 128": {"h": 256, "page": 128, "softcap": 2.0},
    "window, pages of 8": {"h": 128, "k": 8, "page": 8, "window": 140},
    "sinks": {"h": 64, "k": 8, "window": 20, "sinks_N": np.linspace(-1.0, 30.0, 8)},
    "pages of 256": {"h": 128, "page": 256},
}


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("case", "codes"),
    [
        ("mixed", "fp8"),
        ("softcap, pages of 128", "int8"),
        ("sinks", "int8"),
        pytest.param("sinks", "fp8", marks=pytest.mark.exhaustive),
        pytest.param("window, pages of 8", "int8", marks=pytest.mark.exhaustive),
        pytest.param("pages of 256", "fp8", marks=pytest.mark.exhaustive),
    ],
)
def test_the_tpu_kernel_reads_codes_exactly(case: str, codes: str) -> None:
    step = make_step(ROWS[:6], **{"page": 16, "n": 8, "codes": codes, **CODES_ON_TPU[case]})
    with kernels.target_platform("tpu", interpret=True):
        joined = CODES_ON_TPU[case]["h"] % 128 != 0
        found = run(step, "pallas_tpu", jnp.float32, codes, joined=joined)
    np.testing.assert_allclose(found, step.expected_TNH, rtol=2e-5, atol=2e-5)


def _apart(step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A step's cache as it was before, and its tokens' keys and values, and where they go."""
    kv, T = step.kv_LPSCH.copy(), step.q_TNH.shape[0]
    slots = np.zeros(T, np.int32)
    new = np.full((T, *kv.shape[3:]), 5.0)
    start, S = step.query_start_R1, kv.shape[2]
    for r, context in enumerate(step.context_lens_R):
        for t in range(start[r], start[r + 1]):
            position = context - (start[r + 1] - t)
            page = step.page_table_RW[r, position // S]
            slots[t] = page * S + position % S
            new[t] = kv[1, page, position % S]
            kv[1, page, position % S] = np.nan
    return kv, new, slots


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("implementation", "h"),
    [
        *((name, 16) for name in ON_CPU),
        pytest.param("pallas_tpu", 128, marks=pytest.mark.slow),
        pytest.param("pallas_tpu", 64, marks=pytest.mark.slow),
        pytest.param("pallas_tpu", 256, marks=pytest.mark.exhaustive),
    ],
)
def test_an_update_writes_and_attends(implementation: str, h: int) -> None:
    """Two rows share their first seven pages, which nobody writes."""
    step = make_step(ROWS, h=h, page=16, n=4, k=2)
    step.page_table_RW[7, :7] = step.page_table_RW[6, :7]
    kv, new, slots = _apart(step)
    joined = h == 64

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=_quickly(implementation))
    def update(kv: jax.Array, q: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        kv = kv.reshape(*kv.shape[:3], -1, 2 * h) if joined else kv
        o, kv = kernels.paged_attention_update(
            q,
            new[:, 0::2],
            new[:, 1::2],
            kv,
            layer=1,
            slots_T=jnp.asarray(slots),
            page_table_RW=jnp.asarray(step.page_table_RW),
            query_start_R1=jnp.asarray(step.query_start_R1),
            context_lens_R=jnp.asarray(step.context_lens_R),
            implementation=implementation,
            **step.options,
        )
        return o, kv.reshape(*kv.shape[:3], -1, h)

    platform = "tpu" if implementation == "pallas_tpu" else "cpu"
    arrays = (jnp.asarray(x, jnp.float32) for x in (kv, step.q_TNH, new))
    with kernels.target_platform(platform, interpret=platform == "tpu"):
        o, written = update(*arrays)
    expected = run(step, "reference", jnp.float32, jnp.float32)
    np.testing.assert_allclose(o, expected, rtol=2e-5, atol=2e-5)
    # Page 0 takes what padding writes.
    expected = step.kv_LPSCH.astype(np.float32)
    np.testing.assert_array_equal(written[:, 1:], expected[:, 1:])


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("codes", "h"), [("int8", 128), pytest.param("fp8", 64, marks=pytest.mark.exhaustive)]
)
def test_the_tpu_kernel_writes_the_bits_of_paged_write(codes: str, h: int) -> None:
    """Tokens of one page, whole pages, and pages whose first tokens an earlier step wrote."""
    step = make_step(ROWS, h=h, page=16, n=8, k=4 * 128 // h, codes=codes, dtype=jnp.bfloat16)
    before, new, slots = _apart(step)
    kv = pages_of(before, codes, joined=h == 64)
    assert isinstance(kv, kernels.QuantizedPages)
    k, v = (jnp.asarray(new[:, part::2], jnp.bfloat16) for part in (0, 1))
    rows = {
        "page_table_RW": jnp.asarray(step.page_table_RW),
        "query_start_R1": jnp.asarray(step.query_start_R1),
        "context_lens_R": jnp.asarray(step.context_lens_R),
    }
    q, slots_T = jnp.asarray(step.q_TNH, jnp.bfloat16), jnp.asarray(slots)
    expected = kernels.paged_write(kv, k, v, layer=1, slots_T=slots_T, implementation="xla")
    expected_o = kernels.paged_attention(
        q, expected, layer=1, implementation="reference", **rows, **step.options
    )

    @functools.partial(jax.jit, compiler_options=_quickly("pallas_tpu"))
    def update(kv: kernels.Pages) -> tuple[jax.Array, kernels.Pages]:
        return kernels.paged_attention_update(
            q, k, v, kv, layer=1, slots_T=slots_T, implementation="pallas_tpu", **rows,
            **step.options,
        )  # fmt: skip

    with kernels.target_platform("tpu", interpret=True):
        o, written = update(kv)
    o, expected_o = (np.asarray(x.astype(jnp.float32)) for x in (o, expected_o))
    np.testing.assert_allclose(o, expected_o, rtol=2e-2, atol=2e-2)
    # Page 0 takes what padding writes.
    for one, other in zip(jax.tree.leaves(written), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(*(np.asarray(x)[:, 1:].view(np.uint8) for x in (one, other)))


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "codes", [None, pytest.param("int8", marks=pytest.mark.exhaustive)], ids=["floats", "codes"]
)
def test_the_tpu_kernel_waits_for_every_copy(
    codes: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In jax's simulation of a TPU a copy happens when it is waited for and no sooner, and memory
    is NaN before. It has neither rows of 32 bits nor flat views, so what is read through them is
    taken from the buffer as a whole."""
    from jax.experimental.pallas import tpu as pltpu

    def rows(plan: Any, pages: Any, index: int) -> list[jax.Array]:
        found = pages[...].reshape(-1, *pages.shape[3:])
        together = 4 if plan.codes else 2
        picked = [found[:, together * index + number] for number in range(together)]
        return [row.astype(jnp.bfloat16) for row in picked] if plan.codes else picked

    def by_vector(page: int, pages: Any, seen: Any, scales: Any) -> None:
        J, V, lanes = scales.shape
        found_PVS = pages[...].reshape(-1, V, page)[: J * lanes // page]
        found_JVl = jnp.swapaxes(jnp.swapaxes(found_PVS, 0, 1).reshape(V, J, lanes), 0, 1)
        scales[...] = jnp.where(jnp.stack([seen(j) for j in range(J)]), found_JVl, 0)

    monkeypatch.setattr(tpu_block, "_rows", rows)
    monkeypatch.setattr(tpu_kernel, "by_vector", by_vector)
    simulated = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
    monkeypatch.setattr(tpu_kernel, "interpreting", lambda: simulated)
    if codes is None:
        test_an_update_writes_and_attends("pallas_tpu", 128)
    else:
        test_the_tpu_kernel_writes_the_bits_of_paged_write(codes, 128)
