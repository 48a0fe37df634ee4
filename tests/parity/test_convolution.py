"""Convolutions of images and videos, and their gradients, beside PyTorch's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fornax import kernels

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("space", "stride", "padding"),
    [
        ((14, 11), 1, None),
        ((14, 11), 2, ((1, 1), (1, 1))),
        ((4, 7, 6), 1, ((2, 0), (1, 1), (1, 1))),
    ],
    ids=str,
)
def test_convolution_is_that_of_torch(space: Any, stride: int, padding: Any, dtype: str) -> None:
    """The last one as the video VAEs have it: padded before the frames alone."""
    rng, axes = np.random.default_rng(0), len(space)
    x = jnp.asarray(rng.normal(size=(2, *space, 24)), dtype)
    kernel = jnp.asarray(rng.normal(size=((3,) * axes + (24, 32))) * 0.07, dtype)
    bias = jnp.asarray(rng.normal(size=32), "float32")

    def run_ours(*arrays: jax.Array) -> jax.Array:
        return kernels.convolution(*arrays, stride=stride, padding=padding)

    y, back = jax.vjp(run_ours, x, kernel, bias)
    found = (y, *back(jnp.ones_like(y)))
    first, last = (0, axes + 1, *range(1, axes + 1)), (0, *range(2, axes + 2), 1)
    theirs = [
        torch.tensor(np.asarray(each, np.float32), requires_grad=True) for each in (x, kernel, bias)
    ]
    pads = [size for pair in reversed(padding or ((1, 1),) * axes) for size in pair]
    wide = torch.nn.functional.pad(theirs[0].permute(first), pads)
    run = torch.nn.functional.conv2d if axes == 2 else torch.nn.functional.conv3d
    weights = theirs[1].permute(axes + 1, axes, *range(axes))
    y_torch = run(wide, weights, theirs[2], stride=stride).permute(last)
    y_torch.sum().backward()
    expected = (y_torch.detach(), *(each.grad for each in theirs))
    allowed = 1e-4 if dtype == "float32" else 2**-6
    for one, other in zip(found, expected, strict=True):
        assert other is not None
        size = allowed * max(1.0, float(other.abs().max()))
        np.testing.assert_allclose(np.asarray(one, np.float32), other.numpy(), atol=size)
