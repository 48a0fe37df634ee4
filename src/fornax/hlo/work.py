"""What one instruction computes: its class, its arithmetic, the dtype it multiplies in.

A multiplication and an addition are two FLOPs. Products: 2 x outputs x contracted elements; a
convolution counts the positions of its window that fall on the input, so that batch dimensions
that a compiler writes as window dimensions cost nothing extra.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

from fornax.hlo.facts import Category
from fornax.hlo.module import Computation, Instruction
from fornax.hlo.shapes import Shape, dtype_name, largest_dtype, numbers

_KINDS = {
    "transcendental": (
        "exponential exponential-minus-one log log-plus-one logistic tanh tan sine cosine sqrt "
        "rsqrt cbrt power atan2 erf acos acosh asin asinh atanh cosh sinh"
    ),
    "elementwise": (
        "add subtract multiply divide maximum minimum negate abs compare select clamp and or xor "
        "not remainder floor ceil sign round-nearest-afz round-nearest-even is-finite shift-left "
        "shift-right-logical shift-right-arithmetic popcnt count-leading-zeros stochastic-convert "
        "complex real imag"
    ),
    "reduction": "reduce reduce-window select-and-scatter scatter map",
}
_KIND_OF = {opcode: kind for kind, opcodes in _KINDS.items() for opcode in opcodes.split()}

_PRODUCTS = frozenset(["dot", "convolution"])
_REDUCES = frozenset(["reduce", "reduce-window", "select-and-scatter", "sort", "topk"])
_GATHERS = frozenset(["gather", "scatter"])
_COPY_NAMES = (
    "copy copy-start transpose reshape slice dynamic-slice dynamic-update-slice concatenate pad "
    "broadcast reverse iota slice-start dynamic-slice-start dynamic-update-slice-start "
    "bitcast-convert bitcast convert"
)
_COPIES = frozenset(_COPY_NAMES.split())
_NEUTRAL = _COPIES | {"parameter", "constant", "tuple", "get-tuple-element", "partition-id"}


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of products, of everything else, and transcendental functions evaluated."""

    flops: float = 0.0
    vector_flops: float = 0.0
    transcendentals: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.vector_flops + other.vector_flops,
            self.transcendentals + other.transcendentals,
        )

    def times(self, count: float) -> "Work":
        return Work(self.flops * count, self.vector_flops * count, self.transcendentals * count)


def inside(instruction: Instruction) -> Iterator[Instruction]:
    """Yield an instruction, or what a fusion holds, fusions in it included."""
    if instruction.opcode != "fusion":
        yield instruction
        return
    for each in instruction.callee().instructions:
        yield from inside(each)


def work(instruction: Instruction) -> Work:
    """Return the work of one instruction; fusions are descended into, loops and calls are not."""
    opcode = instruction.opcode
    if opcode == "fusion":
        return _sum(instruction.callee())
    if opcode == "dot":
        return Work(flops=_dot(instruction))
    if opcode == "convolution":
        return Work(flops=_convolution(instruction))
    kind = _KIND_OF.get(opcode)
    if kind == "elementwise":
        return Work(vector_flops=float(instruction.shape.size))
    if kind == "transcendental":
        return Work(transcendentals=float(instruction.shape.size))
    if kind == "reduction":
        applied = "to_apply" in instruction.attributes
        once = _sum(instruction.callee("to_apply")) if applied else Work(vector_flops=1.0)
        return once.times(_applications(instruction))
    return Work()


def _sum(computation: Computation) -> Work:
    return sum(map(work, computation.instructions), Work())


def _dot(instruction: Instruction) -> float:
    left = instruction.operands[0].shape
    contracted = numbers(instruction.attributes.get("lhs_contracting_dims", ""))
    return 2.0 * instruction.shape.size * math.prod(left.dims[dim] for dim in contracted)


def _convolution(instruction: Instruction) -> float:
    labels = instruction.attributes["dim_labels"]
    left_labels, _, rest = labels.partition("_")
    right_labels, _, out_labels = rest.partition("->")
    left, right = (operand.shape.dims for operand in instruction.operands[:2])
    out = instruction.shape.dims
    window = parse_window(instruction.attributes.get("window", "{}"), len(right) - 2)
    positions = 1
    for dim, (stride, low, _, base, dilation) in enumerate(window):
        label = str(dim)
        positions *= _valid_positions(
            left[left_labels.index(label)],
            right[right_labels.index(label)],
            out[out_labels.index(label)],
            (stride, low, base, dilation),
        )
    groups = int(instruction.attributes.get("batch_group_count", "1"))
    inputs = right[right_labels.index("i")]
    outputs = right[right_labels.index("o")]
    batch = left[left_labels.index("b")] // groups
    return 2.0 * inputs * outputs * batch * positions


