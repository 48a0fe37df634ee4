"""Packed products against float64, what codes stand for, and that a row depends on itself alone."""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tests.cases import one_in
from tests.one_core import printed_on_one_core_and_all

from fornax import kernels
from fornax.kernels._packed import native
from fornax.kernels._packed.formats import Parts

pytestmark = pytest.mark.usefixtures("small_process")

SIZES = [(40, 60), (512, 1536), (1500, 100), (4096, 64), (7, 3)]
"""Inputs and outputs: whole and broken words, groups, panels and blocks."""
ROWS = 500
INTEGERS = ("int8", "int4")
ROUNDED = [(precision, group) for precision in INTEGERS for group in (32, 64, 128)]
FLOATS = [("fp8", 32), ("fp8", 128), ("fp8", None), ("mxfp4", None)]
KINDS = [(name, None) for name in ("float32", "bfloat16", "int8", "int4", "fp8", "mxfp4")]
"""Precisions, with the groups that they have unless others are asked for."""
GROUPS = [kind for kind in (*ROUNDED, *FLOATS) if kind[1] not in (None, 64)]
CASES = [
    *itertools.product(SIZES, KINDS[:3]),
    *itertools.product([(512, 1536), (1500, 100), (7, 3)], KINDS[3:]),
    *itertools.product([(1500, 100)], GROUPS),
]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _weight(inputs: int, outputs: int) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(1).normal(size=(inputs, outputs)), jnp.float32)


def _rows(inputs: int, dtype: str) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, inputs)), dtype)


_linear = jax.jit(kernels.PackedWeight.linear)
_unpack = jax.jit(kernels.PackedWeight.unpack)


def _seen(x: jnp.ndarray, precision: str, group: int | None) -> np.ndarray:
    """The rows as the native kernel multiplies them, in float64."""
    if precision == "float32":
        return np.asarray(x, np.float64)
    if precision not in INTEGERS:
        return np.asarray(x.astype(jnp.bfloat16), np.float64)
    group, wide = group or 64, np.asarray(x, np.float32)
    padded = np.pad(wide, ((0, 0), (0, -wide.shape[1] % group))).reshape(len(wide), -1, group)
    scales = np.abs(padded).max(-1, keepdims=True) / np.float32(127)
    inverse = np.where(scales > 0, 1 / np.where(scales > 0, scales, 1), 0).astype(np.float32)
    codes = np.rint(padded.astype(np.float64) * inverse)  # one rounding, as of a fused sum
    assert np.abs(codes).max() <= 127
    return (codes * scales).reshape(len(wide), -1)[:, : wide.shape[1]]


@pytest.mark.parametrize(("size", "kind"), one_in(2, CASES), ids=str)
def test_agrees_with_float64(size, kind) -> None:
    precision, group = kind
    given = {"precision": precision, "group": group}
    packed = kernels.pack(_weight(*size), **given, implementation="native")
    plain = kernels.pack(_weight(*size), **given, implementation="plain")
    w = np.asarray(_unpack(packed), np.float64)
    np.testing.assert_array_equal(_unpack(plain), w)
    for dtype in ("float32", "bfloat16"):
        x = _rows(size[0], dtype)
        seen = _seen(x, precision, group)
        whole = np.asarray(x, np.float64) if precision in INTEGERS else seen
        for one, rows in ((packed, seen), (plain, whole)):
            exact = rows @ w
            error = np.abs(np.asarray(_linear(one, x), np.float64) - exact).max()
            allowed = 2e-6 + (2**-8 if dtype == "bfloat16" else 0)
            assert error < allowed * np.abs(exact).max(), (one.implementation, dtype)


