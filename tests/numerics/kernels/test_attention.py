"""Every attention implementation against the float64 reference: values and gradients.

Legend: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.cases import one_in

from fornax import kernels

B, T, N, K, H = 2, 40, 4, 2, 16


@dataclasses.dataclass(frozen=True)
class Case:
    """One call's arrays (as numpy, float64) and options."""

    arrays: dict[str, np.ndarray]
    options: dict[str, Any]


def _qkv(
    b: int = B, t: int = T, s: int = T, n: int = N, k: int = K, h: int = H, v: int = H
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "q_BTNH": rng.normal(size=(b, t, n, h)),
        "k_BSKH": rng.normal(size=(b, s, k, h)),
        "v_BSKH": rng.normal(size=(b, s, k, v)),
    }


def _both(name: str, ids: np.ndarray) -> dict[str, np.ndarray]:
    return {f"{name}_q_BT": ids.astype(np.int32), f"{name}_k_BS": ids.astype(np.int32)}


def _packed() -> dict[str, np.ndarray]:
    """Two documents and padding in row 0 (left-padded), three documents in row 1."""
    segments = np.ones((B, T), np.int32)
    segments[0, :5], segments[0, 25:] = 0, 2
    segments[1, 12:30], segments[1, 30:] = 2, 3
    positions = np.zeros((B, T), np.int32)
    for row in range(B):
        for segment in np.unique(segments[row]):
            (where,) = np.nonzero(segments[row] == segment)
            positions[row, where] = np.arange(len(where))
    return {**_both("segment_ids", segments), **_both("positions", positions)}


def _cache(t: int, s: int, filled: int) -> dict[str, np.ndarray]:
    """Queries at the end of a half-filled cache whose slots are rotated (a ring buffer)."""
    positions_k = np.roll(np.arange(s), 3)[None].repeat(B, 0)
    segments_k = (positions_k < filled).astype(np.int32)
    positions_q = np.arange(filled - t, filled)[None].repeat(B, 0)
    return {
        "positions_q_BT": positions_q.astype(np.int32),
        "positions_k_BS": positions_k.astype(np.int32),
        "segment_ids_q_BT": np.ones((B, t), np.int32),
        "segment_ids_k_BS": segments_k,
    }


