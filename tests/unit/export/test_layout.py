"""Stored axes are laid on whatever mesh the host has."""

import jax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from fornax.config.errors import ShardingError
from fornax.export.layout import input_sharding, weight_shardings


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "tensor"))


def test_logical_axes_go_by_rules_and_mesh_axes_by_their_own_names(mesh):
    found = weight_shardings(
        {
            "up": ((8, 16), ("embed", "mlp")),
            "own": ((8, 16), ("tensor", None)),
            "new": ((8, 16), ("features", None)),
            "norm": ((8,), None),
        },
        mesh,
        {"features": ("data", "tensor")},
    )
    assert {name: sharding.spec for name, sharding in found.items()} == {
        "up": PartitionSpec(None, ("tensor",)),
        "own": PartitionSpec(("tensor",), None),
        "new": PartitionSpec(("data", "tensor"), None),
        "norm": PartitionSpec(),
    }
    assert set(found["up"].mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("shape", "axes", "rules", "reason"),
    [
        ((6,), ("mlp",), None, r"weight w: dimension 0 \(mlp\) of size 6 does not divide"),
        ((8,), ("mpl",), None, "'mpl' is not known.*did you mean 'mlp'"),
        ((8,), ("mlp",), {"mlp": ("model",)}, "the mesh has no axis 'model'; it has data, tensor"),
    ],
)
def test_what_cannot_be_laid_is_refused_by_name(mesh, shape, axes, rules, reason):
    with pytest.raises(ShardingError, match=reason):
        weight_shardings({"w": (shape, axes)}, mesh, rules)


def test_rows_are_divided_where_the_bucket_divides(mesh):
    def spec(shape, axes=None, batch=0):
        return input_sharding(shape, axes, batch, mesh, None).spec

    assert spec((8, 3)) == PartitionSpec(("data",), None)
    assert spec((1, 3)) == PartitionSpec(None, None)
    assert spec((8, 4), ("batch", "activation_mlp")) == PartitionSpec(("data",), ("tensor",))
    assert spec((3,), None, None) == PartitionSpec(None)
