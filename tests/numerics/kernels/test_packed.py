"""The native product against float64, and that a row does not depend on what is beside it."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import kernels

SIZES = [(40, 60), (512, 1536), (1500, 100), (4096, 64), (7, 3)]
"""Inputs and outputs: whole and broken words, groups, panels and blocks."""
ROWS = 500


def _weight(inputs: int, outputs: int) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(1).normal(size=(inputs, outputs)), jnp.float32)


def _rows(inputs: int, dtype: str) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, inputs)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_agrees_with_float64(size, precision, dtype) -> None:
    packed = kernels.pack(_weight(*size), precision=precision, implementation="native")
    x = _rows(size[0], dtype)
    seen = x.astype(jnp.bfloat16) if precision == "bfloat16" else x
    exact = np.asarray(seen, np.float64) @ np.asarray(packed.unpack(), np.float64)
    error = np.abs(np.asarray(packed.linear(x), np.float64) - exact).max() / np.abs(exact).max()
    allowed = {"float32": 2e-6, "bfloat16": 2e-6, "int8": 0.01}[precision]
    assert error < allowed + (2**-8 if dtype == "bfloat16" else 0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_row_is_the_same_whatever_is_beside_it(size, precision) -> None:
    packed = kernels.pack(_weight(*size), precision=precision, implementation="native")
    x = _rows(size[0], "float32")
    whole = packed.linear(x)
    for count in (1, 2, 3, 5, 8, 11, 12, 13, 24, 25, 49, 128, 241, 481):
        start = ROWS - count
        np.testing.assert_array_equal(packed.linear(x[start:]), whole[start:], str(count))


def test_stack_is_read_at_the_layer_only() -> None:
    stack = jnp.stack([_weight(130, 70) * n for n in (1, 2, 3)])
    x = _rows(130, "float32")[:4]
    for precision in ("float32", "bfloat16", "int8"):
        packed = kernels.pack(stack, precision=precision, stacked=True, implementation="native")
        for layer in range(3):
            alone = kernels.pack(stack[layer], precision=precision, implementation="native")
            np.testing.assert_array_equal(packed.at(layer).linear(x), alone.linear(x))


@pytest.mark.parametrize("rows", [1, 13, 500])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
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


def test_mixed_weights_at_once() -> None:
    x, w = _rows(64, "float32")[:3], _weight(64, 40)
    packed = kernels.pack(w, precision="float32")
    plain = kernels.pack(w, precision="float32", implementation="plain")
    first, second, third = kernels.linears(x, [packed, w, plain])
    np.testing.assert_array_equal(first, packed.linear(x))
    np.testing.assert_array_equal(second, kernels.linear(x, w))
    np.testing.assert_allclose(third, second, rtol=1e-5, atol=1e-5)
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


@pytest.mark.slow
def test_a_process_held_to_one_core_computes_the_same() -> None:
    program = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax.numpy as jnp
from fornax import kernels
w = kernels.pack(jnp.arange(512.0 * 512).reshape(512, 512) % 4, implementation="native")
print([float(w.linear(jnp.ones((rows, 512))).sum()) for rows in (1, 64, 200)])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    whole = float((np.arange(512.0 * 512) % 4).sum())
    assert done.stdout.strip() == str([whole, 64 * whole, 200 * whole]), done.stderr
