"""The rule table: what it divides, what it refuses, and that the refusal names the thing."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from fornax.config.errors import ConfigError, ShardingError
from fornax.mesh import (
    DEFAULT_RULES,
    MESH_AXES,
    MeshConfig,
    constrain,
    fit_mesh,
    make_mesh,
    named_sharding,
    partition_spec,
    tree_shardings,
    use_mesh,
)


def test_every_mesh_has_every_axis_and_rest_goes_to_minus_one():
    mesh = make_mesh(MeshConfig(tensor=2, data=2))
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == {a: 2 if a in ("data", "fsdp", "tensor") else 1 for a in MESH_AXES}


def test_sizes_that_do_not_multiply_to_the_devices_are_refused():
    with pytest.raises(ShardingError, match=r"tensor=3.*multiple of 3 devices and there are 8"):
        make_mesh(MeshConfig(tensor=3))
    with pytest.raises(ShardingError, match=r"needs 4 devices and there are 8.*-1"):
        make_mesh(MeshConfig(fsdp=4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": 0}, "tensor=0"),
        ({"data": -1}, "data and fsdp are both -1"),
    ],
)
def test_bad_sizes_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        MeshConfig(**changes)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"embeds": ("fsdp",)}, "did you mean embed"),
        ({"embed": ("fsdpp",)}, "did you mean fsdp"),
        ({"embed": ("fsdp", "fsdp")}, "twice"),
    ],
)
def test_a_rule_that_could_never_apply_is_refused(rules, message):
    with pytest.raises(ShardingError, match=message):
        MeshConfig(rules=rules)


def test_a_mesh_axis_divides_an_array_once():
    spec = partition_spec(("heads", "mlp", None, "embed"), DEFAULT_RULES)
    assert spec == P(("tensor",), None, None, ("stage", "fsdp", "expert"))
    spec = partition_spec(("expert", "embed", "mlp"), DEFAULT_RULES)
    assert spec == P(("expert",), ("stage", "fsdp"), ("tensor",))


def test_unknown_logical_axis_is_an_error_with_the_nearest():
    with pytest.raises(ShardingError, match=r"'head'.*did you mean heads"):
        partition_spec(("head",), DEFAULT_RULES)


def test_a_dimension_that_does_not_divide_names_the_parameter():
    mesh = make_mesh(MeshConfig(tensor=4))
    with pytest.raises(ShardingError, match=r"wq: dimension 1 \(heads\) of size 6.*tensor=4"):
        named_sharding(mesh, ("embed", "heads"), DEFAULT_RULES, shape=(8, 6), name="wq")
    with pytest.raises(ShardingError, match="3 dimensions"):
        named_sharding(mesh, ("embed", "heads"), DEFAULT_RULES, shape=(8, 6, 1), name="wq")


class _Layer(nnx.Module):
    def __init__(self, axes=("embed", "mlp")):
        metadata = {} if axes is None else {"axes": axes}
        self.kernel = nnx.Param(jnp.arange(32.0).reshape(8, 4), **metadata)
        self.rngs = nnx.Rngs(0)


def test_a_model_is_laid_out_by_its_metadata():
    mesh = make_mesh(MeshConfig(tensor=2))
    _, state = nnx.split(_Layer())
    placed = jax.device_put(state, tree_shardings(state, mesh, DEFAULT_RULES))
    kernel = placed["kernel"].get_value()
    assert kernel.sharding.spec == P(("stage", "fsdp", "expert"), ("tensor",))
    assert {s.data.shape for s in kernel.addressable_shards} == {(2, 2)}
    np.testing.assert_array_equal(kernel, np.arange(32.0).reshape(8, 4))


def test_a_parameter_without_axes_is_named():
    _, state = nnx.split(_Layer(axes=None))
    with pytest.raises(ShardingError, match=r"kernel has shape \(8, 4\) and no logical axes"):
        tree_shardings(state, make_mesh(MeshConfig()), DEFAULT_RULES)


def test_constrain_lays_out_inside_a_mesh_and_is_identity_outside():
    x = jnp.zeros((8, 4))
    assert constrain(x, ("batch", "anything")) is x
    mesh = make_mesh(MeshConfig(tensor=2))
    with use_mesh(mesh):
        y = jax.jit(lambda x: constrain(x * 2, ("batch", "activation_mlp")))(x)
        with pytest.raises(ShardingError, match="size 3"):
            jax.jit(lambda x: constrain(x, ("batch", None)))(jnp.zeros((3, 4)))
    assert {s.data.shape for s in y.addressable_shards} == {(2, 2)}


def test_no_matter_how_an_axis_is_overridden_it_stays_numerically_the_same():
    mesh = make_mesh(MeshConfig(tensor=2, rules={"embed": (), "mlp": ("fsdp", "tensor")}))
    rules = MeshConfig(rules={"embed": (), "mlp": ("fsdp", "tensor")}).resolved_rules()
    w = jnp.arange(64.0).reshape(8, 8)
    placed = jax.device_put(w, named_sharding(mesh, ("embed", "mlp"), rules, shape=w.shape))
    assert {s.data.shape for s in placed.addressable_shards} == {(8, 1)}
    np.testing.assert_allclose(jnp.ones((2, 8)) @ placed, jnp.ones((2, 8)) @ w, rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "devices", "fsdp", "data"),
    [
        ({}, 8, 8, 1),
        ({}, 5, 1, 5),
        ({}, 6, 6, 1),
        ({}, 48, 24, 2),
        ({"tensor": 2}, 18, 3, 3),
        ({"data": 2}, 10, 1, 10),
        ({"expert": 2}, 48, 12, 2),
        ({"fsdp": 5}, 5, 5, 1),
        ({"fsdp": 1, "data": -1}, 5, 1, -1),
        ({"rules": {"embed": ()}}, 5, 5, 1),
    ],
)
def test_an_open_fsdp_takes_what_parameters_divide_over(
    given: dict[str, Any], devices: int, fsdp: int, data: int
):
    """Widths of 48 and 24: fsdp takes the most that divides both, data the rest; what is given
    stays."""
    state = nnx.State(
        {
            "a": nnx.Param(jax.ShapeDtypeStruct((48, 7), jnp.float32), axes=("embed", "mlp")),
            "b": nnx.Param(jax.ShapeDtypeStruct((5, 24), jnp.float32), axes=(None, "embed")),
            "rng": nnx.RngCount(jax.ShapeDtypeStruct((), jnp.uint32)),
        }
    )
    config = MeshConfig(**given)
    fitted = fit_mesh(config, state, devices)
    sizes = fitted.resolved_sizes(devices)
    assert (sizes["fsdp"], fitted.data) == (fsdp, data)
    assert math.prod(sizes.values()) == devices
    assert (fitted == config) == (fitted.fsdp == config.fsdp)


def test_a_stack_that_does_not_divide_leaves_its_axes_to_the_next_dimension():
    mesh = make_mesh(MeshConfig(stage=4, fsdp=2))
    axes = ("layers", "embed", "heads")
    even = named_sharding(mesh, axes, DEFAULT_RULES, shape=(8, 16, 2))
    assert even.shard_shape((8, 16, 2)) == (2, 8, 2)
    uneven = named_sharding(mesh, axes, DEFAULT_RULES, shape=(6, 16, 2))
    assert uneven.shard_shape((6, 16, 2)) == (6, 2, 2)
