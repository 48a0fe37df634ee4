"""Every kernel that a GPU can get against the same formula in float64, values and gradients.

Legend: B batch, T query tokens, N query heads, K key/value heads, H head width, D width,
F hidden width, E groups, V vocabulary, R rows, S slots of a page.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.device.machine import ON_GPU, as_on_gpu, cpu, error, exact_products, lowers

from fornax import kernels

B, T, N, K, H = (2, 1024, 16, 4, 128) if ON_GPU else (2, 64, 4, 2, 16)
TOLERANCE = {"float32": 2e-4, "bfloat16": 1e-2}


def _is_hopper() -> bool:
    return 9 <= float(getattr(jax.local_devices()[0], "compute_capability", 0)) < 10


def _ids() -> dict[str, Any]:
    """Documents of uneven lengths, positions inside each, padding at the end."""
    lengths = [T // 2 - 7, 5, T // 4, T - T // 2 - T // 4 - 8, 10]
    segments = np.repeat([1, 2, 3, 4, 0], lengths)[None].repeat(B, 0).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths])[None].repeat(B, 0)
    found = {"segment_ids": segments, "positions": positions.astype(np.int32)}
    sides = ("q_BT", "k_BS")
    named = {f"{name}_{side}": x for name, x in found.items() for side in sides}
    return {**named, "consecutive": True}


ATTENTION: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": T // 4 + 1},
    "packed": _ids(),
    "packed window": {**_ids(), "window": T // 8},
    "softcap and sinks": {"softcap": 20.0, "sinks_N": np.linspace(-1, 2, N)},
}


def _compare(
    run: Callable[..., Any], expected: Callable[..., Any], arrays: list[np.ndarray], dtype: str
) -> None:
    """Output and gradients of `run` beside `expected` in float64, on inputs that `dtype` holds."""
    rounded = [np.asarray(jnp.asarray(a, dtype).astype(jnp.float32)) for a in arrays]

    def weighed(function: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = function(*given)
            weights = np.random.default_rng(5).normal(size=out.shape)
            return jnp.sum(out * weights.astype(out.dtype)), out

        return jax.jit(jax.value_and_grad(loss, tuple(range(len(arrays))), has_aux=True))

    with jax.enable_x64(True), jax.default_device(cpu()):
        given = [jnp.asarray(a, jnp.float64) for a in rounded]
        (_, wanted), wanted_grads = weighed(expected)(*given)
    with as_on_gpu(), exact_products():
        given = [jnp.asarray(a, dtype) for a in rounded]
        (_, found), grads = weighed(run)(*given)
    for one, other in zip((found, *grads), (wanted, *wanted_grads), strict=True):
        assert error(np.asarray(one.astype(jnp.float32)), other) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("cudnn", "bfloat16"), ("blockwise", "float32"), ("xla", "float32"), ("xla", "bfloat16")],
)
def test_attention(
    name: str, implementation: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ON_GPU:
        monkeypatch.setattr("fornax.kernels._attention.cudnn._CHUNK", T // 2)
        monkeypatch.setattr("fornax.kernels._attention.blockwise.BLOCK", T // 4)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(B, T, heads, H)) for heads in (N, K, K)]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, which: str) -> jax.Array:
        options = ATTENTION[name]
        return kernels.attention(q, k, v, scale=H**-0.5, implementation=which, **options)

    if implementation == "cudnn" and name.startswith("softcap"):
        with as_on_gpu(), pytest.raises(kernels.KernelError, match="does not support softcap"):
            attend(*(jnp.asarray(a, dtype) for a in arrays), "cudnn")
        return

    def run(*given: jax.Array) -> jax.Array:
        return attend(*given, which=implementation)

    _compare(run, lambda *given: attend(*given, which="reference"), arrays, dtype)
    given = [jax.ShapeDtypeStruct(a.shape, dtype) for a in arrays]
    assert ("__cudnn$fmha" in lowers(monkeypatch, run, *given)) == (implementation == "cudnn")


@pytest.mark.parametrize("options", [{}, {"window": 33}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("xla", "float32"), ("xla", "bfloat16"), ("pallas_gpu", "bfloat16")],
)
def test_paged_attention(
    options: dict[str, Any], implementation: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper = implementation == "pallas_gpu"
    if hopper and ON_GPU and not _is_hopper():
        pytest.skip("its products are those of a Hopper")
    width = 128 if hopper else H
    rng = np.random.default_rng(1)
    S, counts = 16, [1, 1, T // 2, 1, 7]
    contexts = np.array([T, 40, T // 2, 1, T // 3], np.int32)
    R, W = len(counts), T // S + 1
    table = (1 + rng.permutation(R * W)).reshape(R, W).astype(np.int32)
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    arrays = [
        rng.normal(size=(int(start[-1]) + 3, N, width)),
        rng.normal(size=(2, R * W + 1, S, 2 * K, width)),
    ]

    def attend(q: jax.Array, kv: jax.Array, which: str | None) -> jax.Array:
        return kernels.paged_attention(
            q,
            kv,
            layer=1,
            page_table_RW=jnp.asarray(table),
            query_start_R1=jnp.asarray(start),
            context_lens_R=jnp.asarray(contexts),
            scale=width**-0.5,
            implementation=which,
            **options,
        )

    rounded = [np.asarray(jnp.asarray(a, dtype).astype(jnp.float32)) for a in arrays]
    with jax.enable_x64(True), jax.default_device(cpu()):
        given = [jnp.asarray(a, jnp.float64) for a in rounded]
        expected = np.asarray(jax.jit(lambda q, kv: attend(q, kv, "reference"))(*given))
    run = jax.jit(lambda q, kv: attend(q, kv, implementation))
    if ON_GPU or not hopper:  # which tests/numerics interpret
        with as_on_gpu(), exact_products():
            found = run(*(jnp.asarray(a, dtype) for a in rounded))
        assert error(np.asarray(found.astype(jnp.float32)), expected) < TOLERANCE[dtype]
        assert np.all(np.asarray(found[start[-1] :]) == 0)
    text = lowers(monkeypatch, run, *(jax.ShapeDtypeStruct(a.shape, dtype) for a in arrays))
    assert ("custom_call @mosaic_gpu" in text) == hopper


def test_paged_write_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    cache = np.zeros((2, 5, 16, 2 * K, H), np.float32)
    k, v = (rng.normal(size=(20, K, H)).astype(np.float32) for _ in range(2))
    slots = rng.permutation(np.arange(16, 64))[:20].astype(np.int32)

    def write(kv: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        kv = kernels.paged_write(kv, k, v, layer=1, slots_T=jnp.asarray(slots))
        return kernels.copy_pages(kv, jnp.asarray([1], jnp.int32), jnp.asarray([4], jnp.int32))

    expected = cache.copy()
    expected[1, slots // 16, slots % 16, 0::2] = k
    expected[1, slots // 16, slots % 16, 1::2] = v
    expected[:, 4] = expected[:, 1]
    with as_on_gpu():
        np.testing.assert_array_equal(np.asarray(jax.jit(write)(cache, k, v)), expected)
    lowers(monkeypatch, write, cache, k, v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_and_log_probabilities(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    D, V = (1024, 16_384) if ON_GPU else (32, 200)
    arrays = [rng.normal(size=(T, D)) * D**-0.5, rng.normal(size=(D, V))]
    targets = rng.integers(0, V, T).astype(np.int32)
    weights = rng.random(T).astype(np.float32)

    def scores(x: jax.Array, w: jax.Array, which: str | None) -> jax.Array:
        sums = kernels.linear_cross_entropy(
            x, w, jnp.asarray(targets), jnp.asarray(weights), z_loss=1e-3, implementation=which
        )
        told = kernels.linear_logprobs(x, w, jnp.asarray(targets), implementation=which)
        return jnp.append(told.logprobs, sums.loss_sum)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return scores(x, w, None)

    _compare(run, lambda x, w: scores(x, w, "reference"), arrays, dtype)
    lowers(monkeypatch, run, *(jax.ShapeDtypeStruct(a.shape, dtype) for a in arrays))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_and_products(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    D, F = (1024, 4096) if ON_GPU else (64, 96)
    arrays = [rng.normal(size=(T, D)), 1 + rng.normal(size=(D,)), rng.normal(size=(D, F)) / 8]

    def run(x: jax.Array, scale: jax.Array, w: jax.Array) -> jax.Array:
        return kernels.linear(kernels.rms_norm(x, scale, eps=1e-6), w, inputs=1)

    def formula(x: jax.Array, scale: jax.Array, w: jax.Array) -> jax.Array:
        return (x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale) @ w

    _compare(run, formula, arrays, dtype)
    lowers(monkeypatch, run, *(jax.ShapeDtypeStruct(a.shape, dtype) for a in arrays))


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("ragged_dot", "float32"), ("ragged_dot", "bfloat16"), ("tokamax", "bfloat16")],
)
def test_grouped_products(implementation: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and both gradients: groups of uneven sizes and without rows, rows of no group."""
    if implementation == "tokamax":
        pytest.importorskip("tokamax", reason="the extra tokamax is not installed")
        if ON_GPU and not _is_hopper():
            pytest.skip("Tokamax's kernels for all three products are Hopper's")
    rng = np.random.default_rng(7)
    D, F, E = (1024, 4096, 16) if ON_GPU else (128, 256, 5)
    sizes = np.zeros(E, np.int32)
    sizes[[0, 2, 3]] = T // 4 + 3, 1, T // 2 - 7
    rows = np.arange(T) < sizes.sum()
    arrays = [rng.normal(size=(T, D)), rng.normal(size=(E, D, F)) / 8]

    def product(x: jax.Array, w: jax.Array, which: str) -> jax.Array:
        # Rows of no group hold what would spoil every sum.
        x = jnp.where(rows[:, None], x, jnp.nan)
        return kernels.grouped_matmul(x, w, jnp.asarray(sizes), implementation=which)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(x, w, implementation)

    def formula(x: jax.Array, w: jax.Array) -> jax.Array:
        group = np.searchsorted(np.cumsum(sizes), np.arange(T), side="right").clip(max=E - 1)
        return jnp.where(rows[:, None], jnp.einsum("rd,rdf->rf", x, w[group]), 0)

    _compare(run, formula, arrays, dtype)

    def gradients(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(run, x, w)
        return y, pull(dy)

    given = [jax.ShapeDtypeStruct(a.shape, dtype) for a in (*arrays, np.zeros((T, F)))]
    text = lowers(monkeypatch, gradients, *given)
    assert text.count("custom_call @mosaic_gpu") == (3 if implementation == "tokamax" else 0)
    assert text.count('"chlo.ragged_dot"') == (0 if implementation == "tokamax" else 3)


def test_packed_weights() -> None:
    rng = np.random.default_rng(6)
    D, F = (1024, 4096) if ON_GPU else (64, 96)
    x, w = rng.normal(size=(8, D)).astype(np.float32), rng.normal(size=(D, F)).astype(np.float32)
    with as_on_gpu(), exact_products():
        packed = kernels.pack(jnp.asarray(w), inputs=1, precision="float32")
        found = kernels.linear(jnp.asarray(x), packed)
    assert error(found, x.astype(np.float64) @ w.astype(np.float64)) < TOLERANCE["float32"]
