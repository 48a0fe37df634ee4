"""Group norm and its gradients beside PyTorch's, whose channels come second."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fornax import kernels

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_group_norm_is_that_of_torch(activation: Any, implementation: str) -> None:
    rng = np.random.default_rng(0)
    x_BHWC, dy_BHWC = rng.normal(size=(2, 2, 12, 10, 96)).astype(np.float32)
    scale, bias = rng.normal(size=(2, 96)).astype(np.float32)

    def norm(*arrays: jax.Array) -> jax.Array:
        how: Any = {"activation": activation, "implementation": implementation}
        return kernels.group_norm(*arrays, groups=32, eps=1e-5, **how)

    y_BHWC, back = jax.vjp(norm, *map(jnp.asarray, (x_BHWC, scale, bias)))
    found = (y_BHWC, *back(jnp.asarray(dy_BHWC)))
    theirs = [torch.tensor(each, requires_grad=True) for each in (x_BHWC, scale, bias)]
    y = torch.nn.functional.group_norm(theirs[0].permute(0, 3, 1, 2), 32, *theirs[1:], eps=1e-5)
    y = (y if activation is None else torch.nn.functional.silu(y)).permute(0, 2, 3, 1)
    y.backward(torch.tensor(dy_BHWC))
    expected = (y.detach(), *(each.grad for each in theirs))
    for one, other in zip(found, expected, strict=True):
        assert other is not None
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-4, atol=1e-4)
