"""Loss and gradients are those of one device on every mesh of eight."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from fornax.config import ShardingError, from_mapping
from fornax.mesh import MeshConfig, use_mesh
from fornax.train import Hosts, Ledger, TrainConfig, pretrain_task
from fornax.train.hosts import to_global
from fornax.train.session import Programs, first_state, prepare
from fornax.train.step import sum_gradients

SHAPES = [
    s if s in ((1, 8, 1), (2, 2, 2)) else pytest.param(s, marks=pytest.mark.exhaustive)
    for s in itertools.product((1, 2, 4, 8), repeat=3)
    if np.prod(s) == 8
]


@pytest.fixture(scope="module")
def run(settings: dict[str, Any]) -> TrainConfig:
    """One layer, eight rows: enough for every axis of eight to divide; as wide as it takes for the
    compiler to exchange products in its several ways."""
    changes = {"hidden_size": 256, "intermediate_size": 256, "num_layers": 1}
    model = {**settings["model"], **changes, "num_heads": 8, "num_kv_heads": 8}
    return from_mapping(TrainConfig, {**settings, "model": model, "z_loss": 1e-3, "eval": {}})


@pytest.fixture(scope="module")
def rows(run: TrainConfig) -> dict[str, np.ndarray]:
    batches = pretrain_task(run).batches("train", Hosts())
    found = next(batches)
    batches.close()
    return found


def measure(run: TrainConfig, rows: dict[str, np.ndarray], devices: Any) -> tuple[Any, Programs]:
    programs = prepare(run, pretrain_task(run), Ledger(), devices)
    state = first_state(run, programs)
    shapes = programs.shapes_of(rows)

    def compute(params: Any, batch: Any) -> Any:
        with use_mesh(programs.parts.mesh, programs.parts.rules):
            loss, _, grads = sum_gradients(programs.parts, params, {}, batch, jax.random.key(0))
        return loss, grads

    return jax.device_get(jax.jit(compute)(state.params, to_global(rows, shapes))), programs


@pytest.fixture(scope="module")
def single(run: TrainConfig, rows: dict[str, np.ndarray]) -> Any:
    return measure(run, rows, jax.devices()[:1])[0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "data{}-fsdp{}-tensor{}".format(*s))
def test_loss_and_gradients_are_those_of_one_device(
    run: TrainConfig, rows: dict[str, np.ndarray], single: Any, shape: tuple[int, int, int]
):
    data, fsdp, tensor = shape
    mesh = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    (loss, grads), programs = measure(with_mesh(run, mesh), rows, None)
    expected_loss, expected = single
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), loss, expected_loss)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * np.abs(want).max())
    kernel = programs.abstract.params["layers"]["mlp"]["gate"]["kernel"]
    moments = [
        leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(programs.abstract.optimizer)[0]
        if "gate" in jax.tree_util.keystr(path)
    ]
    assert kernel.sharding.num_devices == 8
    pieces = np.prod(kernel.shape) / np.prod(kernel.sharding.shard_shape(kernel.shape))
    assert pieces == fsdp * tensor
    assert moments
    assert all(moment.sharding == kernel.sharding for moment in moments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(slice=2, data=2, fsdp=2),
        pytest.param(MeshConfig(slice=4, fsdp=1, tensor=2), marks=pytest.mark.exhaustive),
    ],
    ids=["slice2-data2-fsdp2", "slice4-tensor2"],
)
def test_slices_share_the_rows_and_nothing_else(
    run: TrainConfig, rows: dict[str, np.ndarray], single: Any, mesh: MeshConfig
):
    (loss, grads), programs = measure(with_mesh(run, mesh), rows, None)
    expected_loss, expected = single
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), loss, expected_loss)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * np.abs(want).max())
    for leaf in jax.tree.leaves(programs.abstract):
        assert "slice" not in str(leaf.sharding.spec)
    assert programs.hosts.multiple == 8 // mesh.tensor


def with_mesh(run: TrainConfig, mesh: MeshConfig, **changes: Any) -> TrainConfig:
    return dataclasses.replace(run, mesh=mesh, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "accumulate", "padded"),
    [
        pytest.param((3, 1, 1), 1, 9, marks=pytest.mark.exhaustive),
        ((3, 1, 1), 2, 12),
        ((5, 1, 1), 2, 10),
        ((3, 1, 2), 4, 12),
        ((8, 1, 1), 4, 32),
    ],
    ids=lambda value: str(value),
)
def test_padding_changes_neither_loss_nor_gradients(
    run: TrainConfig,
    rows: dict[str, np.ndarray],
    single: Any,
    shape: tuple[int, int, int],
    accumulate: int,
    padded: int,
):
    """Eight rows over devices that do not divide them are those of one device, weights too."""
    data, fsdp, tensor = shape
    config = with_mesh(run, MeshConfig(data=data, fsdp=fsdp, tensor=tensor), accumulate=accumulate)
    devices = jax.devices()[: data * fsdp * tensor]
    programs = prepare(config, pretrain_task(config), Ledger(), devices)
    batches = pretrain_task(config).batches("train", programs.hosts)
    filled = next(batches)
    batches.close()
    assert len(filled["tokens"]) == padded
    for name, array in rows.items():
        np.testing.assert_array_equal(filled[name][:8], array)
        assert not filled[name][8:].any()
    (loss, grads), programs = measure(config, filled, devices)
    expected_loss, expected = single
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), loss, expected_loss)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * np.abs(want).max())
    said = [line for line in programs.warnings if f"padded to {padded} rows" in line]
    assert len(said) == (padded > 8)


def test_a_stream_without_the_padding_is_refused(run: TrainConfig, rows: dict[str, np.ndarray]):
    config = with_mesh(run, MeshConfig(data=3, fsdp=1))
    programs = prepare(config, pretrain_task(config), Ledger(), jax.devices()[:3])
    state = first_state(config, programs)
    with pytest.raises(ShardingError, match=r"have 8 rows over all hosts.*multiple of 3"):
        programs.step(state, rows)
