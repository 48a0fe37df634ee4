"""Packed products of groups of rows, and layers of packed experts, against float64.

Legend: M rows or tokens, E groups or experts, K inputs, N outputs, D width, F width of an expert.
"""

import functools
import itertools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.cases import one_in
from tests.numerics.kernels.test_experts import WAYS, layer_of, plain, tokens_of
from tests.numerics.kernels.test_packed import _seen

from fornax import kernels
from fornax.kernels import _native

pytestmark = pytest.mark.usefixtures("small_process")

native = pytest.mark.skipif(
    _native.unavailable("packed_experts") is not None, reason="needs a compiler"
)
KINDS = [("int8", 128), ("int4", None), ("fp8", 32), ("mxfp4", None)]
CASES: dict[str, tuple[int, int, int, list[int]]] = {
    "some without rows, and padding": (37, 96, 33, [5, 0, 30, 0]),
    "a row each": (8, 2048, 70, [1] * 8),
    "few rows": (60, 129, 131, [1, 2, 3, 4, 5, 7, 12, 13, 13]),
    "more than a block of rows": (700, 300, 301, [1, 2, 3, 470, 217]),
    "none at all": (9, 32, 8, [0, 0]),
    "broken words": (6, 7, 3, [2, 3]),
}
"""Rows, inputs, outputs and the groups' sizes."""


def _arrays(case: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    M, K, N, sizes = CASES[case]
    rng = np.random.default_rng(0)
    x_MK = jnp.asarray(rng.normal(size=(M, K)), jnp.float32)
    w_EKN = jnp.asarray(rng.normal(size=(len(sizes), K, N)), jnp.float32)
    return x_MK, w_EKN, jnp.asarray(sizes, jnp.int32)


@jax.jit
def _grouped(x_MK: jax.Array, weight: kernels.PackedWeight, sizes_E: jax.Array) -> jax.Array:
    return kernels.grouped_matmul(x_MK, weight, sizes_E)


def _expected(x_MK: np.ndarray, w_EKN: np.ndarray, sizes: list[int]) -> np.ndarray:
    y_MN, first = np.zeros((len(x_MK), w_EKN.shape[2])), 0
    for e, size in enumerate(sizes):
        y_MN[first : first + size] = x_MK[first : first + size] @ w_EKN[e]
        first += size
    return y_MN


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *(pytest.param("few rows", kind, marks=pytest.mark.slow) for kind in KINDS),
        *one_in(2, itertools.product(sorted(set(CASES) - {"few rows"}), [("int4", 32)])),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in itertools.product(CASES, [("int8", None), ("fp8", None)])
        ),
    ],
    ids=str,
)
def test_rows_by_group_agree_with_float64(case: str, kind: Any) -> None:
    """By the native kernel, in XLA, and by the reference, which does not round rows."""
    (precision, group), (x_MK, w_EKN, sizes_E) = kind, _arrays(case)
    stack = jnp.stack([3 * w_EKN, w_EKN])
    how = {"precision": precision, "group": group, "stacked": True, "experts": True}
    for implementation in ("native", "plain"):
        if implementation == "native" and _native.unavailable("packed_experts") is not None:
            continue
        packed = kernels.pack(stack, **how, implementation=implementation)
        assert packed.shape == stack.shape
        assert packed.at(1).shape == packed.at(1).unpack().shape == w_EKN.shape
        w = np.asarray(packed.at(1).unpack(), np.float64)
        narrow = implementation == "native" and case == "few rows"
        for dtype in ("float32", "bfloat16") if narrow else ("float32",):
            x = x_MK.astype(dtype)
            rounded = implementation == "native" or precision in ("fp8", "mxfp4")
            seen = _seen(x, precision, group) if rounded else np.asarray(x, np.float64)
            y = _grouped(x, packed.at(1), sizes_E)
            assert y.dtype == x.dtype
            exact = _expected(seen, w, CASES[case][3])
            allowed = 2e-6 + (2**-8 if dtype == "bfloat16" else 0)
            error = np.abs(np.asarray(y, np.float64) - exact).max()
            assert error <= allowed * np.abs(exact).max(), (implementation, dtype)
        if (case, implementation) != ("few rows", "plain"):
            continue
        by_hand = kernels.grouped_matmul(x_MK, packed.at(1), sizes_E, implementation="reference")
        exact = _expected(np.asarray(x_MK, np.float64), w, CASES[case][3])
        np.testing.assert_allclose(by_hand, exact, atol=2e-5 * max(1, np.abs(exact).max()))


