"""FLOPs and memory traffic of one device's step, class by class.

Products count two operations for each multiplication. Backward takes two products for each of the
forward pass; a remat policy adds those it computes again (`layer.py`), and attention counts the
blocks its kernel visits. Everything is of a step: all layers, all micro-batches.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fornax.plan.analytic.attention import attention_work
from fornax.plan.analytic.layer import Node, Replay, layer_graph, replay
from fornax.plan.analytic.local import Local, windows
from fornax.plan.analytic.policies import policy_of

__all__ = ["CHUNK", "Piece", "layer_replay", "repeated_flops", "step_pieces"]

CHUNK = 1024
"""Tokens of a device whose logits exist at once, `linear_cross_entropy`'s default."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One product, kernel or sweep through memory, and how often a step has it."""

    kind: str
    """The class of the roofline that it belongs to."""
    flops: float = 0.0
    bytes: float = 0.0
    count: float = 1.0
    sides: tuple[int, int, int] | None = None
    """(rows, contracted, columns) of a product, for how well it fills the matrix units."""


def layer_replay(local: Local) -> Replay:
    """What the remat policy makes of a layer on this device."""
    return replay(local.model, local.shares, policy_of(local.config.resolved_remat()))


def repeated_flops(local: Local) -> float:
    """FLOPs of a device's step that are the remat policy's: done a second time."""
    again = layer_replay(local)
    once = local.model.num_layers * local.tokens * again.product_flops
    if again.attention_again:
        for window, layers in windows(local.model).items():
            once += layers * attention_work(local, window).forward_flops
    return once * local.config.accumulate


def step_pieces(local: Local) -> tuple[Piece, ...]:
    """Everything a device computes in one step but the optimizer's update."""
    runs = local.model.num_layers * local.config.accumulate
    again = layer_replay(local)
    graph, _ = layer_graph(local.model, local.shares)
    repeated = {node.name for node in again.again}
    pieces = [
        piece
        for node in graph.values()
        if node.kind == "product"
        for piece in _product(local, node, node.name in repeated, runs)
    ]
    pieces += _attention(local, again)
    pieces += _sweeps(local, [node for node in graph.values() if node.kind == "cheap"], again, runs)
    pieces += _ends(local)
    return tuple(pieces)


_CLASS = {"gate": "mlp", "up": "mlp", "down": "mlp"}


def _product(local: Local, node: Node, repeated: bool, runs: int) -> Iterable[Piece]:
    """Forward, the two products backward, and once more where the policy says so."""
    kind = _CLASS.get(node.name, "attention_projections")
    M, K, N = local.tokens, node.contract, node.columns
    item = local.compute_bytes
    forward = 2 if repeated else 1
    yield _matmul(kind, (M, K, N), item, item, runs * forward)
    yield _matmul(kind, (M, N, K), item, item, runs)  # the input's gradient
    yield _matmul(kind, (K, M, N), item, item, runs)  # the weights' gradient


def _matmul(
    kind: str, sides: tuple[int, int, int], item: int, out_item: int, count: float
) -> Piece:
    M, K, N = sides
    return Piece(
        kind=kind,
        flops=2.0 * M * K * N,
        bytes=float(item * (M * K + K * N) + out_item * M * N),
        count=count,
        sides=sides,
    )


def _attention(local: Local, again: Replay) -> Iterable[Piece]:
    for window, layers in windows(local.model).items():
        work = attention_work(local, window)
        runs = layers * local.config.accumulate
        forward = runs * (2 if again.attention_again else 1)
        yield Piece(
            kind="attention", flops=work.forward_flops, bytes=work.forward_bytes, count=forward
        )
        yield Piece(
            kind="attention", flops=work.backward_flops, bytes=work.backward_bytes, count=runs
        )


def _sweeps(local: Local, nodes: list[Node], again: Replay, runs: int) -> Iterable[Piece]:
    """Norms, rotations, residual sums and activations: as much memory as they read and write."""
    graph, _ = layer_graph(local.model, local.shares)
    repeated = {node.name for node in again.again}
    for node in nodes:
        if node.needs == (node.name,) or node.name == "v":
            continue  # only a name for another value
        read = sum(graph[name].width for name in node.needs)
        moved = local.tokens * local.compute_bytes * (read + node.width)
        times = 1 + 2 + (node.name in repeated)  # backward reads the gradient and the values
        yield Piece(
            kind="norms_elementwise",
            flops=6.0 * local.tokens * node.width,
            bytes=moved,
            count=runs * times,
        )


def _ends(local: Local) -> Iterable[Piece]:
    """Embedding, final norm, output projection and loss of all micro-batches."""
    model, item = local.model, local.compute_bytes
    D, V, M = model.hidden_size, local.shares.vocab, local.tokens
    steps = local.config.accumulate
    yield Piece(kind="embedding", bytes=float(M * D * (local.param_bytes + item) * 3), count=steps)
    yield Piece(kind="norms_elementwise", bytes=float(M * D * (item + 4) * 3), count=steps)
    chunks = max(1, -(-M // CHUNK))
    C = -(-M // chunks)
    per_chunk = steps * chunks
    yield _matmul("logits_loss", (C, D, V), item, 4, per_chunk)
    yield _matmul("logits_loss", (C, V, D), item, item, per_chunk)
    yield _matmul("logits_loss", (D, C, V), item, 0, per_chunk)
    # The sum of the weights' gradient is read and written, the logits pass three times more.
    yield Piece(kind="logits_loss", bytes=float(8 * D * V + 3 * 4 * C * V), count=per_chunk)
