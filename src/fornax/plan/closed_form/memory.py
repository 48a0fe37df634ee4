"""Peak bytes of one device by owner: the state exactly, the rest from what is alive at once.

Three moments can be the peak: the loss, where the output projection's gradient and a chunk's logits
are beside everything the forward pass kept; the backward pass of a layer, with the gradients of
all layers already allocated; and the update.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from fornax.kernels import ACTIVATIONS
from fornax.models.config import LayerKind
from fornax.plan.closed_form.attention import attention_work, head_widths
from fornax.plan.closed_form.layer import layer_graph
from fornax.plan.closed_form.rounding import rounded_bytes
from fornax.plan.closed_form.shards import LocalStep, kinds_of, sections
from fornax.plan.closed_form.state import StateArray, dealt_elements
from fornax.plan.closed_form.work import CHUNK, layer_replay, layer_replays
from fornax.plan.facts import Buffer, Memory, MemoryPart

_BATCH_ARRAYS = 5
"""tokens, targets, segment_ids, positions, loss_weights: four bytes per token each."""
_LANES = 128
_LARGEST = 12
_GAPS = 0.015
"""Share of the temporaries that the compiler leaves unused between them (0.6 to 2 % seen)."""
_PASSED_ROUND = 8
"""Most devices of a ring over which weights are passed round in parts."""


@dataclasses.dataclass(frozen=True)
class _Moment:
    """What is alive at one moment beside the state and the batch."""

    name: str
    gradients: Mapping[str, float]
    activations: Mapping[str, float]
    temporaries: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(
            sum(part.values()) for part in (self.gradients, self.activations, self.temporaries)
        )


def memory_at_peak(local: LocalStep, state: tuple[StateArray, ...]) -> Memory:
    """The largest of the three moments, of a chip."""
    moments = (_loss(local, state), _backward(local, state), _update(local, state))
    peak = max(moments, key=lambda moment: moment.total)
    held = {
        owner: sum(array.bytes for array in state if array.owner == owner)
        for owner in ("parameters", "optimizer")
    }
    sizes = {
        **held,
        "gradients": round(sum(peak.gradients.values())),
        "activations": round(sum(peak.activations.values())),
        "temporaries": round(sum(peak.temporaries.values())),
        "batch": _BATCH_ARRAYS * 4 * local.tokens * local.config.accumulate,
        "other": round(_code(local) + _GAPS * peak.total),
    }
    chip = local.topology.chip
    return Memory(
        parts=tuple(MemoryPart(owner=o, bytes=size * chip.devices) for o, size in sizes.items()),
        usable=int(chip.usable_bytes),
        host=round(kept_bytes(local, offloaded=True)) * chip.devices,
        buffers=_buffers(peak, chip.devices),
    )


def _buffers(peak: _Moment, devices: int) -> tuple[Buffer, ...]:
    """The largest parts of the peak. Closed forms know arrays by what they are, not by a line."""
    parts = {**peak.gradients, **peak.activations, **peak.temporaries}
    sizes = {name: round(size) * devices for name, size in parts.items() if size >= 1}
    largest = sorted(sizes.items(), key=lambda part: -part[1])[:_LARGEST]
    return tuple(
        Buffer(name=name, owner="", shape="", bytes=size, unpadded_bytes=size)
        for name, size in largest
    )


def _code(local: LocalStep) -> int:
    """The program itself; scanned layers make it about the same for all models."""
    return 40 * 2**20 if local.topology.chip.platform == "tpu" else 0


def kept_bytes(local: LocalStep, *, offloaded: bool = False) -> float:
    """Bytes of what all layers keep for the backward pass."""
    total = 0.0
    for section in sections(local):
        for kind, runs, found in layer_replays(section):
            size = 0.0
            for node in found.offloaded if offloaded else found.kept:
                lanes = 1.0 if offloaded else _lanes(local, node.head)
                size += node.width * lanes * local.compute_bytes + 4 * node.wide
            if local.config.remat == "none" and not offloaded:
                size += _intermediates(local, kind)
            total += runs * section.local.tokens * size
    return total if offloaded else total + _inputs_kept(local) + _modules_kept(local)


def _inputs_kept(local: LocalStep) -> float:
    """Bytes of what the layers' further inputs are made of: the norm's input. The inputs themselves
    count with the layers."""
    inputs = local.model.layer_inputs
    if inputs is None:
        return 0.0
    return float(local.tokens * local.model.num_layers * inputs.width * local.compute_bytes)


def _modules_kept(local: LocalStep) -> float:
    """Bytes of what modules that predict further tokens keep beside their layers, which no policy
    is asked about: of each of three norms three float32 arrays, and the projection's input."""
    model = local.model
    each = model.hidden_size * (3 * 3 * 4 + 2 * local.compute_bytes)
    return float(model.num_mtp_modules * local.tokens * each)


