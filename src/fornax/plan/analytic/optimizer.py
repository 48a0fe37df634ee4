"""The update: what the optimizer computes, and the memory it sweeps through."""

import math
from collections.abc import Iterable

from fornax.optim import SOAP, Muon, Shampoo
from fornax.plan.analytic.flops import Piece
from fornax.plan.analytic.local import Local
from fornax.plan.analytic.state import StateArray

__all__ = ["update_pieces"]

_FLOPS_A_NUMBER = 12.0
"""Operations of an elementwise update for each parameter, with clipping and decay."""


def update_pieces(local: Local, state: tuple[StateArray, ...]) -> tuple[Piece, ...]:
    """The update and everything else a step does with whole gradients."""
    params = [array for array in state if array.owner == "parameters"]
    held = sum(array.bytes for array in params)
    kept = sum(array.bytes for array in state if array.owner == "optimizer")
    count = sum(math.prod(array.shape) for array in params)
    gradients = 4 * count
    pieces = [
        # Reads gradients, parameters and state; writes the last two.
        Piece(
            kind="optimizer",
            flops=_FLOPS_A_NUMBER * count,
            bytes=float(gradients + 2 * held + 2 * kept),
        ),
        Piece(kind="optimizer", flops=2.0 * count, bytes=float(gradients)),  # the global norm
    ]
    if local.config.accumulate > 1:
        pieces.append(Piece(kind="optimizer", bytes=3.0 * gradients, count=local.config.accumulate))
    pieces.extend(_matrices(local, params))
    return tuple(pieces)


def _matrices(local: Local, params: list[StateArray]) -> Iterable[Piece]:
    """Products of optimizers that work on whole matrices, divided over their devices."""
    chain = local.config.optim
    kinds = [chain.optimizer, *(group.optimizer for group in chain.groups)]
    optimizer = next((kind for kind in kinds if isinstance(kind, Muon | SOAP | Shampoo)), None)
    if optimizer is None:
        return
    for array in params:
        if not array.name.startswith("layers/") or len(array.shape) < 3:
            continue
        layers = array.shape[0]
        shards = math.prod(local.mesh[axis] for dim in array.axes for axis in dim)
        rows, columns = _sides(array.name, [n * _over(local, d) for n, d in _dims(array)][1:])
        flops = layers * _flops(optimizer, rows, columns) / shards
        yield Piece(
            kind="optimizer", flops=flops, bytes=float(2 * layers * rows * columns / shards)
        )


def _dims(array: StateArray) -> Iterable[tuple[int, tuple[str, ...]]]:
    return zip(array.shape, array.axes, strict=True)


def _over(local: Local, axes: tuple[str, ...]) -> int:
    return math.prod(local.mesh[axis] for axis in axes)


def _sides(name: str, whole: list[int]) -> tuple[int, int]:
    """Rows and columns of one layer's matrix: heads and their width are one side."""
    if len(whole) == 3:
        out = name.endswith("o/kernel")
        return (whole[0] * whole[1], whole[2]) if out else (whole[0], whole[1] * whole[2])
    return whole[0], whole[1]


def _flops(config: Muon | SOAP | Shampoo, rows: int, columns: int) -> float:
    """Operations of one layer's matrix, an update."""
    match config:
        case Muon():
            return _muon(config, rows, columns)
        case SOAP():
            return _soap(config, rows, columns)
        case Shampoo():
            return _shampoo(config, rows, columns)


def _muon(config: Muon, rows: int, columns: int) -> float:
    """Newton-Schulz: X X^T, its square, and their product with X, each iteration."""
    small, large = min(rows, columns), max(rows, columns)
    return config.ns_steps * (4.0 * small * small * large + 2.0 * small**3)


def _soap(config: SOAP, rows: int, columns: int) -> float:
    """Two covariances, three rotations between bases, and the bases' refinement."""
    flops = 0.0
    for side, other in ((rows, columns), (columns, rows)):
        if side <= config.max_precondition_dim:
            flops += 2.0 * side * side * other * 4
            flops += (2.0 * side**3 + 4.0 / 3.0 * side**3) / config.precondition_frequency
    return flops


def _shampoo(config: Shampoo, rows: int, columns: int) -> float:
    """Two covariances and two products of each block, and the roots' eigendecompositions."""
    sides = [min(side, config.block_size) for side in (rows, columns)]
    blocks = rows * columns / (sides[0] * sides[1])
    flops = 0.0
    for side, other in (sides, reversed(sides)):
        flops += 2.0 * side * side * other * 2
        flops += (9.0 * side**3 + 2.0 * side**3) / config.root_interval
    return blocks * flops
