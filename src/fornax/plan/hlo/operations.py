"""What class an instruction belongs to, in which dtype it multiplies, and the compiler's cycles."""

from fornax.plan.hlo.facts import Category
from fornax.plan.hlo.module import Computation, Instruction, Module
from fornax.plan.hlo.shapes import Shape, leaves

_NAMES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "s8": "int8",
    "u8": "uint8",
    "s4": "int4",
    "u4": "uint4",
    "s32": "int32",
    "u32": "uint32",
    "s64": "int64",
    "u64": "uint64",
    "s16": "int16",
    "u16": "uint16",
    "pred": "bool",
    "c64": "complex64",
    "c128": "complex128",
}
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


def dtype_name(dtype: str) -> str:
    """Return the name that NumPy and JAX use; every float8 is "float8"."""
    return "float8" if dtype.startswith("f8") else _NAMES.get(dtype, dtype)


def category(module: Module, computation: Computation, instruction: Instruction) -> Category:
    """Return the class of an instruction; a fusion's is that of the heaviest thing in it."""
    opcodes = {each.opcode for _, each in inside(module, computation, instruction)}
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


def product_dtype(module: Module, computation: Computation, instruction: Instruction) -> str:
    """Return the dtype of a matrix product's operands, else that of the widest result."""
    best: tuple[int, str] = (-1, "")
    for holder, each in inside(module, computation, instruction):
        if each.opcode in _PRODUCTS:
            widths = [operand.shape for operand in holder.operands(each)[:2]]
            best = max(best, (each.shape.size, _widest(widths)))
    return dtype_name(best[1] or _largest(instruction.shape))


def compiler_cycles(instruction: Instruction) -> float | None:
    """Return the TPU compiler's estimate of a run, if it prints one that is a number at all."""
    window = instruction.backend_config.get("window_config")
    text = window.get("estimated_cycles", "") if isinstance(window, dict) else ""
    cycles = int(text) if str(text).isdigit() else 0
    return float(cycles) if 0 < cycles < 1 << 62 else None


def inside(
    module: Module, computation: Computation, instruction: Instruction
) -> list[tuple[Computation, Instruction]]:
    """Return an instruction, or what a fusion holds, fusions in it included, with its place."""
    if instruction.opcode != "fusion":
        return [(computation, instruction)]
    inner = module.computations[instruction.attributes["calls"].lstrip("%")]
    return [found for each in inner.instructions for found in inside(module, inner, each)]


def _widest(shapes: list[Shape]) -> str:
    order = ["s4", "u4", "s8", "u8", "bf16", "f16", "f32", "f64"]
    return max((s.dtype for s in shapes), key=lambda d: order.index(d) if d in order else 1)


def _largest(shape: Shape) -> str:
    arrays = leaves(shape)
    return max(arrays, key=lambda leaf: leaf.unpadded_bytes).dtype if arrays else ""