def _lanes(local: LocalStep, head: int) -> float:
    """How much larger an array is whose last dimension is a head's width, if it is (not 0)."""
    if local.topology.chip.platform != "tpu" or not head:
        return 1.0
    return -(-head // _LANES) * _LANES / head


def _intermediates(local: LocalStep, kind: LayerKind) -> float:
    """Bytes a token that a layer keeps besides where no policy says what to keep: of each norm
    three float32 arrays of its width, what differentiating the activation keeps of the MLP's, the
    factors of gates, and what linear layers compute.
    """
    model, shares = local.model, local.shares
    graph, _ = layer_graph(model, shares, kind)
    norms = sum(node.width + node.wide for node in graph.values() if node.name.endswith("_norm"))
    inner = _activation_residuals(model.activation) * _inner_width(local, kind)
    sums = 0
    if kind.mlp == "experts":  # the router's input and the terms of the sum in float32, their mask
        back = shares.chosen * (1 if shares.routed.sends else shares.routed.gathered)
        own = 0 if "router_norm" in graph else 4
        sums = model.hidden_size * (own + back * (4 - local.compute_bytes + 1))
    if model.attention_gate and not kind.linear:
        inner += 2 * graph["gated"].width
    if "gated_shared" in graph:
        inner += graph["gated_shared"].width
    linear = _linear_intermediates(local) if kind.linear else 0.0
    return 3.0 * 4 * norms + inner * local.compute_bytes + sums + 4 * linear


def _linear_intermediates(local: LocalStep) -> float:
    """Float32 values a token that a linear layer keeps where no policy says what to keep.

    Of each convolution its taps and what the activation's derivative takes; queries, keys and
    values by chunk; each product's factors, each gate's and each norm's; and the chunks' states.
    """
    rule, own = local.model.linear, local.shares.linear
    assert rule is not None
    assert own is not None
    K, N, H, V, C = own.key_heads, own.heads, rule.key_dim, rule.value_dim, own.chunk
    mixed = (rule.conv_width + 3) * (2 * K * H + N * V)
    if local.model.gated_delta is not None:
        chunks = 7 * K * H + 13 * N * V + 4 * N * C + 2 * K * C + 2 * N * H
    else:
        chunks = 2 * K * H + 14 * N * V + 2 * N * C + K * C
    return mixed + chunks + N * H * V / C + 12 * N  # a dozen numbers of each head


def _inner_width(local: LocalStep, kind: LayerKind) -> float:
    """Elements a token between the projections of an MLP, or of all its experts."""
    graph, _ = layer_graph(local.model, local.shares, kind)
    return sum(graph[name].width for name in _INNER if name in graph)


_INNER = ("gate", "shared_gate", "input_gate")
"""What activations are applied to between the projections of MLPs."""


@functools.cache
def _activation_residuals(name: str) -> int:
    """Arrays of its argument's shape that an activation keeps: three of SiLU; of GELU five with
    jax 0.10, four with jax 0.12."""
    x = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    kept = jax.eval_shape(lambda x: jax.vjp(ACTIVATIONS[name], x)[1], x)
    return sum(leaf.shape == x.shape for leaf in jax.tree.leaves(kept))


def _named(state: tuple[StateArray, ...], prefix: str) -> list[StateArray]:
    return [a for a in state if a.owner == "parameters" and a.name.startswith(prefix)]


def _layers(state: tuple[StateArray, ...]) -> list[StateArray]:
    """Parameters of layers, those of modules among them."""
    return [a for a in state if a.owner == "parameters" and a.stack is not None]


def _count(arrays: list[StateArray]) -> int:
    return sum(math.prod(array.shape) for array in arrays)


def _cast(local: LocalStep, state: tuple[StateArray, ...]) -> float:
    """The layers' weights in the compute dtype: the cast is made once, before the loop."""
    if local.param_bytes == local.compute_bytes:
        return 0.0
    return float(local.compute_bytes * _count(_layers(state)))


def _sums(local: LocalStep, state: tuple[StateArray, ...]) -> float:
    """Float32 gradients added up over micro-batches."""
    params = [array for array in state if array.owner == "parameters"]
    return 4.0 * _count(params) if local.config.accumulate > 1 else 0.0


def _head(local: LocalStep) -> int:
    """Elements of the gathered output projection of this device's vocabulary."""
    return local.model.hidden_size * local.shares.vocab


def _rotations(local: LocalStep) -> float:
    tables = len({kind.rope for kind in kinds_of(local.model)} - {"none"})
    half = max(_LANES, local.model.rotated_width(local.model.rope, wide=True) // 2)
    return tables * 2 * 4.0 * local.tokens * half


def _loss(local: LocalStep, state: tuple[StateArray, ...]) -> _Moment:
    item, head = local.compute_bytes, _head(local)
    chunk = min(CHUNK, local.tokens)
    stream = local.tokens * local.model.hidden_size * item
    # A module's loss makes its own gradient, beside what those before it have added up.
    gradients = 2 if local.model.num_mtp_modules else 1
    return _Moment(
        "loss",
        gradients={
            "output projection's gradient (whole width)": 4.0 * head * gradients,
            "sums over micro-batches": _sums(local, state),
        },
        activations={"kept by layers": kept_bytes(local)},
        temporaries={
            "output projection (gathered)": float(item * head),
            "logits of a chunk": 4.0 * chunk * local.shares.vocab,
            "residual stream and its gradient": 3.0 * stream,
            "weights in the compute dtype": _cast(local, state),
            "rounded weights": rounded_bytes(local, state),
            "rotations": _rotations(local),
        },
    )


def _backward(local: LocalStep, state: tuple[StateArray, ...]) -> _Moment:
    layers = _layers(state)
    return _Moment(
        "backward",
        gradients={
            "layers' gradients": 4.0 * _count(layers),
            # Compilers reduce it late: it stays whole while the layers go backward.
            "output projection's gradient (whole width)": 4.0 * _head(local),
            "sums over micro-batches": _sums(local, state),
        },
        activations={"kept by layers": kept_bytes(local)},
        temporaries={
            "weights and their gradients (gathered)": _whole_weights(local, layers),
            "a layer's working set": max(
                one.local.tokens * _working_set(one.local) for one in sections(local)
            ),
            **_pipelined(local, layers),
            "weights in the compute dtype": _cast(local, state),
            "rounded weights": rounded_bytes(local, state),
            "rotations": _rotations(local),
        },
    )


def _pipelined(local: LocalStep, layers: list[StateArray]) -> dict[str, float]:
    """What a pipeline holds beside its stages' layers: the microbatches that wait for the first
    stage and those that are done, with their gradients; the rotations of each tick; and parameters
    that were dealt to their stages, with their gradients."""
    staged = sections(local)[-1]
    if not staged.staged:
        return {}
    stream = local.tokens * local.model.hidden_size * local.compute_bytes
    part, dealt = dealt_elements(staged, layers)
    repeats = local.config.pipeline.repeats
    if repeats > 1:
        dealt = part * repeats
    return {
        "parameters dealt to stages and their gradients": 2.0 * dealt * local.param_bytes,
        "microbatches in slots and their gradients": 2.0 * stream,
        "rotations of all ticks": staged.runs * _rotations(staged.local),
    }


def _whole_weights(local: LocalStep, layers: list[StateArray]) -> float:
    """Weights of a layer put together for its products, and gradients before they are divided.

    Over few devices the compiler passes parts of a weight round while it multiplies, so that one
    weight and its gradient are whole at most (seen with 8); over many it gathers all of a layer
    ahead, and two gradients wait for their reduction (seen with 256).
    """
    data = {*local.axes("batch"), *local.axes("length")}
    axes = {axis for array in layers for axis in array.gathered_axes if axis in data}
    few = math.prod(local.mesh[axis] for axis in axes) <= _PASSED_ROUND
    return max(
        _whole_weights_of(local, [a for a in layers if a.stack == section.stack], kind, few)
        for section in sections(local)
        for kind in section.runs_of
    )


def _whole_weights_of(
    local: LocalStep, layers: list[StateArray], kind: LayerKind, few: bool
) -> float:
    """The same for a layer of a kind. Experts' weights are gathered together."""
    parts = kind.parts()
    mine = [array for array in layers if array.part in parts]
    experts = [_layer_of(local, a) for a in mine if a.part == "experts"]
    counts = [_layer_of(local, a) for a in mine]
    if few:
        return 2.0 * local.compute_bytes * max(max(counts), sum(experts))
    return local.compute_bytes * (float(sum(counts)) + 2.0 * max(max(counts), sum(experts)))


def _layer_of(local: LocalStep, array: StateArray) -> int:
    """Elements of one layer of a stack, put together."""
    data = {*local.axes("batch"), *local.axes("length")}
    stays = array.axes[1] if array.of_experts else ()
    axes = [axis for dim in array.axes[1:] for axis in dim if axis in data and axis not in stays]
    return math.prod(array.shape[1:]) * math.prod(local.mesh[axis] for axis in axes)


def _working_set(local: LocalStep) -> float:
    """Bytes per token of a layer's own values while it goes backward.

    The largest of three: the MLP's, with gate, up, their product, four of the stream's width and
    what was computed again for attention's turn; attention's kernel, with what it takes, gives and
    scratches, or what a linear layer computes in float32; the rotations' in float32, where half a
    head's width is padded to whole lanes.
    """
    return max(_working_set_of(local, kind) for kind in kinds_of(local.model))


def _working_set_of(local: LocalStep, kind: LayerKind) -> float:
    """The same of a layer of a kind; experts' rows are the tokens', once for each choice."""
    model, shares, item = local.model, local.shares, local.compute_bytes
    D, F = model.hidden_size, _inner_width(local, kind)
    tpu = local.topology.chip.platform == "tpu"
    chosen = shares.routed.room if kind.mlp == "experts" else 0
    if kind.linear:
        return max(item * ((4 + 2 * chosen) * D + 3 * F), item * 3 * D + _linear_set(local, kind))
    (H, V), turning = head_widths(model, kind), model.rotated_width(model.rope, wide=True)
    key, value = H * _lanes(local, H), V * _lanes(local, V)
    q, o = shares.heads * key, shares.heads * value
    half = _lanes(local, H) * 2 * max(_LANES, turning // 2) if tpu else turning
    scratch = attention_work(local, kind).scratch_bytes
    found = layer_replay(local, kind)
    ahead = [node for node in (*found.again, *found.offloaded) if node.name in ("q", "k", "v", "o")]
    again = sum(node.width * _lanes(local, node.head) for node in ahead)
    inner = item * ((4 + 2 * chosen) * D + 3 * F + again)
    attention = item * (3 * D + q + 2 * o + shares.kv_heads_of(kind) * (key + value))
    rotations = 4 * (shares.heads * half + q) + item * (3 * D + 3 * q + F)
    return float(max(inner, attention + scratch / local.tokens, rotations))


def _linear_set(local: LocalStep, kind: LayerKind) -> float:
    """Bytes per token of what a linear layer computes in float32 for its backward pass, all at
    once: gradients take the places of values that are done with, and no layout pads chunks
        (seen)."""
    graph, _ = layer_graph(local.model, local.shares, kind)
    return 4.0 * sum(node.wide for node in graph.values())


def _update(local: LocalStep, state: tuple[StateArray, ...]) -> _Moment:
    params = [array for array in state if array.owner == "parameters"]
    embedding = _count(_named(state, "embed/")) + _count(_named(state, "layer_inputs/embedding"))
    return _Moment(
        "update",
        gradients={
            "gradients": 4.0 * _count(params),
            "sums over micro-batches": _sums(local, state),
        },
        activations={},
        temporaries={"embedding's gradient (whole width)": 4.0 * embedding},
    )
