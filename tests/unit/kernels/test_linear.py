"""The linear map: values and gradients are those of a plain product, whatever the axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.kernels import KernelError, linear

CASES = [
    ((6, 5), (5, 7), 1),
    ((2, 3, 8), (8, 4), 1),  # fewer outputs than inputs: the other order of contraction
    ((2, 3, 8), (8, 4, 3), 1),
    ((2, 3, 4, 2), (4, 2, 9), 2),
    ((2, 3, 4, 5), (4, 5, 2, 3), 2),
    ((5,), (5, 7), 1),
]


@pytest.mark.parametrize(("x_shape", "w_shape", "inputs"), CASES, ids=str)
def test_agrees_with_einsum(
    x_shape: tuple[int, ...], w_shape: tuple[int, ...], inputs: int
) -> None:
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=x_shape)), jnp.asarray(rng.normal(size=w_shape))
    ours = jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(linear(x, w, inputs=inputs))), (0, 1))
    plain = jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(jnp.tensordot(x, w, inputs))), (0, 1))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        ours(x, w),
        plain(x, w),
    )


def test_keeps_bfloat16() -> None:
    x, w = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16)
    assert linear(x, w).dtype == jnp.bfloat16
    assert jax.grad(lambda w: linear(x, w).sum().astype(jnp.float32))(w).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("x", "w", "inputs"),
    [
        (jnp.ones((2, 4)), jnp.ones((3, 3)), 1),
        (jnp.ones((2, 4)), jnp.ones((4, 3)), 0),
        (jnp.ones((2, 4)), jnp.ones((4, 3)), 3),
        (jnp.ones((2, 4)), jnp.ones((4, 3), jnp.bfloat16), 1),
    ],
)
def test_refuses_what_does_not_fit(x: jax.Array, w: jax.Array, inputs: int) -> None:
    with pytest.raises(KernelError, match="linear: "):
        linear(x, w, inputs=inputs)
