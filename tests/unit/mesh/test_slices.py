"""Meshes over several slices, whose devices are described rather than there."""

import dataclasses

import pytest

from fornax.config.errors import ShardingError
from fornax.mesh import MeshConfig, make_mesh


@dataclasses.dataclass(frozen=True)
class Described:
    """As much of a TPU device as laying out a mesh looks at."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    process_index: int = 0


def described(slices: int) -> list[Described]:
    places = [(s, x, y) for s in range(slices) for y in range(2) for x in range(2)]
    return [Described(i, s, (x, y, 0)) for i, (s, x, y) in enumerate(places)]


def test_only_the_axis_slice_crosses_between_slices():
    mesh = make_mesh(MeshConfig(slice=2, fsdp=2, tensor=2), described(2))
    assert mesh.devices.shape == (2, 1, 1, 2, 1, 1, 2)
    for number, part in enumerate(mesh.devices):
        assert {device.slice_index for device in part.flat} == {number}


@pytest.mark.parametrize("size", [1, 4])
def test_another_number_of_slices_is_refused(size: int):
    with pytest.raises(ShardingError, match=r"in 2 slices and .* slice=\d; set `mesh.slice` to 2"):
        make_mesh(MeshConfig(slice=size), described(2))


def test_any_axis_may_span_nodes_of_gpus():
    gpus = [dataclasses.replace(d, platform="gpu", device_kind="NVIDIA H100") for d in described(2)]
    assert make_mesh(MeshConfig(fsdp=8), gpus).shape["fsdp"] == 8