def _long(length: int) -> dict[str, np.ndarray]:
    """Two documents and padding over several blocks."""
    segments = np.repeat([1, 2, 0], [length // 3, length // 2, length - length // 3 - length // 2])
    positions = np.concatenate([np.arange(np.sum(segments == s)) for s in (1, 2, 0)])
    ids = {**_both("segment_ids", segments[None]), **_both("positions", positions[None])}
    return {**_qkv(b=1, t=length, s=length), **ids}


_SINKS = {"sinks_N": np.random.default_rng(1).normal(size=N)}

CASES = {
    "causal": Case(_qkv(), {}),
    "full": Case(_qkv(), {"causal": False}),
    "multi query": Case(_qkv(k=1), {}),
    "odd shapes": Case(_qkv(b=1, t=37, s=37, n=3, k=1, h=24, v=8), {}),
    "window": Case(_qkv(), {"window": 7}),
    "window both sides": Case(_qkv(), {"window": 7, "causal": False}),
    "softcap": Case(_qkv(), {"softcap": 1.5}),
    "sinks": Case({**_qkv(), **_SINKS}, {}),
    "packed": Case({**_qkv(), **_packed()}, {}),
    "packed full": Case({**_qkv(), **_packed()}, {"causal": False}),
    "all at once": Case({**_qkv(), **_packed(), **_SINKS}, {"window": 9, "softcap": 2.0}),
    "prefill into cache": Case({**_qkv(t=8, s=48), **_cache(8, 48, 30)}, {}),
    "one token": Case({**_qkv(t=1, s=48), **_cache(1, 48, 30)}, {"window": 12}),
    "cross": Case(_qkv(t=9, s=21), {"causal": False}),
    "long": Case(_qkv(b=1, t=200, s=200, n=2, k=1), {"window": 70}),
    "many documents": Case({**_long(200), **_SINKS}, {"softcap": 3.0}),
    "long cross": Case(_qkv(b=1, t=70, s=130), {"causal": False}),
}


def _names() -> list[str]:
    """All but the reference, which plays against itself in float64, and what needs a mesh."""
    able = [i.name for i in kernels.attention_operation.implementations if i.alone]
    return [name for name in able if name != "reference"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the short cases here fill several blocks of the blockwise implementation."""
    monkeypatch.setattr("fornax.kernels._attention.blockwise.BLOCK", 16)


def _run(case: Case, dtype: Any, implementation: str) -> dict[str, np.ndarray]:
    """Output and gradients of a fixed weighting of it, as float64 numpy arrays."""
    floating = {n: jnp.asarray(a, dtype) for n, a in case.arrays.items() if a.dtype == np.float64}
    integers = {n: jnp.asarray(a) for n, a in case.arrays.items() if a.dtype != np.float64}
    scale = case.arrays["q_BTNH"].shape[-1] ** -0.5

    def attend(floating: dict[str, jax.Array]) -> jax.Array:
        return kernels.attention(
            **floating, **integers, **case.options, scale=scale, implementation=implementation
        )

    def weighed(floating: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        o = attend(floating)
        weights = jnp.asarray(np.random.default_rng(2).normal(size=o.shape), dtype)
        return jnp.sum((o * weights).astype(jnp.promote_types(dtype, jnp.float32))), o

    grads, o = jax.jit(jax.grad(weighed, has_aux=True))(floating)
    assert o.dtype == dtype
    return {"o": np.float64(o), **{name: np.float64(g) for name, g in grads.items()}}


def _skip_declined(case: Case, dtype: Any, implementation: str) -> None:
    """Skip what an implementation honestly declines; asking for it by hand must then raise."""
    try:
        jax.eval_shape(
            lambda **arrays: kernels.attention(
                **arrays, **case.options, scale=1.0, implementation=implementation
            ),
            **{
                n: jax.ShapeDtypeStruct(a.shape, dtype if a.dtype == np.float64 else a.dtype)
                for n, a in case.arrays.items()
            },
        )
    except kernels.KernelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, np.ndarray]]:
    with jax.enable_x64(True):
        return {name: _run(case, jnp.float64, "reference") for name, case in CASES.items()}


@pytest.mark.parametrize("implementation", _names())
@pytest.mark.parametrize("name", one_in(2, CASES))
def test_float32_agrees_with_float64_reference(
    name: str, implementation: str, expected: dict[str, dict[str, np.ndarray]]
) -> None:
    _skip_declined(CASES[name], jnp.float32, implementation)
    found = _run(CASES[name], jnp.float32, implementation)
    for key, value in expected[name].items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("implementation", _names())
@pytest.mark.parametrize(
    "name",
    ["all at once", "prefill into cache", "odd shapes", "cross", "many documents", "long cross"],
)
def test_bfloat16_agrees_to_its_precision(
    name: str, implementation: str, expected: dict[str, dict[str, np.ndarray]]
) -> None:
    _skip_declined(CASES[name], jnp.bfloat16, implementation)
    found = _run(CASES[name], jnp.bfloat16, implementation)
    for key, value in expected[name].items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[key] / scale, value / scale, atol=3e-2, err_msg=key)


@pytest.mark.parametrize("name", ["odd shapes", "all at once", "long cross"])
def test_native_products_of_bfloat16_are_those_of_float32(name: str) -> None:
    """The output but for its rounding, and gradients but for that of the output too."""
    case = CASES[name]
    _skip_declined(case, jnp.bfloat16, "native")
    narrow = {n: jnp.asarray(case.arrays[n], jnp.bfloat16) for n in ("q_BTNH", "k_BSKH", "v_BSKH")}
    rest = {n: jnp.asarray(a) for n, a in case.arrays.items() if n not in narrow}
    B, T, N, _ = narrow["q_BTNH"].shape
    do = np.random.default_rng(2).integers(-8, 8, (B, T, N, narrow["v_BSKH"].shape[3]))

    def run(dtype: Any) -> list[np.ndarray]:
        def attend(arrays: dict[str, jax.Array]) -> jax.Array:
            given = {**arrays, **rest, **case.options}
            return kernels.attention(**given, scale=0.3, implementation="native")

        o, pull = jax.vjp(attend, {n: a.astype(dtype) for n, a in narrow.items()})
        return [np.float64(a) for a in (o, *jax.tree.leaves(pull(jnp.asarray(do, dtype))))]

    (o, *gradients), (exact, *slopes) = run(jnp.bfloat16), run(jnp.float32)
    np.testing.assert_allclose(o, exact, rtol=2.0**-8, atol=1e-6)
    for found, wanted in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2.0**-8, atol=2.0**-8 * np.abs(wanted).max())


@pytest.mark.parametrize("implementation", _names())
def test_padding_gives_zeros_and_takes_no_gradient(implementation: str) -> None:
    case = CASES["packed"]
    _skip_declined(case, jnp.float32, implementation)
    arrays = dict(case.arrays)
    for name in ("q_BTNH", "k_BSKH", "v_BSKH"):
        arrays[name] = arrays[name].copy()
        arrays[name][0, :5] = 1e4  # garbage in the padding must not matter
    found = _run(Case(arrays, case.options), jnp.float32, implementation)
    clean = _run(case, jnp.float32, implementation)
    for name, value in found.items():
        assert np.all(value[0, :5] == 0), name
        np.testing.assert_array_equal(value, clean[name], err_msg=name)


@pytest.mark.parametrize("implementation", _names())
def test_row_of_padding_only_is_finite(implementation: str) -> None:
    segments = np.zeros((B, T), np.int32)
    segments[1] = 1
    case = Case({**_qkv(), **_both("segment_ids", segments), **_SINKS}, {"window": 3})
    _skip_declined(case, jnp.float32, implementation)
    found = _run(case, jnp.float32, implementation)
    for name, value in found.items():
        assert np.all(np.isfinite(value)), name
    assert np.all(found["o"][0] == 0)


@pytest.mark.parametrize("implementation", _names())
def test_packed_documents_never_see_each_other(implementation: str) -> None:
    case = CASES["packed"]
    _skip_declined(case, jnp.float32, implementation)
    arrays = {**case.arrays, "v_BSKH": case.arrays["v_BSKH"].copy()}
    arrays["v_BSKH"][1, 12:30] += 100.0
    before = _run(case, jnp.float32, implementation)["o"]
    after = _run(Case(arrays, case.options), jnp.float32, implementation)["o"]
    other = np.ones((B, T), bool)
    other[1, 12:30] = False
    np.testing.assert_array_equal(after[other], before[other])
    assert np.abs(after[1, 12:30] - before[1, 12:30]).min() > 1
