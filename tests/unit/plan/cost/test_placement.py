"""Where a mesh's axes lie on a slice, as jax assigns them."""

import pytest

from fornax.config.errors import ShardingError
from fornax.mesh import MeshConfig
from fornax.plan.cost.groups import axis_layout, place
from fornax.plan.topology import parse_topology


def layout(topology_name, axes, **sizes):
    topology = parse_topology(topology_name)
    mesh = MeshConfig(**sizes)
    devices = place(topology, mesh)
    assert len(devices) == topology.num_devices
    return axis_layout(devices, mesh.resolved_sizes(len(devices)), axes, topology)


def test_all_of_a_pod_is_two_rings():
    found = layout("v6e:16x16", ["fsdp"])
    assert [(a.size, a.ring, a.share) for a in found.axes] == [(16, True, 1), (16, True, 1)]


def test_tensor_four_takes_one_whole_dimension_of_a_cube():
    found = layout("v5p:4x4x4", ["tensor"], tensor=4)
    assert [(a.size, a.ring) for a in found.axes] == [(4, True)]
    rest = layout("v5p:4x4x4", ["fsdp"], tensor=4)
    assert [(a.size, a.ring) for a in rest.axes] == [(4, True), (4, True)]


def test_a_split_dimension_is_a_line_and_a_shared_ring():
    inner = layout("v6e:16x16", ["tensor"], tensor=4)
    assert [(a.size, a.ring, a.share) for a in inner.axes] == [(4, False, 1)]
    outer = layout("v6e:16x16", ["fsdp"], tensor=4)
    assert sorted((a.size, a.ring, a.share) for a in outer.axes) == [(4, True, 4), (16, True, 1)]


def test_slices_are_joined_by_the_slice_axis_alone():
    found = layout("2*v5e:4x4", ["slice"], slice=2)
    assert (found.slices, found.chips) == (2, 1)
    both = layout("2*v5e:4x4", ["slice", "fsdp"], slice=2)
    assert (both.slices, both.chips) == (2, 16)


def test_a_dimension_may_be_split_in_several_slices_too():
    found = layout("2*v6e:16x16", ["tensor"], slice=2, tensor=4)
    assert [(a.size, a.ring) for a in found.axes] == [(4, False)]


def test_the_two_devices_of_a_chip_are_neighbours():
    found = layout("tpu7x:2x2x2", ["tensor"], tensor=2)
    assert (found.cores, found.axes) == (2, ())


def test_gpus_of_one_server_share_a_switch():
    found = layout("h100:2x8", ["tensor"], tensor=8)
    assert (found.switched, found.slices) == (8, 1)
    assert layout("h100:2x8", ["fsdp"], tensor=8).slices == 2


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ShardingError, match="3"):
        place(parse_topology("v6e:2x2"), MeshConfig(tensor=3))
