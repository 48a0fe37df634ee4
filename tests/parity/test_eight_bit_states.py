"""Moments in 8 bits beside bitsandbytes' dynamic map and block-wise codes."""

import jax
import numpy as np
import pytest
import torch
from bitsandbytes import functional

from fornax.optim.eight_bit import Blocks, dequantize, quantize

pytestmark = pytest.mark.parity
BLOCK = 64


@pytest.mark.parametrize("signed", [True, False])
def test_codes_stand_for_the_values_of_the_dynamic_map(signed: bool) -> None:
    """Of blocks of any scale, through bitsandbytes' own way back."""
    rng = np.random.default_rng(0)
    codes = rng.permutation(np.tile(np.arange(256, dtype=np.uint8), 8))
    scales = rng.uniform(1e-6, 1e3, len(codes) // BLOCK).astype(np.float32)
    table = functional.create_dynamic_map(signed=signed)
    state = functional.QuantState(
        absmax=torch.from_numpy(scales), code=table, blocksize=BLOCK, dtype=torch.float32
    )
    want = functional.dequantize_blockwise(torch.from_numpy(codes), state).numpy()
    np.testing.assert_allclose(
        dequantize(Blocks(codes, scales), 0, signed=signed), want, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_at_least_as_near_as_those_of_bitsandbytes(signed: bool) -> None:
    """Its code for CPUs takes others than the nearest of small values: below 1e-5 of a block's
    largest all, above 1e-2 two in a thousand, where the rest must be equal."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=1000 * BLOCK) * 10 ** rng.uniform(-7, 0, 1000 * BLOCK)).astype(np.float32)
    x = x if signed else np.abs(x)
    table = functional.create_dynamic_map(signed=signed)
    theirs, state = functional.quantize_blockwise(torch.from_numpy(x), code=table, blocksize=BLOCK)
    found = jax.jit(lambda x: quantize(x, 0, signed=signed))(x)
    np.testing.assert_array_equal(found.scales, state.absmax.numpy())
    scaled = x.astype(np.float64) / np.repeat(state.absmax.numpy(), BLOCK)
    values = table.numpy().astype(np.float64)
    ours, theirs = np.asarray(found.codes), theirs.numpy()
    raised = (ours == 1) & (theirs == 0) & (not signed)  # a value above zero keeps a code
    nearer = np.abs(values[ours] - scaled) <= np.abs(values[theirs] - scaled) * (1 + 1e-6)
    assert (nearer | raised).all()
    large = np.abs(scaled) > 1e-2
    assert (ours == theirs)[large].mean() > 0.995
