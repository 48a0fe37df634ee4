"""How groups of devices are joined, for slices whose answers are plain to see."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from fornax.plan.cost.network import Network, PhysicalAxis, Span, collective_seconds
from fornax.plan.cost.span import permute_span, span_of, spans_of


@dataclass(frozen=True)
class Device:
    coords: tuple[int, ...]
    core: int = 0
    slice: int = 0


@dataclass(frozen=True)
class Chip:
    torus: int = 2
    devices: int = 1


@dataclass(frozen=True)
class Slice:
    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    chip: Chip = Chip()


V6E = Slice((16, 16), (True, True))
V6E_64 = Slice((8, 8), (False, False))
V5P = Slice((4, 4, 4), (True, True, True), Chip(torus=3))
TPU7X = Slice((4, 4, 4), (True, True, True), Chip(torus=3, devices=2))


def devices_of(topology: Slice, slices: int = 1) -> list[Device]:
    places = itertools.product(*(range(extent) for extent in topology.shape))
    return [
        Device(coords, core, number)
        for number, coords, core in itertools.product(
            range(slices), list(places), range(topology.chip.devices)
        )
    ]


def axis(dimension, size, ring, share=1.0):
    return PhysicalAxis(dimension=dimension, size=size, ring=ring, share=share)


def test_a_whole_slice_is_rings_where_it_wraps():
    assert span_of(devices_of(V6E), V6E) == Span(axes=(axis(0, 16, True), axis(1, 16, True)))
    assert span_of(devices_of(V6E_64), V6E_64) == Span(axes=(axis(0, 8, False), axis(1, 8, False)))


def test_part_of_an_axis_is_a_line():
    row = [Device((3, column)) for column in range(4)]
    assert span_of(row, V6E) == Span(axes=(axis(1, 4, False),))


def test_a_part_that_goes_over_the_edge_is_a_line_too():
    row = [Device((3, column)) for column in (15, 0, 1, 2)]
    assert span_of(row, V6E) == Span(axes=(axis(1, 4, False),))


def test_a_strided_group_shares_its_ring():
    row = [Device((3, column)) for column in (1, 5, 9, 13)]
    assert span_of(row, V6E) == Span(axes=(axis(1, 4, True, share=4),))


def test_one_core_of_each_chip_shares_links_with_the_other_core():
    one = [device for device in devices_of(TPU7X) if device.core == 0]
    assert {a.share for a in span_of(one, TPU7X).axes} == {2}
    assert span_of(one, TPU7X).shared == 2
    whole = span_of(devices_of(TPU7X), TPU7X)
    assert whole.shared == 1
    assert whole.cores == 2
    assert {a.share for a in whole.axes} == {1}
    assert whole.size == 128


def test_slices_are_counted_apart():
    both = devices_of(V5P, slices=2)
    span = span_of(both, V5P)
    assert (span.slices, span.chips, span.size) == (2, 64, 128)
    pair = [Device((0, 0, 0), slice=0), Device((0, 0, 0), slice=1)]
    assert span_of(pair, V5P) == Span(slices=2)


def test_gpus_hang_on_their_server_s_switch():
    topology = Slice((4, 8), (False, False), Chip(torus=0))
    devices = [Device((gpu,), slice=node) for node in range(4) for gpu in range(8)]
    assert span_of(devices, topology) == Span(switched=8, slices=4, switch=True)
    assert span_of(devices[:4], topology) == Span(switched=4, switch=True)


def test_members_that_fill_no_box_are_marked():
    stairs = [Device((0, 0)), Device((0, 1)), Device((1, 1)), Device((1, 2))]
    span = span_of(stairs, V6E)
    assert not span.regular
    assert {a.share for a in span.axes} == {1.5}


def test_a_mesh_axis_finds_its_dimensions():
    """fsdp 16 x tensor 4 on v5p 4x4x4: the tensor groups are rings of the last dimension."""
    ids = np.arange(64).reshape(16, 4)
    devices = devices_of(V5P)
    assert spans_of(ids.tolist(), devices, V5P) == (Span(axes=(axis(2, 4, True),)),)
    assert spans_of(ids.T.tolist(), devices, V5P) == (
        Span(axes=(axis(0, 4, True), axis(1, 4, True))),
    )
    (everything,) = spans_of([], devices, V5P)
    assert everything.chips == 64
    assert spans_of(np.arange(64).reshape(64, 1).tolist(), devices, V5P) == ()


NETWORK = Network(link=100e9, outside=10e9, host=1e9, hop_seconds=0.0, outside_seconds=0.0)


def permute(pairs, devices, topology):
    span = permute_span(pairs, devices, topology)
    return collective_seconds("collective-permute", 1e9, span, NETWORK)


def test_a_ring_shift_uses_each_link_once():
    row = [Device((0, column)) for column in range(16)]
    found = permute([(k, (k + 1) % 16) for k in range(16)], row, V6E)
    assert found.seconds == pytest.approx(1e9 / 100e9)
    assert found.links == ("ici:1+",)


def test_a_shift_along_a_line_loads_the_way_back_once():
    row = [Device((0, column)) for column in range(8)]
    pairs = [(k, (k + 1) % 8) for k in range(8)]
    assert permute(pairs, row, V6E_64).seconds == pytest.approx(0.01)


def test_messages_over_the_same_link_add_up():
    row = [Device((0, column)) for column in range(8)]
    assert permute([(k, k + 4) for k in range(4)], row, V6E_64).seconds == pytest.approx(0.04)


def test_a_message_between_slices_takes_the_network():
    pair = [Device((0, 0), slice=0), Device((0, 0), slice=1)]
    assert permute([(0, 1)], pair, V6E).by_link == {"dcn": pytest.approx(0.1)}


def test_a_message_between_cores_stays_on_the_chip():
    pair = [Device((0, 0, 0), core=0), Device((0, 0, 0), core=1)]
    assert permute([(0, 1)], pair, TPU7X).by_link == {"chip": pytest.approx(1e9 / 600e9)}
