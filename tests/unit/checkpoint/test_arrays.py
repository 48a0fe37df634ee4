"""What is read is what Orbax, whose layout it is, reads from the same files."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from fornax.checkpoint.arrays import forget_group, load_arrays, save_arrays


def bits(array):
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.atleast_1d(np.asarray(array)).view(np.uint8).tolist()


def abstract(leaf):
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def test_every_kind_of_leaf_is_as_orbax_reads_it(tmp_path):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def placed(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    params = {
        "with.dot": placed(jnp.arange(32.0).reshape(4, 8) / 7, "a", "b"),
        "list": [jnp.full((3,), 1.5, jnp.bfloat16), jnp.ones(())],
        "float8": jnp.ones((4,), jnp.float8_e4m3fn),
        "int4": jnp.array([1, -3, 7], jnp.int4),
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1 + 2j, 3j]),
    }
    state = {
        "params": params,
        "optimizer": optax.adam(1e-3).init({"w": params["with.dot"]}),
        "key": jax.random.key(3),
        "keys": placed(jax.random.split(jax.random.key(1), 4), "a"),
        "other": jax.random.key(3, impl="rbg"),
        "numpy": np.arange(5),
        "numbers": (3, 2.5),
        "none": None,
        "replicated": placed(jnp.arange(8)),
    }
    save_arrays(tmp_path / "1", state, timeout_seconds=60).result()
    wanted = jax.tree.map(abstract, state)
    moved = NamedSharding(mesh, PartitionSpec(None, ("b", "a")))
    wanted["params"]["with.dot"] = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16, sharding=moved)
    found = load_arrays(tmp_path / "1", wanted)
    theirs = ocp.load_checkpointables(str(tmp_path / "1"), {"state": wanted})["state"]
    assert jax.tree.structure(found) == jax.tree.structure(theirs)
    for mine, their in zip(jax.tree.leaves(found), jax.tree.leaves(theirs), strict=True):
        assert (mine.dtype, mine.shape, mine.sharding) == (their.dtype, their.shape, their.sharding)
        assert bits(mine) == bits(their)


def test_restored_arrays_can_be_donated(tmp_path):
    """All devices look at one buffer then, which none of them may write to."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    save_arrays(tmp_path / "1", {"w": jnp.arange(4096.0)}, timeout_seconds=60).result()
    wanted = {"w": jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=everywhere)}
    found = load_arrays(tmp_path / "1", wanted)["w"]
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    after = increment(increment(found))
    assert found.is_deleted()
    for shard in after.addressable_shards:
        assert np.array_equal(shard.data, np.arange(4096.0) + 2)


def test_an_array_that_is_not_there_is_an_error(tmp_path):
    save_arrays(tmp_path / "1", {"w": jnp.zeros(3)}, timeout_seconds=60).result()
    with pytest.raises(ValueError, match="NOT_FOUND"):
        load_arrays(tmp_path / "1", {"v": jax.ShapeDtypeStruct((3,), jnp.float32)})


def test_orbax_counts_and_caches_what_a_survivor_must_forget(tmp_path):
    """Private parts of Orbax's: one that lacks them must fail here, and not at a save in a run."""
    from orbax.checkpoint._src.futures import signaling_client
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

    save_arrays(tmp_path / "a", {"x": jnp.zeros(4)}, timeout_seconds=60).result()
    assert OperationIdGenerator.get_current_operation_id() != "0"
    assert signaling_client.get_signaling_client.cache_info().currsize
    forget_group()
    assert OperationIdGenerator.get_current_operation_id() == "0"  # as in a new process
    assert not signaling_client.get_signaling_client.cache_info().currsize
    save_arrays(tmp_path / "b", {"x": jnp.zeros(4)}, timeout_seconds=60).result()
    assert OperationIdGenerator.get_current_operation_id() == "1"
