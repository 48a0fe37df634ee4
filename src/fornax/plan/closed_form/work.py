"""FLOPs and memory traffic of one device's step, class by class, the optimizer's update included.

Products count two operations for each multiplication. Backward takes two products for each of the
forward pass; a remat policy adds those it computes again (`layer.py`), and attention counts the
blocks its kernel visits. Linear layers compute in float32, and take the time of that. Everything is
of a step: all layers, all micro-batches.
"""

import dataclasses
import math
from collections.abc import Iterable

from fornax.models.config import LayerKind
from fornax.optim import SOAP, Muon, Shampoo
from fornax.plan.closed_form import grouped
from fornax.plan.closed_form.attention import attention_work
from fornax.plan.closed_form.layer import (
    Graph,
    Node,
    Replay,
    layer_graph,
    policy_of,
    replay,
)
from fornax.plan.closed_form.rounding import rounding_work
from fornax.plan.closed_form.shards import LocalStep, Section, sections
from fornax.plan.closed_form.state import StateArray
from fornax.plan.facts import Work

CHUNK = 1024
"""Tokens of a device whose logits exist at once, `linear_cross_entropy`'s default."""


def layer_replay(local: LocalStep, kind: LayerKind) -> Replay:
    """What the remat policy makes of a layer on this device."""
    return replay(local.model, local.shares, policy_of(local.config.resolved_remat()), kind)


def layer_replays(section: Section) -> Iterable[tuple[LayerKind, int, Replay]]:
    """Kinds of layers, how often they run, and what the remat policy makes of them."""
    for kind, count in section.runs_of.items():
        yield kind, count, layer_replay(section.local, kind)


def repeated_flops(local: LocalStep) -> float:
    """FLOPs of a device's step that are the remat policy's: done a second time."""
    once = 0.0
    for section in sections(local):
        for kind, count, again in layer_replays(section):
            once += count * section.local.tokens * again.product_flops
            if again.attention_again:
                once += count * attention_work(section.local, kind).forward_flops
    return once * local.config.accumulate


def step_work(local: LocalStep) -> tuple[Work, ...]:
    """Everything a device computes in one step but the optimizer's update."""
    work: list[Work] = []
    for section in sections(local):
        work += _layers(section)
        work += _attention(section)
    work += _ends(local)
    return tuple(work)


def _layers(section: Section) -> Iterable[Work]:
    """Everything but attention."""
    local = section.local
    for kind, layers, found in layer_replays(section):
        runs = layers * local.config.accumulate
        graph, _ = layer_graph(local.model, local.shares, kind)
        repeated = {node.name for node in found.again}
        for node in graph.values():
            if node.kind == "product":
                yield from _product(local, node, node.name in repeated, runs)
            if node.kind in ("batched", "inverse"):
                yield from _batched(local, graph, node, node.name in repeated, runs)
        yield from _sweeps(local, graph, repeated, runs)


_DISPATCH = frozenset(("gathered", "rows", "received", "returned", "down"))
"""Values between a token and its experts: sorted, sent, back in order, summed."""
_CLASS = {
    **dict.fromkeys(("gate", "up", "down", "shared_gate", "shared_up", "shared_down"), "mlp"),
    **dict.fromkeys(("input_gate", "input_product", "shared_weight"), "mlp"),
    **dict.fromkeys(("router", "terms"), "experts"),
}


def _product(local: LocalStep, node: Node, repeated: bool, runs: int) -> Iterable[Work]:
    """Forward, the two products backward, and once more where the policy says so."""
    kind = "experts" if node.experts else _CLASS.get(node.name, "attention_projections")
    forward = 2 if repeated else 1
    if node.experts and local.topology.chip.platform == "tpu":
        yield from _tiled(local, node, forward, runs)
        return
    groups = max(1, node.experts)
    M, K, N = math.ceil(local.tokens * node.rows / groups), node.contract, int(node.columns)
    item = local.compute_bytes
    runs *= groups
    if kind != "experts" and local.config.quant.scheme is not None:
        yield from _product_of_codes(local, kind, (M, K, N), forward, runs)
        return
    yield _matmul(kind, (M, K, N), item, item, runs * forward)
    yield _matmul(kind, (M, N, K), item, item, runs)  # the input's gradient
    yield _matmul(kind, (K, M, N), item, item, runs)  # the weights' gradient


_CODES = {"int8": "int8", "fp8": "float8"}
"""Dtype of products by `quant.scheme`."""


