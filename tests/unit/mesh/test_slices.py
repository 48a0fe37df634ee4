"""Meshes over several slices, whose devices are described rather than there."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec

from fornax.config.errors import ConfigError, ShardingError
from fornax.mesh import MeshConfig, make_mesh, named_sharding, stage_axes


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


def test_stages_across_slices_are_neighbours_in_one_slice():
    """Of the four stages two are in each slice, so that one boundary and the way back cross."""
    config = MeshConfig(slice=2, stage=2, fsdp=2, across="stage")
    mesh = make_mesh(config, described(2))
    rules = config.resolved_rules()
    assert stage_axes(rules) == ("slice", "stage")
    where = NamedSharding(mesh, PartitionSpec(stage_axes(rules))).devices_indices_map((4,))
    slices = {spans[0].start: set() for spans in where.values()}
    for device, spans in where.items():
        slices[spans[0].start].add(device.slice_index)
    assert slices == {0: {0}, 1: {0}, 2: {1}, 3: {1}}
    layers = named_sharding(mesh, ("layers", "embed", "mlp"), rules, shape=(8, 4, 4))
    assert layers.shard_shape((8, 4, 4)) == (2, 2, 4)
    assert "slice" not in str(named_sharding(mesh, ("vocab", "embed"), rules).spec)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stage": 2, "across": "stage"}, "mesh.across=stage is for several slices and mesh.slice"),
        (
            {"slice": 2, "across": "stage", "rules": {"layers": ("stage",)}},
            r"mesh.rules.layers=\['stage'\] and mesh.across=stage disagree .* leave the rule out",
        ),
        ({"slice": 2, "rules": {"layers": ("slice",)}}, "and mesh.across=data disagree"),
    ],
)
def test_what_slices_divide_is_said_once(given: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        MeshConfig(**given)


@pytest.mark.parametrize("size", [1, 4])
def test_another_number_of_slices_is_refused(size: int):
    with pytest.raises(ShardingError, match=r"in 2 slices and .* slice=\d; set `mesh.slice` to 2"):
        make_mesh(MeshConfig(slice=size), described(2))


def test_any_axis_may_span_nodes_of_gpus():
    gpus = [dataclasses.replace(d, platform="gpu", device_kind="NVIDIA H100") for d in described(2)]
    assert make_mesh(MeshConfig(fsdp=8), gpus).shape["fsdp"] == 8


def processes(count: int, devices: int) -> list[Described]:
    """CPU devices of several processes: jax says slice 0 of all of them."""
    return [
        Described(
            number,
            0,
            (number, 0, 0),
            platform="cpu",
            device_kind="cpu",
            process_index=number // devices,
        )
        for number in range(count * devices)
    ]


def test_a_slice_is_a_process_where_devices_name_none():
    found = make_mesh(MeshConfig(slice=2, data=2, fsdp=2), processes(2, 4))
    expected = mesh_utils.create_hybrid_device_mesh(
        (1, 2, 1, 2, 1, 1, 1), (2, 1, 1, 1, 1, 1, 1), processes(2, 4), process_is_granule=True
    )
    np.testing.assert_array_equal(found.devices, expected)


def test_a_slice_may_be_several_processes_or_nodes():
    mesh = make_mesh(MeshConfig(slice=2, fsdp=8), processes(4, 4))
    assert [{d.process_index for d in part.flat} for part in mesh.devices] == [{0, 1}, {2, 3}]
    gpus = [dataclasses.replace(d, platform="gpu", device_kind="NVIDIA H100") for d in described(4)]
    mesh = make_mesh(MeshConfig(slice=2, fsdp=8), gpus)
    assert [{d.slice_index for d in part.flat} for part in mesh.devices] == [{0, 1}, {2, 3}]


@pytest.mark.parametrize(("count", "devices", "size"), [(3, 2, 2), (2, 4, 4)])
def test_a_slice_holds_no_part_of_a_process(count: int, devices: int, size: int):
    with pytest.raises(ShardingError, match=rf"slice={size} over {count} processes: a slice is"):
        make_mesh(MeshConfig(slice=size), processes(count, devices))


def test_one_process_emulates_slices_with_blocks_of_its_devices():
    mesh = make_mesh(MeshConfig(slice=4), processes(1, 8))
    assert [[d.id for d in part.flat] for part in mesh.devices] == [[0, 1], [2, 3], [4, 5], [6, 7]]
