"""The linear layer: values and gradients are those of a plain product, whatever the axes."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.kernels import KernelError, linear
from fornax.mesh import MeshConfig, make_mesh, use_mesh

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


def test_remat_policies_that_save_products_save_it() -> None:
    x, w = jnp.ones((8, 8)), jnp.ones((8, 8))

    def products(policy) -> int:
        twice = jax.checkpoint(
            lambda x, w: jnp.sin(linear(jnp.sin(linear(x, w)), w)).sum(), policy=policy
        )
        jaxpr = str(jax.make_jaxpr(jax.grad(twice))(x, w))
        return jaxpr.count("dot_general[") + jaxpr.count("linear_tangent[")

    policies = jax.checkpoint_policies
    assert products(policies.dots_saveable) < products(policies.nothing_saveable)


def test_second_derivative_and_vmap() -> None:
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(3, 2, 4))), jnp.asarray(rng.normal(size=(4, 5)))

    def curvature(product) -> jax.Array:
        slope = jax.grad(lambda w, x: jnp.sum(jnp.sin(product(x, w))))
        per_row = jax.vmap(slope, in_axes=(None, 0))
        return jax.grad(lambda w: jnp.sum(per_row(w, x) ** 2))(w)

    np.testing.assert_allclose(curvature(linear), curvature(jnp.matmul), rtol=1e-4, atol=1e-4)


def test_forward_mode_agrees() -> None:
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(2, 4))), jnp.asarray(rng.normal(size=(4, 5)))
    _, ours = jax.jvp(linear, (x, w), (x + 1, w - 1))
    _, plain = jax.jvp(jnp.matmul, (x, w), (x + 1, w - 1))
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_costs_no_product_of_its_own() -> None:
    """Only the forward product and the input's cotangent are made, not a product with zeros."""
    x, w = jnp.ones((8, 6)), jnp.ones((6, 5))
    traced = jax.make_jaxpr(jax.grad(lambda x: jnp.sin(linear(x, w)).sum()))(x)
    assert str(traced).count("dot_general[") == 2
    assert "linear_tangent" not in str(traced)


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "inputs"),
    [
        ((4, 64, 96), (96, 128), 1),
        ((256, 128), (128, 96), 1),  # one axis of rows
        ((4, 64, 96), (96, 4, 32), 1),
        ((4, 64, 4, 32), (4, 32, 96), 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("devices", [1, 2])  # on a mesh it is XLA that multiplies
def test_bfloat16_is_multiplied_as_such_and_summed_in_float32(
    x_shape: tuple[int, ...], w_shape: tuple[int, ...], inputs: int, devices: int
) -> None:
    """In the compiled forward and backward products; sums against float64 of the same numbers."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in (x_shape, w_shape))
    y_shape = x_shape[: len(x_shape) - inputs] + w_shape[inputs:]
    dy = jnp.asarray(rng.normal(size=y_shape), jnp.bfloat16)

    def both(x: jax.Array, w: jax.Array, dy: jax.Array):
        y, pull = jax.vjp(lambda x, w: linear(x, w, inputs=inputs), x, w)
        return y, *pull(dy)

    with use_mesh(make_mesh(MeshConfig(), jax.devices()[:devices]), {}):
        compiled = jax.jit(both).lower(x, w, dy).compile()
    assert _operands_of_products(compiled.as_text()) == {"bf16"}
    wide = [np.asarray(a, np.float64) for a in (x, w, dy)]
    x_MK = wide[0].reshape(-1, math.prod(w_shape[:inputs]))
    w_KN = wide[1].reshape(x_MK.shape[1], -1)
    dy_MN = wide[2].reshape(x_MK.shape[0], -1)
    wanted = (x_MK @ w_KN, dy_MN @ w_KN.T, x_MK.T @ dy_MN)
    for got, want in zip(compiled(x, w, dy), wanted, strict=True):
        got = np.asarray(got, np.float64).reshape(want.shape)
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-4 * np.abs(want).max())


def _operands_of_products(text: str) -> set[str]:
    """Dtypes of what the products of a compiled program multiply."""
    dtypes = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", text))
    products = r" (?:dot|custom-call)\(%([\w.\-]+), %([\w.\-]+)\)"
    pairs = re.findall(products, text)
    assert len(pairs) == 3
    return {dtypes[name] for pair in pairs for name in pair}
