"""Packed weights: their contract with kernels.linear, their shapes and what they refuse."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.cases import one_in

from fornax import kernels
from fornax.config.errors import KernelError
from fornax.kernels._native import build, units
from fornax.mesh import MeshConfig, make_mesh, use_mesh

pytestmark = pytest.mark.usefixtures("small_process")

IMPLEMENTATIONS = ["native", "plain"]
PRECISIONS = ["float32", "bfloat16", "int8", "int4", "fp8", "mxfp4"]
STEPS = {"float32": 0.0, "bfloat16": 2**-8, "int8": 0.5 / 127, "int4": 1 / 15, "fp8": 2**-4}
"""Largest error of a weight, as a share of the greatest; of mxfp4 0.25."""


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_layers_of_a_stack_inside_a_scan(implementation, precision) -> None:
    w, x = _normal(3, 40, 6, 10), _normal(2, 5, 40, seed=1)
    packed = kernels.pack(w, precision=precision, stacked=True, implementation=implementation)

    @jax.jit
    def every_layer(packed: kernels.PackedWeight, x: jax.Array) -> jax.Array:
        def step(_, layer):
            return None, kernels.linear(x, packed.at(layer))

        return jax.lax.scan(step, None, jnp.arange(3))[1]

    expected = jnp.einsum("btk,lknh->lbtnh", x, packed.unpack())
    tolerance = {"float32": 1e-5, "bfloat16": 0.1, "fp8": 0.1, "mxfp4": 0.1}.get(precision, 0.2)
    np.testing.assert_allclose(every_layer(packed, x), expected, atol=tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("precision", one_in(2, PRECISIONS))
def test_unpack_returns_the_weight_as_stored(implementation, precision) -> None:
    w = _normal(2, 7, 13, 3)
    packed = kernels.pack(
        w, inputs=2, precision=precision, stacked=True, implementation=implementation
    )
    assert packed.shape == packed.unpack().shape == w.shape
    assert packed.at(1).shape == packed.at(1).unpack().shape == w.shape[1:]
    allowed = STEPS.get(precision, 0.25) * float(jnp.abs(w).max())
    np.testing.assert_allclose(packed.unpack(), w, atol=allowed)
    np.testing.assert_array_equal(packed.at(1).unpack(), packed.unpack()[1])


def test_several_input_axes() -> None:
    w, x = _normal(4, 10, 12), _normal(5, 4, 10, seed=1)
    y = kernels.linear(x, kernels.pack(w, inputs=2), inputs=2)
    np.testing.assert_allclose(y, jnp.tensordot(x, w, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_packing_inside_jit_gives_the_same(precision) -> None:
    w, x = _normal(20, 30), _normal(3, 20, seed=1)
    inside = jax.jit(lambda w: kernels.pack(w, precision=precision))(w)
    outside = kernels.pack(w, precision=precision)
    assert inside.implementation == outside.implementation
    np.testing.assert_array_equal(inside.linear(x), outside.linear(x))


def test_no_rows_give_no_rows() -> None:
    assert kernels.pack(_normal(20, 30)).linear(jnp.zeros((0, 20))).shape == (0, 30)


def test_result_has_the_dtype_of_x() -> None:
    packed = kernels.pack(_normal(20, 30), precision="bfloat16")
    for dtype in (jnp.float32, jnp.bfloat16):
        assert packed.linear(jnp.ones((2, 20), dtype)).dtype == dtype


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row_and_shows(precision, value) -> None:
    x = _normal(5, 200).at[2, 150].set(value)
    y = kernels.pack(_normal(200, 40), precision=precision).linear(x)
    assert not jnp.isfinite(y[2]).any()
    assert jnp.isfinite(jnp.delete(y, 2, axis=0)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("precision", ["int8", "int4", "fp8", "mxfp4"])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_weight_that_is_not_finite_spoils_its_output_alone(precision, value, implementation):
    w = _normal(200, 40).at[150, 7].set(value)
    packed = kernels.pack(w, precision=precision, implementation=implementation)
    y = packed.linear(_normal(3, 200, seed=1))
    assert not jnp.isfinite(y[:, 7]).any()
    assert jnp.isfinite(jnp.delete(y, 7, axis=1)).all()


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8", "mxfp4"])
def test_few_bits_take_zeros_and_the_smallest_numbers(precision) -> None:
    packed = kernels.pack(_normal(128, 40), precision=precision)
    tiny = jnp.full((1, 128), 2e-38)
    assert jnp.abs(packed.linear(jnp.concatenate([jnp.zeros((1, 128)), tiny]))).max() < 1e-30
    for w in (0.0, 1e-39):
        zeros = kernels.pack(jnp.full((128, 40), w), precision=precision)
        np.testing.assert_array_equal(zeros.linear(_normal(2, 128)), 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_memory_is_that_of_the_precision(implementation) -> None:
    w = _normal(128, 64)
    sizes = {
        precision: kernels.pack(w, precision=precision, implementation=implementation).nbytes
        for precision in PRECISIONS
    }
    groups, values = 2 * 64, 128 * 64
    assert sizes == {
        "float32": 4 * values,
        "bfloat16": 2 * values,
        "int8": values + 4 * groups,
        "int4": values // 2 + 5 * groups,
        "fp8": values + 4 * 64,
        "mxfp4": values // 2 + 2 * groups,
    }


def test_any_object_with_a_product_is_a_weight() -> None:
    class Twice:
        shape, dtype = (3, 3), jnp.dtype("float32")

        def linear(self, x: jax.Array, inputs: int) -> jax.Array:
            return 2 * x * inputs

    np.testing.assert_array_equal(kernels.linear(jnp.ones(3), Twice()), [2, 2, 2])


def test_over_several_devices_the_product_is_xlas() -> None:
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=8))
    with use_mesh(mesh, MeshConfig().resolved_rules()):
        assert kernels.pack(_normal(20, 32)).implementation == "plain"
    spread = jax.device_put(
        _normal(20, 32), jax.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "tensor"))
    )
    assert kernels.pack(spread).implementation == "plain"
    assert kernels.pack(_normal(20, 32)).implementation == "native"


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda w: kernels.pack(w, precision="int2"), "precision='int2' is unknown"),
        (lambda w: kernels.pack(w, precision="int4", group=48), "group=48 is none of int4's"),
        (lambda w: kernels.pack(w, precision="mxfp4", group=64), "group=64 is none of mxfp4's"),
        (lambda w: kernels.pack(w, group=64), "float32 has no groups"),
        (lambda w: kernels.pack(w, inputs=2), "leaves no outputs"),
        (lambda w: kernels.pack(w, implementation="fast"), "implementation='fast' is unknown"),
        (lambda w: kernels.pack(w).at(0), "is one layer"),
        (lambda w: kernels.pack(w[None], stacked=True).linear(jnp.ones((1, 4))), "is a stack"),
        (lambda w: kernels.pack(w).linear(jnp.ones((1, 5))), "the last 1 axes"),
        (lambda w: kernels.pack(w).linear(jnp.ones((1, 4), jnp.int32)), "x is int32"),
    ],
)
def test_misuse_is_named(misuse, words) -> None:
    with pytest.raises(KernelError, match=words.replace("(", r"\(")):
        misuse(jnp.ones((4, 6)))


def test_native_by_name_says_why_it_declines() -> None:
    with kernels.target_platform("tpu"), pytest.raises(KernelError, match="not on tpu"):
        kernels.pack(jnp.ones((4, 6)), implementation="native")


_PORTABLE = """
import sys
from fornax.kernels._native import units
units.NATIVE = tuple(sys.argv[1].split())
import jax.numpy as jnp, numpy as np
from fornax import kernels
rng = np.random.default_rng(0)
w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((200, 70), (19, 200)))
tolerances = {"float32": 1e-5, "int8": 0.012, "int4": 0.012}
for precision in ("float32", "bfloat16", "int8", "int4", "fp8", "mxfp4"):
    tolerance = tolerances.get(precision, 2e-5)
    packed = kernels.pack(w, precision=precision, implementation="native")
    y = np.asarray(packed.linear(x))
    rounded = x if precision in tolerances else x.astype(jnp.bfloat16)
    exact = np.asarray(rounded, np.float64) @ np.asarray(packed.unpack(), np.float64)
    assert np.abs(y - exact).max() < tolerance * np.abs(exact).max(), precision
    for start, stop in ((3, 4), (5, 12), (0, 13)):
        np.testing.assert_array_equal(packed.linear(x[start:stop]), y[start:stop])