def parse_window(text: str, dims: int) -> list[tuple[int, int, int, int, int]]:
    """Return (stride, padding low, padding high, dilation of input, of window) a dimension."""
    fields = dict(re.findall(r"(\w+)=([\w\-]+)", text))
    strides = _by_dim(fields.get("stride"), dims, 1)
    base = _by_dim(fields.get("lhs_dilate"), dims, 1)
    dilation = _by_dim(fields.get("rhs_dilate"), dims, 1)
    pads = re.findall(r"(-?\d+)_(-?\d+)", fields.get("pad", "")) or [("0", "0")] * dims
    return [
        (strides[n], int(pads[n][0]), int(pads[n][1]), base[n], dilation[n]) for n in range(dims)
    ]


@functools.lru_cache(maxsize=4096)
def _valid_positions(
    size: int, kernel: int, outputs: int, window: tuple[int, int, int, int]
) -> int:
    """Count pairs of output position and window element that fall on an element of the input."""
    stride, low, base, dilation = window
    offsets = np.arange(kernel) * dilation - low
    if base == 1:
        first = np.maximum(-(offsets // stride), 0)
        last = np.minimum((size - 1 - offsets) // stride, outputs - 1)
        return int(np.maximum(last - first + 1, 0).sum())
    total, positions = 0, np.arange(outputs) * stride
    for offset in offsets:
        places = positions + offset
        total += int(((places >= 0) & (places <= (size - 1) * base) & (places % base == 0)).sum())
    return total


def _applications(instruction: Instruction) -> float:
    operands = instruction.operands
    out = instruction.shape
    if instruction.opcode == "reduce":
        arrays = out.elements or (out,)
        return float(max(operands[0].shape.size - arrays[0].size, 0))
    if instruction.opcode == "scatter":
        return float(operands[-1].shape.size)
    if instruction.opcode == "map":
        return float(out.size)
    sizes = re.search(r"size=([\dx]+)", instruction.attributes.get("window", ""))
    elements = math.prod(map(int, sizes.group(1).split("x"))) if sizes else 1
    if instruction.opcode == "select-and-scatter":
        return float(operands[1].shape.size * elements)
    arrays = out.elements or (out,)
    return float(arrays[0].size * max(elements - 1, 0))


def _by_dim(text: str | None, dims: int, default: int) -> list[int]:
    return [int(part) for part in text.split("x")] if text else [default] * dims


def category(instruction: Instruction) -> Category:
    """Return the class of an instruction; a fusion's is that of the heaviest thing in it."""
    opcodes = {each.opcode for each in inside(instruction)}
    if opcodes & _PRODUCTS:
        return "matmul"
    if opcodes & _GATHERS:
        return "gather"
    if opcodes & _REDUCES:
        return "reduce"
    if "custom-call" in opcodes:
        return "other"
    if opcodes <= _NEUTRAL | {"fusion"}:
        return "copy"
    return "elementwise"


def product_dtype(instruction: Instruction) -> str:
    """Return the dtype of a matrix product's operands, else that of the widest result."""
    best: tuple[int, str] = (-1, "")
    for each in inside(instruction):
        if each.opcode in _PRODUCTS:
            widths = [operand.shape for operand in each.operands[:2]]
            best = max(best, (each.shape.size, _widest(widths)))
    return dtype_name(best[1]) if best[1] else largest_dtype([instruction.shape])


def compiler_cycles(instruction: Instruction) -> float | None:
    """Return the TPU compiler's estimate of a run, if it prints one that is a number at all."""
    window = instruction.backend_config.get("window_config")
    text = window.get("estimated_cycles", "") if isinstance(window, dict) else ""
    cycles = int(text) if str(text).isdigit() else 0
    return float(cycles) if 0 < cycles < 1 << 62 else None


def _widest(shapes: list[Shape]) -> str:
    order = ["s4", "u4", "s8", "u8", "bf16", "f16", "f32", "f64"]
    return max((s.dtype for s in shapes), key=lambda d: order.index(d) if d in order else 1)
