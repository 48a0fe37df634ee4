"""Rows of which each device has early and late tokens, there and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.mesh import (
    MeshConfig,
    balance_ids,
    balance_length,
    balanced_order,
    balances,
    make_mesh,
    restore_length,
    use_mesh,
)


@pytest.mark.parametrize("sizes", [{"context": 8}, {"context": 4, "data": 2}, {"context": 2}])
def test_devices_have_early_and_late_tokens_and_give_them_back(sizes: dict[str, int]) -> None:
    count = int(np.prod(list(sizes.values())))
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[:count])
    T = 3 * 2 * sizes["context"]
    index_BT = jnp.broadcast_to(jnp.arange(T), (4, T))
    x_BTD = jax.random.normal(jax.random.key(0), (4, T, 5))
    with use_mesh(mesh):
        ids_BT = jax.jit(lambda ids: balance_ids(ids))(index_BT)
        there = jax.jit(lambda x: balance_length(x))(x_BTD)
        back = jax.jit(lambda x: restore_length(x))(there)
        weights_BTD = jax.random.normal(jax.random.key(1), x_BTD.shape)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(restore_length(x) * weights_BTD)))(there)
        moved = jax.jit(lambda x: balance_length(x))(weights_BTD)
    np.testing.assert_array_equal(there, np.take_along_axis(x_BTD, ids_BT[..., None], axis=1))
    np.testing.assert_array_equal(back, x_BTD)
    np.testing.assert_array_equal(gradient, moved)
    own = np.asarray(ids_BT[0]).reshape(sizes["context"], -1)
    visible = (own + 1).sum(axis=1)  # keys that a device's queries see
    assert len(set(visible)) == 1


def test_parts_are_paired_from_both_ends() -> None:
    assert balanced_order(3).tolist() == [0, 5, 1, 4, 2, 3]


@pytest.mark.parametrize(
    ("length", "devices", "expected"),
    [
        (64, 1, False),
        (64, 4, True),
        (60, 4, False),  # no two parts per device
        (1024, 4, True),
        (512, 4, False),  # a device's 128 tokens are a kernel's block, half of them are none
        (131072, 8, True),
    ],
)
def test_which_rows_are_balanced(length: int, devices: int, expected: bool) -> None:
    assert balances(length, devices) is expected
