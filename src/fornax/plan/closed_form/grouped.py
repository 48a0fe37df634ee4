"""Grouped products of a TPU by their tiles: what is computed, and what passes through memory.

The kernels (`fornax.kernels`, megablox) visit tiles of rows in order, and one that two experts
share once for each, so that E experts visit E - 1 tiles more than their rows fill. Each visit
multiplies a whole tile, masked. A tile of an operand is read again unless the visit before had it.

Legend: M rows, E experts, K contracted, N columns of a product; m, k, n of a tile.
"""

import math
from typing import Literal

from fornax.kernels import GroupedTiles, grouped_tiles
from fornax.plan.facts import Work

__all__ = ["Product", "grouped_product", "tiles_of"]

Product = Literal["forward", "inputs", "weights"]
"""y = x w of each expert; the gradient of x; that of w, whose sums are over rows."""


def tiles_of(
    which: Product, rows: int, experts: int, sides: tuple[int, int], item: int
) -> GroupedTiles:
    """The tiles that Fornax's own kernels take.

    Args:
      which: of the three products.
      rows: that buffers have room for.
      experts: E.
      sides: (K, N) of the product as it is multiplied; of `weights`, of its result.
      item: bytes of an element.
    """
    del which  # they take the same
    return grouped_tiles(rows, experts, *sides, itemsize=item)


def grouped_product(
    which: Product,
    rows: float,
    experts: int,
    sides: tuple[int, int],
    tiles: GroupedTiles,
    *,
    item: int,
    count: float,
) -> Work:
    """One call for all experts.

    Args:
      which: of the three products.
      rows: M, those that there are.
      experts: E.
      sides: (K, N), as `tiles_of` takes them.
      tiles: of the kernel.
      item: bytes of an element.
      count: times a step.
    """
    K, N = sides
    filled = math.ceil(rows / tiles.rows)
    visits = filled + experts - 1
    across_k, across_n = math.ceil(K / tiles.contracted), math.ceil(N / tiles.columns)
    whole_k, whole_n = across_k * tiles.contracted, across_n * tiles.columns
    if which == "weights":
        moved = filled * tiles.rows * (across_n * K + across_k * N) + experts * K * N
    else:
        once = across_k == 1  # an operand that the visit before had is not read again
        x = (filled if once else visits) * tiles.rows * K * across_n
        moved = x + (experts if once else visits) * K * N + rows * N
    return Work(
        kind="experts",
        flops=2.0 * rows * K * N,
        bytes=float(item * moved),
        count=count,
        sides=(tiles.rows, tiles.contracted, tiles.columns),
        computed=visits * tiles.rows / rows * (whole_k / K) * (whole_n / N),
    )