@pytest.mark.parametrize("kind", [*ROUNDED, *FLOATS], ids=str)
def test_codes_are_the_nearest(kind) -> None:
    """Of all that a group's codes can stand for, whose range is that of the group's values."""
    precision, group = kind
    w = np.array(_weight(300, 37))
    w[64:96] *= 1e-3  # groups of other sizes
    w[:128, 5] = 0
    w[:128, 6] = np.abs(w[:128, 6]) + 1  # of one sign
    packed = kernels.pack(jnp.asarray(w), precision=precision, group=group, implementation="plain")
    unpacked = np.asarray(_unpack(packed), np.float64)
    scales, zeros = np.asarray(packed.scales)[0], packed.zeros
    if precision == "mxfp4":
        scales = np.where(scales == 0, 0, np.exp2(scales.astype(np.float64) - 127))
    values = {
        "int8": np.arange(-127, 128),
        "int4": np.arange(16),
        "fp8": E4M3[np.isfinite(E4M3)],
        "mxfp4": E2M1,
    }[precision]
    size = {"mxfp4": 32, "fp8": group or 300}.get(precision, group)
    for g in range(len(scales)):
        rows = slice(g * size, (g + 1) * size)
        zero = 0.0 if zeros is None else np.asarray(zeros, np.float64)[0, g]
        stands_VN = (values[:, None] - zero) * scales[g].astype(np.float64)
        least_KN = np.abs(stands_VN[:, None] - w[None, rows].astype(np.float64)).min(0)
        error_KN = np.abs(unpacked[rows] - w[rows])
        step = np.abs(w[rows]).max(0) * 1e-6
        assert (error_KN <= least_KN + step).all()
        used = np.abs(w[rows]).max(0) / np.where(scales[g] > 0, scales[g], 1)
        if precision == "mxfp4":
            assert ((used >= 4) & (used < 8) | (scales[g] == 0)).all()
        elif precision == "int4":
            ends = np.stack([w[rows].min(0), w[rows].max(0)])
            assert (
                np.abs(ends - np.clip(ends, stands_VN.min(0), stands_VN.max(0)))
                <= scales[g] / 2 + step
            ).all()
        else:
            assert (used <= values.max() * (1 + 1e-6)).all()
            assert ((used >= values.max() * (1 - 1e-6)) | (scales[g] == 0)).all()


def _product(x, values, scales, precision):
    """Native, of codes [K, N] and scales [G, N], with scales of all inputs or of 32."""
    assert native.unavailable() is None  # and so the kernel is there, whichever test comes first
    group = None if precision == "fp8" else 32
    parts = native.layout(Parts(values[None], scales[None]), precision, group)
    (y,) = native.linears(x, [(parts, None, jnp.int32(0), values.shape[1])], precision)
    return np.asarray(y)


def test_every_8_bit_float_is_multiplied_as_it_is() -> None:
    """One to an output, at each place of a word; NaN is NaN."""
    for place in range(4):
        codes = np.zeros((4, 256), np.uint8)
        codes[place] = np.arange(256)
        values = jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn))
        y = _product(jnp.ones((1, 4)), values, jnp.ones((1, 256)), "fp8")
        np.testing.assert_array_equal(y[0], E4M3)


def test_every_4_bit_float_is_multiplied_as_it_is() -> None:
    """With every power of two, at each place of a word; the least, a denormal, counts as 0."""
    powers = np.arange(256)
    exact = E2M1[:, None] * np.exp2(powers - 127.0)
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float32)
    expected[:, 0], expected[:, 255] = 0, np.nan
    for place in range(8):
        codes = np.zeros((32, 16 * 256), np.uint8)
        codes[place] = np.repeat(np.arange(16), 256)
        scales = np.tile(powers, 16).astype(np.uint8)[None]
        y = _product(
            jnp.eye(32)[place : place + 1], jnp.asarray(codes), jnp.asarray(scales), "mxfp4"
        )
        small = np.abs(expected) < np.finfo(np.float32).tiny  # may be flushed
        found = y.reshape(16, 256)
        np.testing.assert_array_equal(np.where(small, 0, found), np.where(small, 0, expected))


@pytest.mark.parametrize(("size", "kind"), one_in(4, CASES), ids=str)
def test_row_is_the_same_whatever_is_beside_it(size, kind) -> None:
    precision, group = kind
    packed = kernels.pack(_weight(*size), precision=precision, group=group, implementation="native")
    x = _rows(size[0], "float32")
    whole = _linear(packed, x)
    for count in (1, 2, 3, 5, 8, 11, 12, 13, 24, 25, 49, 128, 241, 481):
        start = ROWS - count
        np.testing.assert_array_equal(_linear(packed, x[start:]), whole[start:], str(count))


@pytest.mark.slow
def test_stack_is_read_at_the_layer_only() -> None:
    stack = jnp.stack([_weight(130, 70) * n for n in (1, 2, 3)])
    x = _rows(130, "float32")[:4]
    for precision, _ in KINDS:
        given = {"precision": precision, "implementation": "native"}
        packed = kernels.pack(stack, **given, stacked=True)
        for layer in range(3):
            alone = kernels.pack(stack[layer], **given)
            np.testing.assert_array_equal(packed.at(layer).linear(x), alone.linear(x))