def _product_of_codes(
    local: LocalStep, kind: str, sides: tuple[int, int, int], forward: int, runs: int
) -> Iterable[Work]:
    """The three products of codes, and what is read and written to make the codes.

    An operand is read twice, for its largest magnitudes and for its codes. Weights are rounded
    where they lie; the gradient is rounded for each of the two products.
    """
    M, K, N = sides
    scheme, item = local.config.quant.scheme, local.compute_bytes
    assert scheme is not None
    for own, times in (((M, K, N), forward), ((M, N, K), 1), ((K, M, N), 1)):
        product = _matmul(kind, own, 1, item, runs * times)
        yield dataclasses.replace(product, dtype=_CODES[scheme])
    parts = math.prod(
        local.mesh[axis] for axis in local.axes("embed") if axis in local.rules["batch"]
    )
    rows, weight = M * K * (2 * item + 1), K * N * (2 * local.param_bytes + 1) / parts
    gradient = 2 * M * N * (2 * item + 1)
    yield Work(kind="rounding", bytes=float(rows + weight), count=runs * forward)
    yield Work(kind="rounding", bytes=float(gradient), count=runs)


def _batched(
    local: LocalStep, graph: Graph, node: Node, repeated: bool, runs: int
) -> Iterable[Work]:
    """A product of two values, for all heads and chunks, forward and backward."""
    read = sum(_bytes(local, graph[name]) for name in node.needs)
    forward = Work(
        kind="linear_attention",
        flops=local.tokens * node.flops,
        bytes=local.tokens * (read + _bytes(local, node)),
        count=runs * (2 if repeated else 1),
        sides=(1, node.contract, node.head) if node.head else None,
        dtype="float32",
    )
    yield forward
    if node.backward:
        size = forward.bytes * min(node.backward, 2.0)
        flops = node.backward * forward.flops
        yield dataclasses.replace(forward, flops=flops, bytes=size, count=runs)


def _bytes(local: LocalStep, node: Node) -> float:
    """Of a value, a token."""
    return local.compute_bytes * node.width + 4 * node.wide


def _tiled(local: LocalStep, node: Node, forward: int, runs: int) -> Iterable[Work]:
    """The three products of experts, by the tiles of the TPU's kernel."""
    K, N, item = node.contract, int(node.columns), local.compute_bytes
    room = math.ceil(local.tokens * local.shares.routed.room)
    products: tuple[tuple[grouped.Product, tuple[int, int], int], ...] = (
        ("forward", (K, N), forward),
        ("inputs", (N, K), 1),
        ("weights", (K, N), 1),
    )
    for which, sides, times in products:
        yield grouped.grouped_product(
            which,
            local.tokens * node.rows,
            node.experts,
            sides,
            grouped.tiles_of(which, room, node.experts, sides, item),
            item=item,
            count=runs * times,
        )


def _matmul(kind: str, sides: tuple[int, int, int], item: int, out_item: int, count: float) -> Work:
    M, K, N = sides
    return Work(
        kind=kind,
        flops=2.0 * M * K * N,
        bytes=float(item * (M * K + K * N) + out_item * M * N),
        count=count,
        sides=sides,
    )


def _attention(section: Section) -> Iterable[Work]:
    local = section.local
    for kind, layers, again in layer_replays(section):
        if kind.linear:
            continue
        work = attention_work(local, kind)
        runs = layers * local.config.accumulate
        yield Work(
            kind="attention",
            flops=work.forward_flops,
            bytes=work.forward_bytes,
            count=runs * (2 if again.attention_again else 1),
        )
        yield Work(
            kind="attention", flops=work.backward_flops, bytes=work.backward_bytes, count=runs
        )


def _sweeps(local: LocalStep, graph: Graph, repeated: set[str], runs: int) -> Iterable[Work]:
    """Norms, rotations, residual sums and activations, tokens' ways to their experts and back: as
    much memory as they read and write."""
    for node in graph.values():
        if node.kind != "cheap":
            continue
        read = sum(graph[name].width for name in node.needs)
        moved = local.tokens * local.compute_bytes * (read + node.width)
        if node.wide:
            wide = node.wide + sum(graph[name].wide for name in node.needs)
            moved += local.tokens * 4 * wide
        times = 1 + 2 + (node.name in repeated)  # backward reads the gradient and the values
        yield Work(
            kind="dispatch" if node.name in _DISPATCH else "norms_elementwise",
            flops=6.0 * local.tokens * (node.width + node.wide),
            bytes=moved,
            count=runs * times,
        )


