"""Arithmetic of one instruction: products, elementwise work and transcendentals, apart.

A multiplication and an addition are two FLOPs. Products: 2 x outputs x contracted elements; a
convolution counts the positions of its window that fall on the input, so that batch dimensions
that a compiler writes as window dimensions cost nothing extra.
"""

import dataclasses
import functools
import math
import re

import numpy as np

from fornax.plan.hlo.module import Computation, Instruction, Module

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


def work(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """Return the work of one instruction; fusions are descended into, loops and calls are not."""
    opcode = instruction.opcode
    if opcode == "fusion":
        inner = module.computations[instruction.attributes["calls"].lstrip("%")]
        return sum((work(module, inner, each) for each in inner.instructions), Work())
    if opcode == "dot":
        return Work(flops=_dot(computation, instruction))
    if opcode == "convolution":
        return Work(flops=_convolution(computation, instruction))
    kind = _KIND_OF.get(opcode)
    if kind == "elementwise":
        return Work(vector_flops=float(instruction.shape.size))
    if kind == "transcendental":
        return Work(transcendentals=float(instruction.shape.size))
    if kind == "reduction":
        return _applied(module, instruction).times(_applications(computation, instruction))
    return Work()


def _dot(computation: Computation, instruction: Instruction) -> float:
    left = computation.operands(instruction)[0].shape
    contracted = _dims(instruction.attributes.get("lhs_contracting_dims", "{}"))
    return 2.0 * instruction.shape.size * math.prod(left.dims[dim] for dim in contracted)


def _convolution(computation: Computation, instruction: Instruction) -> float:
    labels = instruction.attributes["dim_labels"]
    left_labels, _, rest = labels.partition("_")
    right_labels, _, out_labels = rest.partition("->")
    left, right = (operand.shape.dims for operand in computation.operands(instruction)[:2])
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


def _applied(module: Module, instruction: Instruction) -> Work:
    """Return the work of one application of `to_apply` to scalars."""
    inner = module.computations.get(instruction.attributes.get("to_apply", "").lstrip("%"))
    if inner is None:
        return Work(vector_flops=1.0)
    return sum((work(module, inner, each) for each in inner.instructions), Work())


def _applications(computation: Computation, instruction: Instruction) -> float:
    operands = computation.operands(instruction)
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


def _dims(text: str) -> list[int]:
    return [int(number) for number in text.strip("{}").split(",") if number.strip()]