print("right")
"""


_AVX_VNNI = (
    (*units.PREBUILT["avx2"][0], "-mavxvnni"),
    units.PREBUILT["avx2"][1] | {"avx_vnni"},
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["plain", "avx_vnni", *units.PREBUILT])
def test_kernel_is_right_on_lesser_processors(name, tmp_path) -> None:
    """The paths that this processor would not take: plain, and what a wheel carries."""
    march, needed = {"plain": ((), frozenset()), "avx_vnni": _AVX_VNNI, **units.PREBUILT}[name]
    if not needed <= build._features():
        pytest.skip(f"this processor cannot run code compiled for {name}")
    done = subprocess.run(
        [sys.executable, "-c", _PORTABLE, " ".join(march)],
        env={**os.environ, "FORNAX_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout.strip() == "right", done.stderr


# Codes that were made before


def _codes(precision: str, group: int | None, L: int, K: int, N: int) -> tuple:
    """Random codes, scales and zeros, all that the format has: int8's -128 too."""
    rng = np.random.default_rng(K)
    scales = rng.uniform(0.1, 1, (L, -(-K // (group or K)), N)).astype(np.float32)
    if precision == "int8":
        return rng.integers(-128, 128, (L, K, N)).astype(np.int8), scales, None
    if precision == "fp8":
        return rng.normal(size=(L, K, N)).astype(jnp.float8_e4m3fn), scales, None
    values = rng.integers(0, 16, (L, K, N)).astype(np.uint8)
    if precision == "mxfp4":
        return values, rng.integers(120, 130, scales.shape).astype(np.uint8), None
    return values, scales, rng.integers(0, 16, scales.shape).astype(np.uint8)


def _arrays(given: tuple) -> list[jax.Array | None]:
    return [None if each is None else jnp.asarray(each) for each in given]


def _meaning(precision: str, group: int | None, values, scales, zeros) -> np.ndarray:
    """(code - zero) x scale, in float64."""
    if precision == "mxfp4":
        sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = sizes[values & 7] * np.where(values & 8, -1, 1)
        scales = 2.0 ** (scales.astype(int) - 127)
    index = np.arange(values.shape[1]) // (group or values.shape[1])
    codes = values.astype(np.float64)
    return (codes - (0 if zeros is None else zeros[:, index])) * scales[:, index]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("precision", "group"),
    one_in(
        2, [("int8", 32), ("int8", 128), ("int4", 32), ("int4", 64), ("mxfp4", 32), ("fp8", None)]
    ),
)
def test_codes_that_were_made_before_are_laid_out_as_they_are(
    precision, group, implementation
) -> None:
    """Two layers, the last group in part; products with whole numbers, which no row rounds."""
    given = _codes(precision, group, 2, 144, 40)
    packed = kernels.pack_codes(
        *_arrays(given),
        precision=precision,
        group=group,
        inputs=(4, 36),
        outputs=(5, 8),
        dtype=jnp.float32,
        stacked=True,
        implementation=implementation,
    )
    w = _meaning(precision, group, *given)
    assert packed.shape == (2, 4, 36, 5, 8)
    assert packed.implementation == implementation
    np.testing.assert_array_equal(packed.unpack().reshape(w.shape), w.astype(np.float32))
    x = np.random.default_rng(1).integers(-127, 128, (3, 144)).astype(np.float32)
    x[:, ::32] = 127  # the greatest of each group: rows rounded to 8 bits are as they were
    y = kernels.linear(jnp.asarray(x).reshape(3, 4, 36), packed.at(1), inputs=2)
    expected = x.astype(np.float64) @ w[1]
    np.testing.assert_allclose(
        y.reshape(3, 40), expected, rtol=2e-6, atol=2e-6 * np.abs(w).max() * 127 * 144
    )


def test_codes_that_do_not_fit_are_refused() -> None:
    values, scales, zeros = _arrays(_codes("int4", 32, 1, 64, 40))
    good = {
        "values": values,
        "scales": scales,
        "zeros": zeros,
        "precision": "int4",
        "group": 32,
        "inputs": (64,),
        "outputs": (40,),
        "dtype": jnp.float32,
    }
    kernels.pack_codes(**good)
    for changed, message in (
        ({"precision": "bfloat16"}, "precision='bfloat16' has no codes; use one of int8"),
        ({"group": 16}, "group=16 is none of int4's, 32, 64, 128"),
        ({"group": None}, "group=None is none of int4's"),
        ({"zeros": None}, r"zeros is None, and uint8\[1, 2, 40\] belongs there for int4"),
        ({"group": 64}, r"scales is float32\[1, 2, 40\], and float32\[1, 1, 40\] belongs"),
        ({"precision": "int8"}, r"values is uint8\[1, 64, 40\], and int8\[1, 64, 40\] belongs"),
        ({"inputs": (60,)}, r"values is uint8\[1, 64, 40\], and uint8\[1, 60, 40\] belongs"),
    ):
        with pytest.raises(KernelError, match=message):
            kernels.pack_codes(**{**good, **changed})