@pytest.mark.parametrize("rows", one_in(2, [13, 1, 500]))
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4", "fp8", "mxfp4"])
def test_several_at_once_are_the_same_as_one_by_one(precision: str, rows: int) -> None:
    x = _rows(512, "float32")[:rows]
    weights = [
        kernels.pack(
            jnp.stack([_weight(512, outputs), _weight(512, outputs) + 1]),
            precision=precision,
            stacked=True,
            implementation="native",
        ).at(layer)
        for outputs, layer in ((512, 1), (40, 0), (1408, 1))
    ]
    for y, weight in zip(kernels.linears(x, weights), weights, strict=True):
        np.testing.assert_array_equal(y, weight.linear(x))


@pytest.mark.parametrize("rows", [1, pytest.param(13, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_inputs_in_another_order_are_gathered(precision: str, rows: int) -> None:
    """Bit for bit: of several weights at once, of which some share their order."""
    rng, x = np.random.default_rng(3), _rows(512, "float32")[:rows]
    orders = [rng.permutation(512) for _ in range(2)]
    given, sorted_ = [], []
    for outputs, order in ((512, orders[0]), (40, orders[0]), (96, orders[1]), (64, None)):
        w = _weight(512, outputs)
        one = kernels.pack(w, precision=precision, implementation="native")
        wanted = one.linear(x if order is None else x[:, order])
        if order is not None:
            one = dataclasses.replace(one, order=jnp.asarray(order, jnp.int32)[None])
            unsorted = np.asarray(kernels.pack(w, precision=precision).unpack())[np.argsort(order)]
            np.testing.assert_array_equal(one.unpack(), unsorted)
        given.append(one)
        sorted_.append(wanted)
    for y, wanted, weight in zip(kernels.linears(x, given), sorted_, given, strict=True):
        np.testing.assert_array_equal(y, wanted)
        np.testing.assert_array_equal(weight.linear(x), wanted)
    plain = kernels.pack(_weight(512, 40), precision=precision, implementation="plain")
    ordered = dataclasses.replace(plain, order=jnp.asarray(orders[0], jnp.int32)[None])
    np.testing.assert_array_equal(ordered.linear(x), plain.linear(x[:, orders[0]]))


def test_mixed_weights_at_once() -> None:
    x, w = _rows(64, "float32")[:3], _weight(64, 40)
    packed = kernels.pack(w, precision="float32")
    plain = kernels.pack(w, precision="float32", implementation="plain")
    first, second, third = kernels.linears(x, [packed, w, plain])
    np.testing.assert_array_equal(first, packed.linear(x))
    np.testing.assert_array_equal(second, kernels.linear(x, w))
    np.testing.assert_allclose(third, second, rtol=1e-5, atol=1e-5)
    fine, coarse = (kernels.pack(w, precision="int4", group=group) for group in (32, 64))
    for y, weight in zip(kernels.linears(x, [fine, coarse]), (fine, coarse), strict=True):
        np.testing.assert_array_equal(y, weight.linear(x))
    one, two = kernels.linears(x, [packed, plain])
    np.testing.assert_array_equal(one, first)
    np.testing.assert_array_equal(two, third)


def test_callers_at_the_same_time_do_not_disturb_each_other() -> None:
    x = _rows(512, "float32")[:3]
    packed = [kernels.pack(_weight(512, n), precision="float32") for n in (64, 512, 1408, 4096)]
    run = jax.jit(lambda x: [w.linear(x) for w in packed for _ in range(8)])
    alone = run(x)
    with ThreadPoolExecutor(6) as pool:
        for found in pool.map(lambda _: run(x), range(120)):
            for one, other in zip(found, alone, strict=True):
                np.testing.assert_array_equal(one, other)


_DIGESTS = """
import hashlib
import jax, jax.numpy as jnp
from fornax import kernels
w, x = (jax.random.normal(jax.random.key(n), (n, 520)) for n in (300, 200))
for precision in ("float32", "bfloat16", "int8", "int4", "fp8", "mxfp4"):
    packed = kernels.pack(w.T, precision=precision, implementation="native")
    for rows in (1, 8, 64, 200):
        y = packed.linear(x[:rows])
        print(precision, rows, hashlib.sha256(y.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_a_process_held_to_one_core_computes_the_same() -> None:
    one, all_ = printed_on_one_core_and_all(_DIGESTS)
    assert one == all_
    assert one.count("\n") == 24
