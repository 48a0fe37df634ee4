"""Groups of collectives in every printed form, and the mesh axes they span."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.hlo import parse
from fornax.hlo.collectives import parse_groups, parse_pairs, spanned_axes, transfer
from fornax.hlo.module import split_attributes


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (
            "mesh['axis_0'=4,'axis_1'=2,'axis_2'=1] {'axis_1','axis_2'}",
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(4)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (
            "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
            [[0, 2, 4, 6], [1, 3, 5, 7]],
        ),
        ('@mesh<"a"=2,"b"=4> {a}', [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_every_printed_form(text: str, groups: list[list[int]]) -> None:
    found = parse_groups(text, 8)
    assert found is not None
    assert found.tolist() == groups


@pytest.mark.parametrize("text", ["{{0,1},{2}}", "mesh['a'=8] {'b'}", "whatever"])
def test_what_is_not_understood_is_said(text: str) -> None:
    assert parse_groups(text, 8) is None


def test_the_order_of_devices_stays_with_its_mesh() -> None:
    line = "channel_id=3, replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, x={1}"
    attributes = split_attributes(line)
    assert list(attributes) == ["channel_id", "replica_groups", "x"]
    assert parse_groups(attributes["replica_groups"], 8) is not None


_ACROSS = """HloModule step, num_partitions=2

ENTRY %main (p: f32[8]) -> (f32[8], u32[], token[]) {
  %p = f32[8]{0} parameter(0)
  %t = token[] after-all()
  ROOT %send = (f32[8]{0}, u32[], token[]) send(%p, %t), channel_id=1, is_host_transfer=true, \
frontend_attributes={_xla_megascale_target={{100001->200000},{200001->300000}},\
_xla_megascale_transfer_type="ONE_TO_ONE"}
}
"""


def test_a_permutation_between_slices_joins_the_slices_of_its_pairs() -> None:
    """Stages 1 to 2 and 3 to 4 of six, two in a slice: not slice 1 with slice 3."""
    send = parse(_ACROSS).entry.root
    found = transfer(send, {"slice": 3, "stage": 2})
    assert (found.kind, found.axes, found.bytes) == ("send-recv", ("slice",), 32)
    assert found.groups == ((0, 2), (1, 3), (2, 4), (3, 5))


def test_axes_are_those_along_which_members_differ() -> None:
    axes = {"slice": 1, "data": 2, "fsdp": 4, "tensor": 2}
    assert spanned_axes(np.array([[0, 1], [2, 3]]), axes) == ("tensor",)
    assert spanned_axes(np.array([[0, 2, 4, 6]]), axes) == ("fsdp",)
    assert spanned_axes(np.array([[0, 8], [1, 9]]), axes) == ("data",)
    assert spanned_axes(np.array([[0, 3, 12, 15]]), axes) == ("data", "fsdp", "tensor")
    assert spanned_axes(np.array([[0], [1]]), axes) == ()
    assert spanned_axes(np.array([[0, 16]]), axes) is None
    assert spanned_axes(parse_pairs("{{0,2},{2,4},{4,6}}"), axes) == ("fsdp",)
    assert spanned_axes(parse_pairs("{}"), axes) == ()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_axes_of_a_mesh_come_back_from_their_groups(sizes: list[int], data: st.DataObject) -> None:
    axes = {f"a{n}": size for n, size in enumerate(sizes)}
    chosen = [name for name in axes if data.draw(st.booleans())]
    mesh = ",".join(f"'{name}'={size}" for name, size in axes.items())
    groups = parse_groups(f"mesh[{mesh}] {{{','.join(repr(name) for name in chosen)}}}", 0)
    assert groups is not None
    assert sorted(groups.ravel()) == list(range(math.prod(sizes)))
    assert spanned_axes(groups, axes) == tuple(name for name in chosen if axes[name] > 1)
