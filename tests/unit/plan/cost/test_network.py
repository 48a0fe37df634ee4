"""Times of collectives against cases worked out by hand."""

import pytest

from fornax.plan.cost.network import GroupLayout, Network, PhysicalAxis, collective_seconds

LINK, OUTSIDE, HOST = 100e9, 10e9, 20e9
GB = 1e9


def network(hop: float = 0.0) -> Network:
    return Network(link=LINK, outside=OUTSIDE, host=HOST, hop_seconds=hop, outside_seconds=0.0)


def ring(size: int, dimension: int = 0, share: float = 1) -> PhysicalAxis:
    return PhysicalAxis(dimension=dimension, size=size, ring=True, share=share)


def line(size: int, dimension: int = 0) -> PhysicalAxis:
    return PhysicalAxis(dimension=dimension, size=size, ring=False)


CASES = {
    # 16 chips, each lacks 15/16 of 1 GB and is fed over two links of 100 GB/s
    "ring": (GroupLayout(axes=(ring(16),)), 15 / 16 * GB / 200e9),
    # the chip at the end of a line is fed over one link
    "line": (GroupLayout(axes=(line(4),)), 3 / 4 * GB / 100e9),
    # two rings: four links
    "torus": (GroupLayout(axes=(ring(4), ring(4, 1))), 15 / 16 * GB / 400e9),
    # the corner of a mesh without wrap-around has two links
    "mesh": (GroupLayout(axes=(line(2), line(4, 1))), 7 / 8 * GB / 200e9),
    # every fourth chip of a ring of 16: four groups share each link
    "strided": (GroupLayout(axes=(ring(4, share=4),)), 3 / 4 * GB / 50e9),
    # 2 slices of 4 chips: 1/4 of half over the network, then the rest inside
    "slices": (
        GroupLayout(axes=(line(4),), slices=2),
        GB / 4 / 2 / 10e9 + 3 / 4 * GB / 100e9,
    ),
    # one chip a slice: all over the network
    "between slices": (GroupLayout(slices=2), GB / 2 / 10e9),
    # eight GPUs: each takes 7/8 through its own port
    "switch": (GroupLayout(switched=8, switch=True), 7 / 8 * GB / 100e9),
    # 4 servers of 8 GPUs: 3/4 of an eighth from outside takes longer than NVLink
    "servers": (GroupLayout(switched=8, slices=4, switch=True), 3 / 4 * GB / 8 / 10e9),
    # the two devices of a chip are joined six times as fast as neighbours
    "cores": (GroupLayout(cores=2), GB / 2 / 600e9),
}


@pytest.mark.parametrize("name", CASES)
def test_all_gather_takes_what_each_chip_lacks_over_its_links(name):
    layout, seconds = CASES[name]
    found = collective_seconds("all-gather", GB, layout, network())
    assert found.seconds == pytest.approx(seconds)
    mirror = collective_seconds("reduce-scatter", GB, layout, network())
    assert mirror.seconds == found.seconds
    both = collective_seconds("all-reduce", GB, layout, network())
    assert both.seconds == pytest.approx(2 * seconds)


def test_all_to_all_is_bound_by_the_busiest_cut():
    """The book's V/4W for a ring with W both ways; V/4w for a line."""
    ringed = collective_seconds("all-to-all", GB, GroupLayout(axes=(ring(16),)), network())
    assert ringed.seconds == pytest.approx(GB / (4 * 200e9))
    lined = collective_seconds("all-to-all", GB, GroupLayout(axes=(line(4),)), network())
    assert lined.seconds == pytest.approx(GB / (4 * 100e9))
    # 4x8: the cut across the axis of 8 has 4 rings
    torus = collective_seconds("all-to-all", GB, GroupLayout(axes=(ring(4), ring(8, 1))), network())
    assert torus.seconds == pytest.approx(GB / 4 * 8 / 32 / 200e9)


def test_a_shift_goes_over_one_link_of_a_ring_and_back_along_a_line():
    hop = 1e-6
    ringed = collective_seconds(
        "collective-permute", GB, GroupLayout(axes=(ring(16),)), network(hop)
    )
    assert ringed.seconds == pytest.approx(GB / 100e9 + hop)
    lined = collective_seconds("collective-permute", GB, GroupLayout(axes=(line(4),)), network(hop))
    assert lined.seconds == pytest.approx(GB / 100e9 + 3 * hop)


def test_small_messages_wait_for_their_hops():
    found = collective_seconds("all-gather", 16, GroupLayout(axes=(ring(16),)), network(1e-6))
    assert found.seconds == pytest.approx(8e-6, rel=1e-3)


def test_a_group_of_one_costs_nothing():
    assert collective_seconds("all-reduce", GB, GroupLayout(), network()).seconds == 0


def test_host_and_send_use_their_own_links():
    host = collective_seconds("host-transfer", GB, GroupLayout(), network())
    assert (host.seconds, host.link) == (GB / HOST, "host")
    sent = collective_seconds("send-recv", GB, GroupLayout(slices=2), network())
    assert (sent.seconds, sent.link) == (GB / OUTSIDE, "dcn")


def test_devices_of_a_chip_share_what_leaves_it():
    one, both = GroupLayout(slices=2), GroupLayout(slices=2, shared=2)
    for kind in ("all-gather", "send-recv", "host-transfer", "all-to-all"):
        alone = collective_seconds(kind, GB, one, network()).seconds
        assert collective_seconds(kind, GB, both, network()).seconds == pytest.approx(2 * alone)


def test_the_slowest_link_is_named():
    layout = GroupLayout(axes=(line(4),), slices=2)
    found = collective_seconds("all-gather", GB, layout, network())
    assert found.link == "dcn"
    assert found.links == ("ici:0+", "ici:0-", "dcn")


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="all-shuffle"):
        collective_seconds("all-shuffle", GB, GroupLayout(), network())
