"""What a custom call costs: by the estimate it carries, by its name, or by a closed form.

Pallas kernels may carry a cost estimate. Our attention on TPU says its products in its scope's
name; our CPU kernels are known by their target. Of what is left only the traffic is known.

Legend: B batch, T queries, S keys, N query heads, K key/value heads, H and V head widths.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from fornax.hlo.facts import Category
from fornax.hlo.module import Instruction
from fornax.hlo.shapes import HBM, Shape, leaves
from fornax.hlo.work import Work

_GROUPED_NAME = re.compile(r"\bt?gmm\b")
"""JAX's megablox kernels, which say their cost."""
_ATTENTION_NAME = re.compile(r"splash|flash|core_attention|attention[^/]*$", re.IGNORECASE)
"""Of a kernel, or of the scope that it is called in; an attention's projections are in none."""
_SPLASH_COSTS = re.compile(r"splash:((?:\w+=\d+,?)+)")
_SPLASH_PHASE = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)")
_ATTRIBUTE = re.compile(r"(\w+) = (\S+?)(?: : \w+)?[,}]")
_COEFFICIENTS = re.compile(r"coefficients = dense<[^>]*> : tensor<(\d+)xf32>")
_FULL = (
    "{}: paged attention is counted for contexts as long as the page table or the window; how "
    "long they are is known only when it runs"
)
_FREE_NAMES = (
    "Sharding SPMDFullToShardShape SPMDShardToFullShape AllocateBuffer annotate_device_placement "
    "MoveToHost MoveToDevice AssumeGatherIndicesInBound ConcatBitcast PartialReduce "
    "ResizeBuffer PrepareAsyncCallStart PrepareAsyncCallDone SliceId"
)

FREE_TARGETS = frozenset([*_FREE_NAMES.split(), "AsyncCollectiveStart", "AsyncCollectiveDone"])
"""Targets that stand for no work of their own."""

_MOVING_TARGETS = frozenset(["ZeroCrop", "GatherScatterIndicesBitpacked"])


@dataclasses.dataclass(frozen=True, slots=True)
class CallCost:
    """Work and HBM bytes of one run; `note` says what is not known."""

    category: Category
    work: Work
    bytes: int
    note: str = ""


def custom_call_cost(instruction: Instruction, grouped_rows: float = 1.0) -> CallCost:
    """Return what a custom call costs; `grouped_rows` as `analyse` takes it."""
    cost = _cost(instruction)
    name = f"{instruction.op_name} {instruction.name}"
    if instruction.target in _GROUPED_KERNELS or _GROUPED_NAME.search(name):
        cost = dataclasses.replace(cost, work=cost.work.times(grouped_rows))
    return cost


def _cost(instruction: Instruction) -> CallCost:
    shapes = [operand.shape for operand in instruction.operands]
    traffic = instruction.shape.bytes_in(HBM) + sum(shape.bytes_in(HBM) for shape in shapes)
    target = instruction.target
    if target == "tpu_custom_call":
        return _pallas(instruction, shapes, traffic)
    if target in _CPU_KERNELS:
        return _CPU_KERNELS[target](instruction, shapes, traffic)
    if "matmul" in target or "gemm" in target.lower():
        return CallCost("matmul", Work(flops=_product(shapes, instruction.shape)), traffic)
    if target in FREE_TARGETS:
        return CallCost("other", Work(), 0)
    if target in _MOVING_TARGETS:
        return CallCost("copy", Work(), traffic)
    if target == "TopK":
        return CallCost("reduce", Work(vector_flops=float(shapes[0].size)), traffic)
    note = f"{instruction.name}: no cost is known for custom call {target!r}; only its traffic"
    return CallCost("other", Work(), traffic, note)


