"""A copy in memory gives the same arrays back, as often as asked, whatever became of the first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fornax.config import ConfigError
from fornax.train.snapshot import Snapshot, check_room, local_bytes


def tree() -> dict[str, jax.Array]:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))

    def lay(x: jax.Array, *names: str | None) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*names)))

    return {
        "divided": lay(jnp.arange(64.0).reshape(8, 8), "a", "b"),
        "half": lay(jnp.arange(32, dtype=jnp.bfloat16).reshape(4, 8), None, "b"),
        "whole": lay(jnp.arange(6, dtype=jnp.int32)),
        "scalar": lay(jnp.float32(3.5)),
    }


def shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def test_arrays_come_back_with_their_values_types_and_places_twice():
    arrays = tree()
    wanted = jax.tree.map(np.asarray, jax.device_get(arrays))
    snapshot = Snapshot(arrays)
    spoil = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0)
    where = jax.tree.map(lambda x: x.sharding, arrays)
    jax.block_until_ready(spoil(arrays))
    for _ in range(2):
        back = snapshot.arrays()
        assert jax.tree.map(lambda x: x.sharding, back) == where
        for name, x in back.items():
            assert x.dtype == wanted[name].dtype
            np.testing.assert_array_equal(np.asarray(x), wanted[name])
        jax.block_until_ready(spoil(back))  # which takes the buffers


def test_a_part_that_several_devices_hold_counts_once():
    shapes = jax.tree.map(shape_of, tree())
    assert local_bytes(shapes) == 64 * 4 + 32 * 2 + 6 * 4 + 4
    snapshot = Snapshot(tree())
    held = sum(part.nbytes for each in snapshot._arrays for part in each.parts.values())
    assert held == local_bytes(shapes)


def test_copies_that_do_not_fit_are_refused():
    x = tree()["whole"]
    huge = jax.ShapeDtypeStruct((1 << 45,), jnp.float32, sharding=x.sharding)
    check_room({"x": shape_of(x)}, 2)
    with pytest.raises(ConfigError, match=r"2 copies of the state take 262144.0 GiB"):
        check_room({"x": huge}, 2)
