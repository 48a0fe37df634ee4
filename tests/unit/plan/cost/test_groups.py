"""How groups of devices are joined, for slices whose answers are plain to see."""

import itertools

import numpy as np
import pytest

from fornax.plan.artifact import DeviceFact
from fornax.plan.cost.groups import group_layout, group_layouts, permute_layout
from fornax.plan.cost.network import GroupLayout, Network, PhysicalAxis, collective_seconds
from fornax.plan.topology import Topology, parse_topology


def device(coords: tuple[int, ...], core: int = 0, slice: int = 0) -> DeviceFact:  # noqa: A002
    return DeviceFact(coords=coords, core=core, slice=slice)


V6E = parse_topology("v6e:16x16")
V6E_64 = parse_topology("v6e:8x8")
V5P = parse_topology("v5p:4x4x4")
TPU7X = parse_topology("tpu7x:4x4x4")


def devices_of(topology: Topology, slices: int = 1) -> list[DeviceFact]:
    places = itertools.product(*(range(extent) for extent in topology.shape))
    return [
        device(coords, core, number)
        for number, coords, core in itertools.product(
            range(slices), list(places), range(topology.chip.devices)
        )
    ]


def axis(dimension, size, ring, share=1.0):
    return PhysicalAxis(dimension=dimension, size=size, ring=ring, share=share)


def test_a_whole_slice_is_rings_where_it_wraps():
    assert group_layout(devices_of(V6E), V6E) == GroupLayout(
        axes=(axis(0, 16, True), axis(1, 16, True))
    )
    assert group_layout(devices_of(V6E_64), V6E_64) == GroupLayout(
        axes=(axis(0, 8, False), axis(1, 8, False))
    )


def test_part_of_an_axis_is_a_line():
    row = [device((3, column)) for column in range(4)]
    assert group_layout(row, V6E) == GroupLayout(axes=(axis(1, 4, False),))


def test_a_part_that_goes_over_the_edge_is_a_line_too():
    row = [device((3, column)) for column in (15, 0, 1, 2)]
    assert group_layout(row, V6E) == GroupLayout(axes=(axis(1, 4, False),))


def test_a_strided_group_shares_its_ring():
    row = [device((3, column)) for column in (1, 5, 9, 13)]
    assert group_layout(row, V6E) == GroupLayout(axes=(axis(1, 4, True, share=4),))


def test_one_core_of_each_chip_shares_links_with_the_other_core():
    one = [each for each in devices_of(TPU7X) if each.core == 0]
    assert {a.share for a in group_layout(one, TPU7X).axes} == {2}
    assert group_layout(one, TPU7X).shared == 2
    whole = group_layout(devices_of(TPU7X), TPU7X)
    assert whole.shared == 1
    assert whole.cores == 2
    assert {a.share for a in whole.axes} == {1}
    assert whole.size == 128


def test_slices_are_counted_apart():
    both = devices_of(V5P, slices=2)
    layout = group_layout(both, V5P)
    assert (layout.slices, layout.chips, layout.size) == (2, 64, 128)
    pair = [device((0, 0, 0), slice=0), device((0, 0, 0), slice=1)]
    assert group_layout(pair, V5P) == GroupLayout(slices=2)


def test_gpus_hang_on_their_server_s_switch():
    topology = parse_topology("h100:4x8")
    devices = [device((gpu,), slice=node) for node in range(4) for gpu in range(8)]
    assert group_layout(devices, topology) == GroupLayout(switched=8, slices=4, switch=True)
    assert group_layout(devices[:4], topology) == GroupLayout(switched=4, switch=True)


def test_members_that_fill_no_box_are_marked():
    stairs = [device((0, 0)), device((0, 1)), device((1, 1)), device((1, 2))]
    layout = group_layout(stairs, V6E)
    assert not layout.regular
    assert {a.share for a in layout.axes} == {1.5}


def test_a_mesh_axis_finds_its_dimensions():
    """fsdp 16 x tensor 4 on v5p 4x4x4: the tensor groups are rings of the last dimension."""
    ids = np.arange(64).reshape(16, 4)
    devices = devices_of(V5P)
    assert group_layouts(ids.tolist(), devices, V5P) == (GroupLayout(axes=(axis(2, 4, True),)),)
    assert group_layouts(ids.T.tolist(), devices, V5P) == (
        GroupLayout(axes=(axis(0, 4, True), axis(1, 4, True))),
    )
    (everything,) = group_layouts([], devices, V5P)
    assert everything.chips == 64
    assert group_layouts(np.arange(64).reshape(64, 1).tolist(), devices, V5P) == ()


NETWORK = Network(link=100e9, outside=10e9, host=1e9, hop_seconds=0.0, outside_seconds=0.0)


def permute(pairs, devices, topology):
    layout = permute_layout(pairs, devices, topology)
    return collective_seconds("collective-permute", 1e9, layout, NETWORK)


def test_a_ring_shift_uses_each_link_once():
    row = [device((0, column)) for column in range(16)]
    found = permute([(k, (k + 1) % 16) for k in range(16)], row, V6E)
    assert found.seconds == pytest.approx(1e9 / 100e9)
    assert found.links == ("ici:1+",)


def test_a_shift_along_a_line_loads_the_way_back_once():
    row = [device((0, column)) for column in range(8)]
    pairs = [(k, (k + 1) % 8) for k in range(8)]
    assert permute(pairs, row, V6E_64).seconds == pytest.approx(0.01)


def test_messages_over_the_same_link_add_up():
    row = [device((0, column)) for column in range(8)]
    assert permute([(k, k + 4) for k in range(4)], row, V6E_64).seconds == pytest.approx(0.04)


def test_a_message_between_slices_takes_the_network():
    pair = [device((0, 0), slice=0), device((0, 0), slice=1)]
    assert permute([(0, 1)], pair, V6E).by_link == {"dcn": pytest.approx(0.1)}


def test_a_message_between_cores_stays_on_the_chip():
    pair = [device((0, 0, 0), core=0), device((0, 0, 0), core=1)]
    assert permute([(0, 1)], pair, TPU7X).by_link == {"chip": pytest.approx(1e9 / 600e9)}