def _pallas(instruction: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    name = f"{instruction.op_name} {instruction.name}"
    attends = _ATTENTION_NAME.search(f"{instruction.name} {_own_name(instruction)}")
    category: Category = "attention" if attends else "kernel"
    if _GROUPED_NAME.search(name):
        category = "matmul"
    named, phase = _SPLASH_COSTS.findall(name), _SPLASH_PHASE.search(name)
    if named and phase:
        costs = dict(pair.split("=") for pair in named[-1].strip(",").split(","))
        if phase.group(1) in costs:
            return CallCost("attention", Work(flops=float(costs[phase.group(1)])), traffic)
    config = instruction.backend_config.get("custom_call_config", {})
    estimate: dict[str, Any] = config.get("cost_estimate") or {}
    if estimate:
        flops, functions = (float(estimate.get(key, 0)) for key in ("flops", "transcendentals"))
        moved = int(estimate.get("bytes_accessed", 0)) or traffic
        note = _FULL.format(instruction.name) if "ragged_paged_attention" in name else ""
        return CallCost(category, Work(flops=flops, transcendentals=functions), moved, note)
    if phase:
        flops = _splash(phase.group(1), shapes, instruction.shape)
        note = (
            f"{instruction.name}: a splash attention kernel that does not say its cost is taken "
            "as causal, without a window"
        )
        return CallCost("attention", Work(flops=flops), traffic, note)
    note = (
        f"{instruction.name}: the kernel {kernel_name(instruction)!r} carries no cost estimate; "
        "only its traffic is counted (give pallas_call a cost_estimate)"
    )
    return CallCost(category, Work(), traffic, note)


def kernel_name(instruction: Instruction) -> str:
    """Return the name that a kernel goes by: the end of its op_name."""
    return _own_name(instruction).rpartition("/")[2] or instruction.name


def _own_name(instruction: Instruction) -> str:
    return instruction.op_name.removesuffix("/pallas_call")


def _splash(phase: str, shapes: list[Shape], result: Shape) -> float:
    """Return FLOPs of a causal splash kernel by its products a score.

    fwd: q k, p v. dq: q k, do v, dq. dkv: q k, do v, dk, dv, and dq where it returns that too.
    """
    arrays = [s.dims for s in shapes if s.dtype in ("bf16", "f32", "f16") and len(s.dims) >= 3]
    if len(arrays) < 2:
        return 0.0
    q, k = arrays[0], arrays[1]
    made = [leaf for leaf in leaves(result) if leaf.size >= math.prod(k)]
    products = {"fwd": 2, "dq": 3, "dkv": 4 if len(made) <= 2 else 5}[phase]
    return math.prod(q) * k[-2] * products


def _attention(products: int) -> Callable[[Instruction, list[Shape], int], CallCost]:
    """Return the cost of attention with `products` of width H and V, half of each, a score."""

    def cost(instruction: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
        (B, T, N, H), (_, S, _, V) = shapes[0].dims, shapes[2].dims
        attributes = dict(_ATTRIBUTE.findall(instruction.attributes.get("backend_config", "")))
        pairs = _visible(T, S, attributes.get("causal") == "true", int(attributes["window"]))
        heads = B * N * pairs
        widths = {2: H + V, 5: 3 * H + 2 * V}[products]
        work = Work(flops=2.0 * heads * widths, transcendentals=float(heads))
        return CallCost("attention", work, traffic)

    return cost


def _visible(T: int, S: int, causal: bool, window: int) -> int:
    """Count pairs of query and key that a mask by index lets see each other."""
    if not causal:
        return T * S if not window else T * min(S, 2 * window - 1)
    width = min(window or S, S)
    full = max(T - width, 0)
    return full * width + (T - full) * (T - full + 1) // 2


def _paged_attention(instruction: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    T, N, H = shapes[0].dims
    layers, _, slots = shapes[1].dims[:3]
    context = shapes[3].dims[1] * slots
    flops = 4.0 * T * N * H * context
    cache = shapes[1].bytes + shapes[7].bytes  # codes' scales, or an empty array
    moved = traffic - cache + cache // layers
    return CallCost("attention", Work(flops=flops), moved, _FULL.format(instruction.name))


def _paged_write(_: Instruction, shapes: list[Shape], __: int) -> CallCost:
    return CallCost("copy", Work(), 2 * (shapes[1].bytes + shapes[2].bytes))


def _paged_write_codes(_: Instruction, shapes: list[Shape], __: int) -> CallCost:
    """Keys and values read; a byte of each number and a float32 of each vector written."""
    k, v = shapes[2:4]
    written = (k.size + v.size) + 4 * (k.size + v.size) // k.dims[-1]
    return CallCost("copy", Work(), k.bytes + v.bytes + written)


def _linear(instruction: Instruction, shapes: list[Shape], _: int) -> CallCost:
    read = sum(
        weight.bytes // (weight.dims[0] if len(weight.dims) > 1 else 1) for weight in shapes[1:]
    )
    return _linear_cost(instruction, shapes[0], read)


def _linear_blocks(instruction: Instruction, shapes: list[Shape], _: int) -> CallCost:
    """Return the cost of one layer of each weight: values of all layers, their types, the layer."""
    weights = zip(shapes[1::3], shapes[2::3], strict=True)
    read = sum(values.bytes // types.dims[0] for values, types in weights)
    return _linear_cost(instruction, shapes[0], read)


def _linear_cost(instruction: Instruction, x: Shape, read: int) -> CallCost:
    """Return the cost of the products of x [M, K] with weights of which `read` bytes are read."""
    M, inner = x.dims
    results = instruction.shape.elements or (instruction.shape,)
    flops = sum(2.0 * M * inner * result.dims[-1] for result in results)
    return CallCost("matmul", Work(flops=flops), x.bytes + instruction.shape.bytes + read)


def _grouped(_: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    """Return the cost of multiplying each row with one matrix, or of the sums of outer products.

    Of a stack of layers' matrices [L, E, K, N] one layer is read.
    """
    rows, other = shapes[0], shapes[1]
    if len(other.dims) == 4:
        traffic -= other.bytes - other.bytes // other.dims[0]
    columns = math.prod(other.dims[-2:]) // rows.dims[1] if len(other.dims) > 2 else other.dims[1]
    return CallCost("matmul", Work(flops=2.0 * rows.size * columns), traffic)


def _group_order(_: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    return CallCost("reduce", Work(vector_flops=2.0 * shapes[0].size), traffic)


def _route(_: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    logits = shapes[0].size
    return CallCost(
        "reduce", Work(vector_flops=4.0 * logits, transcendentals=float(logits)), traffic
    )


def _fused_experts(_: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    """Return the cost of three products of each assignment's row, with one layer's matrices."""
    assigned, gate, up, down = shapes[2:6]
    traffic -= sum(stack.bytes - stack.bytes // stack.dims[0] for stack in (gate, up, down))
    inner, width = down.dims[-2:]
    work = Work(
        flops=6.0 * assigned.size * inner * width,
        vector_flops=5.0 * assigned.size * inner,
        transcendentals=float(assigned.size * inner),
    )
    return CallCost("matmul", work, traffic)


def _packed_grouped(instruction: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    """Return the cost of each row by one matrix of codes; one layer of the stacks is read."""
    rows, result = shapes[0], instruction.shape
    traffic -= sum(
        stack.bytes - stack.bytes // stack.dims[0] for stack in shapes[1:4] if stack.size
    )
    return CallCost("matmul", Work(flops=2.0 * rows.size * result.dims[-1]), traffic)


def _packed_experts(instruction: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    """Return the cost of `_fused_experts` with packed matrices."""
    assigned, width = shapes[2], shapes[0].dims[-1]
    _, hidden, *_ = instruction.shape.elements or ()
    inner = hidden.dims[-1]
    traffic -= sum(
        stack.bytes - stack.bytes // stack.dims[0] for stack in shapes[4:13] if stack.size
    )
    work = Work(
        flops=6.0 * assigned.size * inner * width,
        vector_flops=5.0 * assigned.size * inner,
        transcendentals=float(assigned.size * inner),
    )
    return CallCost("matmul", work, traffic)


def _rms_norm(_: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    """Return the cost of a norm, of one array or of the sum of two, by a scale of one layer."""
    *rows, scale = shapes[:-1]
    traffic -= scale.bytes - scale.bytes // scale.dims[0]
    work = Work(
        vector_flops=(3.0 + len(rows)) * rows[0].size, transcendentals=float(rows[0].dims[0])
    )
    return CallCost("reduce", work, traffic)


def _rms_norm_gradient(_: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    """Return the cost of the gradients of x and scale, from x and that of the result."""
    x, scale = shapes[0], shapes[2]
    traffic -= scale.bytes - scale.bytes // scale.dims[0]
    work = Work(vector_flops=10.0 * x.size, transcendentals=float(x.dims[0]))
    return CallCost("reduce", work, traffic)


def _convolution(instruction: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    """Return the cost of each place's window with the kernel, which may be turned around."""
    inner = shapes[1].size / instruction.shape.dims[-1]
    return CallCost("matmul", Work(flops=2.0 * instruction.shape.size * inner), traffic)


def _few_rows(instruction: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    """Return the cost of each row with a matrix of its layer; the largest is that matrix."""
    rows, *others = sorted((*shapes[:2], instruction.shape), key=lambda shape: shape.size)
    return CallCost("matmul", Work(flops=2.0 * rows.dims[1] * others[-1].size), traffic)


def _kernel_gradient(instruction: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    """Return the cost of each place's window with the gradient there."""
    inner = math.prod(instruction.shape.dims[:-1])
    return CallCost("matmul", Work(flops=2.0 * shapes[1].size * inner), traffic)


def _group_norm(_: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    """Return the cost of statistics and result, or of their gradients, from x and that of y."""
    work = Work(vector_flops=9.0 * sum(each.size for each in shapes[:-1]))
    return CallCost("reduce", work, traffic)


def _gated_linear_unit_gradient(_: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    elements = shapes[0].size
    work = Work(vector_flops=9.0 * elements, transcendentals=float(elements))
    return CallCost("elementwise", work, traffic)


def _gated_linear_unit(_: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    elements = shapes[0].size
    work = Work(vector_flops=4.0 * elements, transcendentals=float(elements))
    return CallCost("elementwise", work, traffic)


def _rotary_embedding(_: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    return CallCost("elementwise", Work(vector_flops=3.0 * shapes[0].size), traffic)


def _ragged_delta_rule(_: Instruction, shapes: list[Shape], __: int) -> CallCost:
    """Return the cost of all tokens, with each sequence's state read and written once."""
    states, q, k, v, decay, beta, *rows = shapes
    slots = states.bytes // math.prod(states.dims[:2])  # of one slot
    moved = sum(shape.bytes for shape in (q, k, decay, beta)) + 2 * v.bytes
    moved += 2 * min(rows[2].size, q.dims[0]) * slots
    products = 3.0 if beta.size else 2.0  # the rule finds what it corrects
    work = Work(flops=2.0 * products * v.size * states.dims[-2], transcendentals=float(decay.size))
    return CallCost("attention", work, moved)


def _ragged_convolution(_: Instruction, shapes: list[Shape], __: int) -> CallCost:
    """Return the cost of all tokens, with what each sequence's slots hold read and written once."""
    inputs, x, kernel, *rows = shapes
    slots = inputs.bytes // math.prod(inputs.dims[:2])  # of one slot
    moved = 2 * x.bytes + kernel.bytes + 2 * min(rows[3].size, x.dims[0]) * slots
    work = Work(
        vector_flops=2.0 * x.size * kernel.dims[-1] + 4.0 * x.size, transcendentals=float(x.size)
    )
    return CallCost("elementwise", work, moved)


def _take_rows(instruction: Instruction, shapes: list[Shape], _: int) -> CallCost:
    """Return the cost of reading the rows taken, not the table."""
    table, rows = shapes[0], instruction.shape
    read = table.bytes * rows.size // table.size
    return CallCost("copy", Work(), read + rows.bytes + shapes[1].bytes)


def _argmax(_: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    return CallCost("reduce", Work(vector_flops=float(shapes[0].size)), traffic)


def _sampling(_: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    """Return the cost of filters and draw: a few passes, and an exponential for each logit."""
    logits = shapes[0].size
    return CallCost(
        "reduce", Work(vector_flops=8.0 * logits, transcendentals=float(logits)), traffic
    )


def _orthogonalize(instruction: Instruction, shapes: list[Shape], traffic: int) -> CallCost:
    found = _COEFFICIENTS.search(instruction.attributes.get("backend_config", ""))
    steps = int(found.group(1)) // 3 if found else 0
    n, m = sorted(shapes[0].dims[-2:])
    step = 3.0 * n * n * m + n**3  # of products equal to their transposes one half
    return CallCost("matmul", Work(flops=steps * step * shapes[0].size / (n * m)), traffic)


_GROUPED_KERNELS = frozenset(
    [
        "fornax_grouped_matmul",
        "fornax_grouped_outer",
        "fornax_fused_experts",
        "fornax_packed_grouped_matmul",
        "fornax_packed_experts",
    ]
)
_CPU_KERNELS: dict[str, Callable[[Instruction, list[Shape], int], CallCost]] = {
    "fornax_attention_forward": _attention(2),
    "fornax_attention_backward": _attention(5),
    "fornax_paged_attention": _paged_attention,
    "fornax_paged_write": _paged_write,
    "fornax_paged_write_codes": _paged_write_codes,
    "fornax_grouped_matmul": _grouped,
    "fornax_grouped_outer": _grouped,
    "fornax_fused_experts": _fused_experts,
    "fornax_packed_grouped_matmul": _packed_grouped,
    "fornax_packed_experts": _packed_experts,
    "fornax_group_order": _group_order,
    "fornax_route": _route,
    "fornax_few_rows": _few_rows,
    "fornax_linear": _linear,
    "fornax_linear_blocks": _linear_blocks,
    "fornax_rms_norm": _rms_norm,
    "fornax_add_rms_norm": _rms_norm,
    "fornax_rms_norm_gradient": _rms_norm_gradient,
    "fornax_convolution": _convolution,
    "fornax_convolution_kernel_gradient": _kernel_gradient,
    "fornax_float32_convolution": _convolution,
    "fornax_float32_convolution_kernel_gradient": _kernel_gradient,
    "fornax_group_norm": _group_norm,
    "fornax_group_norm_gradient": _group_norm,
    "fornax_gated_linear_unit": _gated_linear_unit,
    "fornax_gated_linear_unit_gradient": _gated_linear_unit_gradient,
    "fornax_take_rows": _take_rows,
    "fornax_argmax": _argmax,
    "fornax_rotary_embedding": _rotary_embedding,
    "fornax_ragged_convolution": _ragged_convolution,
    "fornax_ragged_delta_rule": _ragged_delta_rule,
    "fornax_filter_logits": _sampling,
    "fornax_sample_tokens": _sampling,
    "fornax_orthogonalize": _orthogonalize,
}


def _product(shapes: list[Shape], result: Shape) -> float:
    """Return FLOPs of a matrix product from the sizes of its operands and result.

    With b M K, b K N and b M N elements the contracted size is sqrt(left x right / out / b).
    """
    left, right = shapes[0], shapes[1]
    out = (result.elements or (result,))[0]
    batch = math.prod(out.dims[:-2]) if len(out.dims) > 2 and len(right.dims) > 2 else 1
    if not out.size:
        return 0.0
    return 2.0 * out.size * round(math.sqrt(left.size * right.size / (out.size * batch)))
