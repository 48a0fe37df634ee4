"""Stored axes are laid on whatever mesh the host has."""

import jax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from fornax.config.errors import ShardingError
from fornax.export.placement import OnMesh


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def test_logical_axes_go_by_rules_and_mesh_axes_by_their_own_names(mesh):
    place = OnMesh(mesh, {"features": ("data", "tensor")})

    def spec(axes):
        return place.sharding("w", (8, 16), axes).spec

    assert spec(("embed", "mlp")) == PartitionSpec(None, ("tensor",))  # no axis "fsdp" here
    assert spec(("tensor", None)) == PartitionSpec(("tensor",), None)
    assert spec(("features", None)) == PartitionSpec(("data", "tensor"), None)
    assert spec(None) == PartitionSpec()


def test_axes_of_the_mesh_are_left_to_the_compiler(mesh):
    assert set(mesh.axis_types) == {AxisType.Explicit}  # as jax makes them unasked
    assert set(OnMesh(mesh).sharding("w", (4,), ("mlp",)).mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("shape", "axes", "rules", "reason"),
    [
        ((6,), ("mlp",), None, r"weight w: dimension 0 \(mlp\) of size 6 does not divide"),
        ((8,), ("mpl",), None, r"'mpl' is not known.*did you mean mlp"),
        ((8,), ("mlp",), {"mlp": ("model",)}, r"the mesh has no axis 'model'; it has data, tensor"),
    ],
)
def test_what_cannot_be_laid_is_refused_by_name(mesh, shape, axes, rules, reason):
    with pytest.raises(ShardingError, match=reason):
        OnMesh(mesh, rules).sharding("w", shape, axes)


def test_rows_are_divided_where_the_bucket_divides(mesh):
    def spec(shape, axes=None, batch=0):
        return OnMesh(mesh).spread(shape, axes, batch).spec

    assert spec((8, 3)) == PartitionSpec(("data",), None)
    assert spec((1, 3)) == PartitionSpec(None, None)
    assert spec((8, 4), ("batch", "activation_mlp")) == PartitionSpec(("data",), ("tensor",))
    assert spec((3,), None, None) == PartitionSpec(None)
