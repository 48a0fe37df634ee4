"""Products with the blocks of GGUF files against float64, and what their layout stands for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.cases import one_in
from tests.gguf_blocks import KINDS, random_blocks
from tests.one_core import printed_on_one_core_and_all

from fornax import kernels
from fornax.config.errors import KernelError
from fornax.gguf import dequantize, integers

SIZES = [(512, 70), (2304, 32)]
"""Inputs and outputs: broken panels, and more records than a block of the kernel has."""
ROWS = 60


def packed_layer(kind: str, raw: np.ndarray, inputs: int) -> kernels.PackedWeight:
    units = kernels.lay_out_blocks(kind, integers(raw, KINDS[kind]))
    return kernels.block_weight(
        jnp.asarray(units),
        kinds=(kind,),
        inputs=(inputs,),
        outputs=(len(raw),),
        dtype=jnp.float32,
    )


def rounded(x: np.ndarray) -> np.ndarray:
    """Rows as the kernel multiplies them, 8 bits for 32 inputs, in float64."""
    groups = x.astype(np.float32).reshape(len(x), -1, 32)
    scales = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    inverse = (1 / np.where(scales > 0, scales, 1)).astype(np.float32)
    codes = np.rint(groups.astype(np.float64) * inverse)
    return (codes * scales).reshape(x.shape)


def rows_of(inputs: int) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((ROWS, inputs)).astype(np.float32)


def test_every_type_that_is_taken_apart_is_multiplied() -> None:
    taken = {name: kind for name, kind in KINDS.items() if kind.codes is not None}
    assert taken.keys() == kernels.BLOCKS.keys()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", one_in(2, kernels.BLOCKS))
def test_products_agree_with_float64(kind: str, size: tuple[int, int]) -> None:
    """With scales of all sizes that float16 has, denormals among them."""
    inputs, outputs = size
    for spread in (1.0, 3e-6):
        raw = random_blocks(kind, outputs, inputs, spread=spread)
        w_NK = dequantize(raw, KINDS[kind])
        packed = packed_layer(kind, raw, inputs)
        np.testing.assert_array_equal(packed.unpack(), w_NK.T)
        x = rows_of(inputs)
        for dtype in ("float32", "bfloat16"):
            given = jnp.asarray(x, dtype)
            exact = rounded(np.asarray(given, np.float32)) @ w_NK.T.astype(np.float64)
            found = np.asarray(packed.linear(given), np.float64)
            allowed = 2e-6 + (2**-8 if dtype == "bfloat16" else 0)
            assert np.abs(found - exact).max() < allowed * np.abs(exact).max(), (spread, dtype)


@pytest.mark.parametrize("kind", kernels.BLOCKS)
def test_every_code_is_multiplied_as_it_is_at_each_place(kind: str) -> None:
    """One input at a time, against all outputs, whose codes at that place are all there are."""
    raw = random_blocks(kind, 96, 256)
    w_NK = dequantize(raw, KINDS[kind])
    found = np.asarray(packed_layer(kind, raw, 256).linear(jnp.eye(256)))
    largest = np.abs(w_NK).max(1)
    assert (np.abs(found - w_NK.T) <= 1e-6 * largest).all()


@pytest.mark.parametrize("kind", kernels.BLOCKS)
def test_row_is_the_same_whatever_is_beside_it(kind: str) -> None:
    packed, x = packed_layer(kind, random_blocks(kind, 70, 512), 512), jnp.asarray(rows_of(512))
    linear = jax.jit(kernels.PackedWeight.linear)
    whole = np.asarray(linear(packed, x))
    for count in (1, 2, 3, 5, 8, 11, 12, 13, 25, 49):
        np.testing.assert_array_equal(linear(packed, x[ROWS - count :]), whole[ROWS - count :])


def test_layers_of_different_types_share_a_stack_and_a_call() -> None:
    """As in a file of Q4_K_M, whose layers' types differ."""
    x = jnp.asarray(rows_of(512)[:3])
    stacks = []
    for kinds, outputs in ((("Q4_K", "Q6_K", "Q4_K"), 70), (("Q5_0", "Q8_0", "Q4_0"), 32)):
        raws = [random_blocks(kind, outputs, 512) for kind in kinds]
        held = [integers(raw, KINDS[kind]) for raw, kind in zip(raws, kinds, strict=True)]
        laid = [kernels.lay_out_blocks(*each) for each in zip(kinds, held, strict=True)]
        weight = kernels.block_weight(
            jnp.asarray(np.concatenate(laid)),
            kinds=kinds,
            inputs=(512,),
            outputs=(outputs,),
            dtype=jnp.float32,
            stacked=True,
        )
        assert weight.shape == (3, 512, outputs)
        wide = np.stack([dequantize(raw, KINDS[k]).T for raw, k in zip(raws, kinds, strict=True)])
        np.testing.assert_array_equal(weight.unpack(), wide)
        alone = [packed_layer(kind, raw, 512) for kind, raw in zip(kinds, raws, strict=True)]
        stacks.append((weight, wide, alone))

    @jax.jit
    def layer(number: jax.Array, x: jax.Array, *stacks: kernels.PackedWeight) -> list[jax.Array]:
        return kernels.linears(x, [stack.at(number) for stack in stacks])

    for number in range(3):
        found = layer(jnp.int32(number), x, *(weight for weight, *_ in stacks))
        for y, (weight, wide, alone) in zip(found, stacks, strict=True):
            np.testing.assert_array_equal(y, alone[number].linear(x))
            np.testing.assert_array_equal(weight.at(number).unpack(), wide[number])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row_and_shows(value: float) -> None:
    for kind in kernels.BLOCKS:
        x = jnp.asarray(rows_of(512)[:5]).at[2, 150].set(value)
        y = packed_layer(kind, random_blocks(kind, 40, 512), 512).linear(x)
        assert not jnp.isfinite(y[2]).any()
        assert jnp.isfinite(jnp.delete(y, 2, axis=0)).all()


def test_what_does_not_fit_is_refused() -> None:
    good = {"kinds": ("Q4_K",), "inputs": (512,), "outputs": (40,), "dtype": jnp.float32}
    units = kernels.block_units("Q4_K", 512, 40)
    assert units == 2 * 2 * 4736 // 64
    values = jnp.zeros((units, 64), jnp.uint8)
    kernels.block_weight(values, **good)
    for changed, message in (
        ({"kinds": ("Q2_K",)}, "blocks of Q2_K are not multiplied; use one of Q4_0"),
        ({"inputs": (480,)}, "480 inputs are not a whole number of Q4_K's blocks of 256"),
        ({"outputs": (70,)}, r"uint8\[296, 64\], and uint8\[444, 64\] belongs"),
        ({"kinds": ("Q4_K", "Q4_K")}, "belongs there for one layer of Q4_K, Q4_K"),
    ):
        with pytest.raises(KernelError, match=message):
            kernels.block_weight(values, **{**good, **changed})


_DIGESTS = """
import hashlib
import jax, jax.numpy as jnp
from fornax import kernels
from tests.gguf_blocks import random_blocks
from tests.numerics.kernels.test_blocks import packed_layer
x = jax.random.normal(jax.random.key(0), (200, 512))
for kind in kernels.BLOCKS:
    packed = packed_layer(kind, random_blocks(kind, 1000, 512), 512)
    for rows in (1, 8, 64, 200):
        print(kind, rows, hashlib.sha256(packed.linear(x[:rows]).tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_a_process_held_to_one_core_computes_the_same() -> None:
    one, all_ = printed_on_one_core_and_all(_DIGESTS)
    assert one == all_
    assert one.count("\n") == 24
