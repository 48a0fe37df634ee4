"""Grouped products by their tiles, against the kernel's grid walked step by step.

Legend: E experts, K contracted, N columns of a product; m, k, n of a tile.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

from fornax.config import from_mapping
from fornax.kernels import GroupedTiles, grouped_tiles
from fornax.plan.closed_form.grouped import Product, grouped_product
from fornax.plan.cost.estimate import estimate
from fornax.plan.topology import parse_topology
from fornax.train import TrainConfig

SIZES = (13, 40, 7, 21, 9, 38)
"""Rows of six experts: 128 in all, and none ends where a tile does."""
K, N = 24, 40
TILES = {
    "all of the sum": GroupedTiles(rows=16, contracted=24, columns=16),
    "parts of the sum": GroupedTiles(rows=16, contracted=16, columns=40),
    "parts of all": GroupedTiles(rows=32, contracted=8, columns=16),
}


def _visits(m: int) -> list[tuple[int, int]]:
    """(tile of rows, expert) in the order of the grid."""
    ends = np.cumsum(SIZES)
    return [
        (tile, expert)
        for expert, (end, size) in enumerate(zip(ends, SIZES, strict=True))
        for tile in range((end - size) // m, (end - 1) // m + 1)
    ]


def _parts(size: int, tile: int) -> list[int]:
    return [min(tile, size - first) for first in range(0, size, tile)]


def _grid(which: Product, tiles: GroupedTiles) -> Iterator[list[tuple[tuple[int, ...], int]]]:
    """Of each step the blocks of two operands and the result, with their elements."""
    m, ks, ns = tiles.rows, _parts(K, tiles.contracted), _parts(N, tiles.columns)
    every = range(len(ns)), range(len(ks))
    if which == "weights":
        for (n, k), (tile, e) in itertools.product(itertools.product(*every), _visits(m)):
            yield [((tile, k), m * ks[k]), ((tile, n), m * ns[n]), ((e, k, n), ks[k] * ns[n])]
        return
    for n, (tile, e), k in itertools.product(every[0], _visits(m), every[1]):
        yield [((tile, k), m * ks[k]), ((e, k, n), ks[k] * ns[n]), ((tile, n), m * ns[n])]


@pytest.mark.parametrize("which", ["forward", "weights"])
@pytest.mark.parametrize("tiles", TILES)
def test_work_and_bytes_are_those_of_the_grid(which: Product, tiles: str) -> None:
    """A block is moved when the step before had another one."""
    tile, rows = TILES[tiles], sum(SIZES)
    found = grouped_product(which, rows, len(SIZES), (K, N), tile, item=2, count=1)
    before: list[tuple[int, ...] | None] = [None, None, None]
    moved = steps = 0
    for blocks in _grid(which, tile):
        steps += 1
        for place, (block, elements) in enumerate(blocks):
            moved += elements * (block != before[place])
            before[place] = block
    assert found.bytes == 2 * moved
    assert found.flops == 2 * rows * K * N
    executed = 2 * steps * tile.rows * tile.contracted * tile.columns
    assert found.flops * found.computed == pytest.approx(executed)


@pytest.mark.parametrize("m", [16, 32])
def test_visits_are_those_that_the_kernel_makes(m: int) -> None:
    sizes = jnp.asarray(SIZES, jnp.int32)
    _, visits = make_group_metadata(
        group_sizes=sizes,
        m=sum(SIZES),
        tm=m,
        start_group=jnp.asarray(0),
        num_nonzero_groups=len(SIZES),
        visit_empty_groups=False,
    )
    assert int(visits) == len(_visits(m)) == sum(SIZES) // m + len(SIZES) - 1


def test_a_plan_counts_the_tiles_of_the_kernel() -> None:
    """1024 rows of each of 64 experts: half of a tile more for each, which take 512 rows."""
    assert grouped_tiles(65536, 64, 2048, 768, itemsize=2) == GroupedTiles(512, 1024, 768)
    model = {
        "hidden_size": 2048,
        "num_layers": 2,
        "num_heads": 16,
        "head_dim": 128,
        "experts": {"num_experts": 64, "experts_per_token": 8, "intermediate_size": 768},
    }
    config = from_mapping(TrainConfig, {"model": model, "batch_size": 16, "seq_len": 4096})
    told = {}
    for name, topology in {"tpu": "v5p:2x2x2", "gpu": "h100:1x8"}.items():
        found = estimate(config, parse_topology(topology))
        told[name] = next(note for note in found.step.notes if "tokens are taken" in note)
    assert f"filled to {65536 / (65536 + 63 * 512):.0%}" in told["tpu"]
    assert "at the rate of dense ones" in told["gpu"]


def test_published_tiles_are_told_for_all_products_of_a_layer() -> None:
    path = Path(__file__).parents[4] / "benchmarks" / "published" / "maxtext.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    for row in told["rows"]:
        if "tiles" in row:
            model = told["models"][row["model"]]
            D, F = model["hidden_size"], model["experts"]["intermediate_size"]
            sides = {(D, F), (F, D)}
            found = {(which, k, n) for which, k, n, _ in told["tiles"][row["tiles"]]}
            wanted = itertools.product(("forward", "inputs", "weights"), sides)
            assert found == {(which, *pair) for which, pair in wanted}