@native
@pytest.mark.parametrize("kind", [("int8", None), ("mxfp4", None)], ids=str)
def test_a_row_is_the_same_whatever_is_beside_it(kind: Any) -> None:
    x_MK, w_EKN, sizes_E = _arrays("more than a block of rows")
    packed = kernels.pack(w_EKN, precision=kind[0], group=kind[1], experts=True)
    whole = _grouped(x_MK, packed, sizes_E)
    for first, count in ((6, 1), (10, 8), (200, 25), (470, 6)):
        alone = _grouped(x_MK[first : first + count], packed, jnp.array([0, 0, 0, count, 0]))
        np.testing.assert_array_equal(alone, whole[first : first + count])


def _packed(layer: dict[str, Any], kind: Any) -> tuple[list[Any], dict[str, Any]]:
    """The second layer of a stack of three, and float64 matrices that it stands for."""
    weights, wide = [], dict(layer)
    for name in ("gate", "up", "down"):
        w = jnp.asarray(layer[name], jnp.float32)
        stack = jnp.stack([7 * w, w, 0 * w])
        given = {"precision": kind[0], "group": kind[1], "stacked": True, "experts": True}
        weights.append(kernels.pack(stack, **given).at(1))
        wide[name] = np.asarray(weights[-1].unpack(), np.float64)
    return weights, wide


def _fused(tokens: tuple[np.ndarray, ...], weights: list[Any], layer: dict[str, Any], **how: Any):
    biases = {
        name: jnp.asarray(bias, jnp.float32) for name, bias in layer.items() if "bias" in name
    }
    run = jax.jit(functools.partial(kernels.fused_experts, **how))
    return np.asarray(run(*tokens, *weights, **biases), np.float64)


@native
@pytest.mark.parametrize(
    ("way", "rows", "kind"),
    [
        *one_in(3, itertools.product(WAYS, [60], [("int4", 32)])),
        *(pytest.param("silu", 300, kind, marks=pytest.mark.slow) for kind in KINDS),
        ("clipped", 1, ("mxfp4", None)),
        ("silu", 9, ("int8", None)),
    ],
    ids=str,
)
def test_experts_in_one_call_agree_with_float64(way: str, rows: int, kind: Any) -> None:
    """With what they stand for, and rows rounded as the kernel rounds them."""
    tokens, layer = tokens_of(rows), layer_of("float32", biased=rows != 9)
    weights, wide = _packed(layer, kind)
    y_MD = _fused(tokens, weights, layer, **WAYS[way])

    def seen(row: np.ndarray) -> np.ndarray:
        return _seen(jnp.asarray(row, jnp.float32)[None], *kind)[0]

    wanted = plain(tokens, wide, seen, **WAYS[way])
    # A hidden number may round to the other side of a tie of float64's.
    error = np.sqrt(np.mean((y_MD - wanted) ** 2) / np.mean(wanted**2))
    assert error < 1e-3
    assert np.median(np.abs(y_MD - wanted)) < 2e-6


@native
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_is_the_same_whatever_is_beside_it(kind: Any) -> None:
    tokens, layer = tokens_of(700), layer_of("float32", biased=True)
    weights, _ = _packed(layer, kind)
    whole = _fused(tokens, weights, layer, activation="silu")
    for some in (slice(3, 4), slice(100, 180)):
        beside = tuple(part[some] for part in tokens)
        found = _fused(beside, weights, layer, activation="silu")
        np.testing.assert_array_equal(found, whole[some])