def _ends(local: LocalStep) -> Iterable[Work]:
    """Embedding, layers' inputs, final norm, output projection and loss of all micro-batches. A
    module that predicts further tokens has each of them but layers' inputs once more, and takes
    embeddings and hidden states to its layer."""
    model, item = local.model, local.compute_bytes
    D, V, M = model.hidden_size, local.shares.vocab, local.tokens
    steps = local.config.accumulate
    modules = steps * model.num_mtp_modules
    if modules:
        W = local.shares.module
        for sides in ((M, W, D), (M, D, W), (W, M, D)):
            yield _matmul("modules", sides, item, item, modules)
        # Both norms and the row that they make.
        yield Work(kind="modules", bytes=float(M * 2 * D * (item + 4) * 3), count=modules)
    if model.layer_inputs is not None:
        width = model.num_layers * model.layer_inputs.width
        for sides in ((M, D, width), (M, width, D), (D, M, width)):
            yield _matmul("layer_inputs", sides, item, item, steps)
        moved = 3.0 * M * width * (2 * local.param_bytes + 4 * item)
        yield Work(kind="norms_elementwise", flops=6.0 * M * width, bytes=moved, count=steps)
    steps += modules
    yield Work(kind="embedding", bytes=float(M * D * (local.param_bytes + item) * 3), count=steps)
    yield Work(kind="norms_elementwise", bytes=float(M * D * (item + 4) * 3), count=steps)
    chunks = max(1, -(-M // CHUNK))
    C = -(-M // chunks)
    per_chunk = steps * chunks
    yield _matmul("logits_loss", (C, D, V), item, 4, per_chunk)
    yield _matmul("logits_loss", (C, V, D), item, item, per_chunk)
    yield _matmul("logits_loss", (D, C, V), item, 0, per_chunk)
    # The sum of the weights' gradient is read and written, the logits pass three times more.
    yield Work(kind="logits_loss", bytes=float(8 * D * V + 3 * 4 * C * V), count=per_chunk)


_FLOPS_A_NUMBER = 12.0
"""Operations of an elementwise update for each parameter, with clipping and decay."""


def elementwise_update(state: tuple[StateArray, ...], accumulate: int) -> list[Work]:
    """The update of any model by an optimizer that works on each number, with its clipping.

    Args:
      state: of a device.
      accumulate: micro-batches of a step.
    """
    params = [array for array in state if array.owner == "parameters"]
    held = sum(array.bytes for array in params)
    kept = sum(array.bytes for array in state if array.owner == "optimizer")
    count = sum(math.prod(array.shape) for array in params)
    gradients = 4 * count
    work = [
        # Reads gradients, parameters and state; writes the last two.
        Work(
            kind="optimizer",
            flops=_FLOPS_A_NUMBER * count,
            bytes=float(gradients + 2 * held + 2 * kept),
        ),
        Work(kind="optimizer", flops=2.0 * count, bytes=float(gradients)),  # the global norm
    ]
    if accumulate > 1:
        work.append(Work(kind="optimizer", bytes=3.0 * gradients, count=accumulate))
    return work


def update_work(local: LocalStep, state: tuple[StateArray, ...]) -> tuple[Work, ...]:
    """The update and everything else a step does with whole gradients."""
    params = [array for array in state if array.owner == "parameters"]
    work = elementwise_update(state, local.config.accumulate)
    work.extend(_matrices(local, params))
    work.extend(rounding_work(local, params))
    return tuple(work)


def _matrices(local: LocalStep, params: list[StateArray]) -> Iterable[Work]:
    """Products of optimizers that work on whole matrices, divided over their devices."""
    chain = local.config.optim
    kinds = [chain.optimizer, *(group.optimizer for group in chain.groups)]
    optimizer = next((kind for kind in kinds if isinstance(kind, Muon | SOAP | Shampoo)), None)
    if optimizer is None:
        return
    for array in params:
        if not array.name.startswith(("layers/", "mtp/")) or len(array.shape) < 3:
            continue
        shards = math.prod(local.mesh[axis] for dim in array.axes for axis in dim)
        whole = [n * _over(local, axes) for n, axes in _dims(array)]
        stacked = 2 if array.of_experts else 1
        layers = math.prod(whole[:stacked])
        rows, columns = _sides(array.name, whole[stacked:])
        flops = layers * _flops(optimizer, rows, columns) / shards
        yield Work(kind="optimizer", flops=flops, bytes=float(2 * layers * rows * columns / shards))


def _dims(array: StateArray) -> Iterable[tuple[int, tuple[str, ...]]]:
    return zip(array.shape, array.axes, strict=True)


def _over(local: LocalStep, axes: tuple[str, ...]) -> int:
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