@native
def test_experts_that_nobody_chose_make_zeros_and_nan_stays_in_its_token() -> None:
    x_MD, weights_MK, experts_MK = tokens_of(6)
    layer = layer_of("float32", biased=False)
    for kind in (KINDS[1], KINDS[3]):
        weights, _ = _packed(layer, kind)
        nobody = _fused((x_MD, weights_MK, 0 * experts_MK + 7), weights, layer, activation="silu")
        np.testing.assert_array_equal(nobody, 0)
        broken = x_MD.copy()
        broken[2, 5] = np.nan
        y_MD = _fused((broken, weights_MK, experts_MK % 7), weights, layer, activation="silu")
        assert not np.isfinite(y_MD[2]).any()
        assert np.isfinite(np.delete(y_MD, 2, axis=0)).all()


_DIGESTS = """
import hashlib
import jax, jax.numpy as jnp
from fornax import kernels
w = [jax.random.normal(jax.random.key(n), (8, 512, 256)) for n in range(3)]
w[2] = w[2].mT
x, r = jax.random.normal(jax.random.key(5), (300, 512)), jnp.ones((300, 2)) / 2
e = jax.random.randint(jax.random.key(6), (300, 1), 0, 4) + jnp.array([0, 4])
for precision in ("int8", "int4", "fp8", "mxfp4"):
    packed = [kernels.pack(each, precision=precision, experts=True) for each in w]
    for rows in (1, 8, 300):
        y = kernels.fused_experts(x[:rows], r[:rows], e[:rows], *packed, activation="silu")
        print(precision, rows, hashlib.sha256(y.tobytes()).hexdigest())
"""


@native
@pytest.mark.exhaustive
def test_a_process_held_to_one_core_computes_the_same() -> None:
    held = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    one, all_ = (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
        ).stdout
        for program in (held + _DIGESTS, _DIGESTS)
    )
    assert one == all_
    assert one.count("\n") == 12


def test_a_program_widens_one_matrix_at_a_time() -> None:
    """Of 64 in XLA: its working memory is that of one and its rows."""
    packed = kernels.pack(
        jnp.ones((64, 256, 512), jnp.bfloat16),
        precision="int4",
        experts=True,
        implementation="plain",
    )
    x_MK, sizes_E = jnp.ones((64, 256)), jnp.ones(64, jnp.int32)
    memory = _grouped.lower(x_MK, packed, sizes_E).compile().memory_analysis()
    one = 4 * 256 * 512
    assert memory.temp_size_in_bytes < 6 * one
    assert 64 * one > 10 * memory.temp_size_in_bytes


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda w: kernels.pack(w, experts=True), "experts in float32 are not packed"),
        (lambda w: kernels.pack(w[0], precision="int8", experts=True), "leaves no outputs"),
        (
            lambda w: kernels.linear(
                jnp.ones((1, 32)), kernels.pack(w, precision="int8", experts=True)
            ),
            "use grouped_matmul",
        ),
        (
            lambda w: kernels.grouped_matmul(
                jnp.ones((1, 32)), kernels.pack(w[0], precision="int8"), jnp.ones(3, jnp.int32)
            ),
            "must be one layer of matrices",
        ),
        (
            lambda w: kernels.grouped_matmul(
                jnp.ones((1, 31)),
                kernels.pack(w, precision="int8", experts=True),
                jnp.ones(3, jnp.int32),
            ),
            "with one K",
        ),
        (
            lambda w: kernels.grouped_matmul(
                jnp.ones((1, 32)),
                kernels.pack(w, precision="int8", experts=True),
                jnp.ones(4, jnp.int32),
            ),
            "one for each of the 3 matrices",
        ),
        (
            lambda w: kernels.grouped_matmul(
                jnp.ones((1, 32), jnp.int32),
                kernels.pack(w, precision="int8", experts=True),
                jnp.ones(3, jnp.int32),
            ),
            "so cast x",
        ),
    ],
)
def test_misuse_is_named(misuse: Any, words: str) -> None:
    with pytest.raises(kernels.KernelError, match=words):
        misuse(jnp.ones((3, 32, 6)))
