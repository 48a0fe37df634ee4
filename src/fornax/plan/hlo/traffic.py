"""Bytes of main memory that one instruction reads and writes.

Only what is touched counts: the slice of a stacked weight that a layer takes, the rows that a
gather picks, the region that an update in place writes. Inside a fusion the demand runs backwards
from the results: an elementwise operation needs as large a part of its operands as is needed of it.
Arrays in the chip's vector memory or on the host cost no HBM traffic.
"""

from fornax.plan.hlo.module import Computation, Instruction, Module
from fornax.plan.hlo.shapes import HBM, Shape, leaves

_FREE = (
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id while "
    "conditional call opt-barrier domain add-dependency async-done async-update copy-done "
    "get-dimension-size"
)
FREE = frozenset(_FREE.split())
_UPDATES = frozenset(["dynamic-update-slice", "scatter"])
_PASSING = frozenset(["bitcast", "reshape", "copy", "transpose", "convert"])
_TRANSFERS = frozenset(["all-gather", "all-reduce", "reduce-scatter", "all-to-all"])
_SLICES = frozenset(["slice", "dynamic-slice", "gather"])


def hbm_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Return the bytes read and written by one run of an instruction."""
    opcode = instruction.opcode
    if opcode in FREE:
        return 0
    operands = computation.operands(instruction)
    if opcode == "fusion":
        inner = _called(module, instruction)
        return round(_fusion(module, inner, operands, instruction.shape))
    if opcode.endswith("-start"):
        return _moved_ahead(instruction, [operand.shape for operand in operands])
    out = instruction.shape.bytes_in(HBM)
    if opcode in ("dynamic-slice", "slice", "gather"):
        touched = min(instruction.shape.bytes, operands[0].shape.bytes)
        read = touched if operands[0].shape.space == HBM else 0
        return out + read + sum(operand.shape.bytes_in(HBM) for operand in operands[1:])
    if opcode == "dynamic-update-slice":
        update = operands[1].shape
        written = update.bytes if instruction.shape.space == HBM else 0
        return written + update.bytes_in(HBM)
    if opcode == "scatter":
        updates, indices = operands[-1].shape, operands[len(operands) // 2].shape
        return 3 * updates.bytes_in(HBM) + indices.bytes_in(HBM)
    return out + sum(operand.shape.bytes_in(HBM) for operand in operands)


def _moved_ahead(instruction: Instruction, operands: list[Shape]) -> int:
    """Return the traffic of a copy, a slice or an update of a slice that runs on its own."""
    elements = instruction.shape.elements or (instruction.shape, instruction.shape)
    if instruction.opcode.startswith("dynamic-update-slice"):
        moved, ends = operands[1], (operands[0], operands[1])
    elif instruction.opcode == "copy-start":
        moved, ends = elements[0], (elements[0], operands[0])
    else:
        moved, ends = elements[1], (elements[1], operands[0])
    return moved.bytes * sum(leaves(end)[0].space == HBM for end in ends)


def _fusion(module: Module, inner: Computation, operands: list[Instruction], out: Shape) -> float:
    needed, written = demand(module, inner)
    total = 0.0
    for number, operand in enumerate(operands):
        parameter = inner.parameters.get(number)
        if parameter is None:
            continue
        size = parameter.shape.size
        share = min(needed.get(parameter.name, 0.0) / size, 1.0) if size else 0.0
        total += share * operand.shape.bytes_in(HBM)
    arrays = leaves(out)
    shares = written if len(written) == len(arrays) else [1.0] * len(arrays)
    return total + sum(a.bytes_in(HBM) * share for a, share in zip(arrays, shares, strict=True))


def demand(module: Module, inner: Computation) -> tuple[dict[str, float], list[float]]:
    """Return elements needed of each instruction, and the share written of each result."""
    results = inner.operands(inner.root) if inner.root.opcode == "tuple" else [inner.root]
    needed: dict[str, float] = {}
    written: list[float] = []
    in_place: set[str] = set()
    for result in results:
        target = _through(inner, result, frozenset(["bitcast", "reshape"]))
        if target.opcode == "parameter" or _is_transfer(target):
            written.append(0.0)
        elif target.opcode in _UPDATES and _base(module, inner, target).opcode == "parameter":
            in_place.add(target.name)
            update = _update_of(inner, target).size
            needed[target.name] = float(update)
            written.append(update / max(target.shape.size, 1))
        else:
            share = 1.0
            if target.opcode == "fusion" and target.shape.elements is None:
                share = demand(module, _called(module, target))[1][0]
            needed[result.name] = share * result.shape.size
            needed[target.name] = share * target.shape.size
            written.append(share)
    for instruction in reversed(inner.instructions):
        amount = min(needed.get(instruction.name, 0.0), instruction.shape.size)
        if amount and instruction.opcode == "fusion":
            _ask_nested(module, inner, instruction, amount, needed)
        elif amount and instruction.opcode != "tuple" and not _is_transfer(instruction):
            _ask(inner, instruction, amount, instruction.name in in_place, needed)
    return needed, written


def _ask(
    inner: Computation,
    user: Instruction,
    amount: float,
    in_place: bool,
    needed: dict[str, float],
) -> None:
    """Add to `needed` what an instruction asks of its operands for `amount` of its elements."""
    share = amount / max(user.shape.size, 1)
    for position, operand in enumerate(inner.operands(user)):
        size = float(operand.shape.size)
        if user.opcode in _SLICES and position == 0:
            needed[operand.name] = needed.get(operand.name, 0.0) + min(amount, size)
            continue
        if user.opcode in _UPDATES:
            if in_place:
                ask = 0.0 if position == 0 else size
            else:
                update = _update_of(inner, user).size
                ask = max(amount - update, 0.0) if position == 0 else size
        elif user.opcode in ("broadcast", "dynamic-slice", "iota"):
            ask = min(size, amount) if user.opcode == "broadcast" else size
        else:
            ask = size * share
        needed[operand.name] = max(needed.get(operand.name, 0.0), ask)


def _ask_nested(
    module: Module,
    inner: Computation,
    user: Instruction,
    amount: float,
    needed: dict[str, float],
) -> None:
    """Add to `needed` what a fusion inside of a fusion asks of its operands."""
    nested = _called(module, user)
    wanted, written = demand(module, nested)
    made = written[0] * user.shape.size if user.shape.elements is None else amount
    share = min(amount / made, 1.0) if made else 0.0
    for position, operand in enumerate(inner.operands(user)):
        parameter = nested.parameters.get(position)
        ask = share * wanted.get(parameter.name, 0.0) if parameter is not None else 0.0
        needed[operand.name] = min(needed.get(operand.name, 0.0) + ask, float(operand.shape.size))


def _is_transfer(instruction: Instruction) -> bool:
    return instruction.opcode in _TRANSFERS or instruction.target.startswith("AsyncCollective")


def _called(module: Module, fusion: Instruction) -> Computation:
    return module.computations[fusion.attributes["calls"].lstrip("%")]


def updated_operands(module: Module, instruction: Instruction) -> list[tuple[int, int]]:
    """Return (leaf of the result, operand) of arrays that an instruction updates in place."""
    if instruction.opcode in _UPDATES:
        return [(0, 0)] if instruction.shape.elements is None else []
    if instruction.opcode != "fusion":
        return []
    inner = _called(module, instruction)
    results = inner.operands(inner.root) if inner.root.opcode == "tuple" else [inner.root]
    found = []
    for leaf, result in enumerate(results):
        target = _through(inner, result, frozenset(["bitcast", "reshape"]))
        if target.opcode in _UPDATES:
            base = _base(module, inner, target)
            if base.opcode == "parameter" and base.shape.bytes == result.shape.bytes:
                found.append((leaf, base.parameter_number))
    return found


def _update_of(inner: Computation, instruction: Instruction) -> Shape:
    """Return the shape of what an update writes into its first operand."""
    operands = inner.operands(instruction)
    return operands[1 if instruction.opcode == "dynamic-update-slice" else -1].shape


def _base(module: Module, inner: Computation, update: Instruction) -> Instruction:
    """Return where the array that is updated comes from: in place, a parameter of the fusion.

    A nested fusion that only passes its operand on (another tiling of bfloat16, say) is looked
    through as the operations themselves are.
    """
    found = inner.operands(update)[0]
    while True:
        found = _through(inner, found, _PASSING)
        if found.opcode != "fusion":
            return found
        nested = _called(module, found)
        passed = _through(nested, nested.root, _PASSING)
        if passed.opcode != "parameter":
            return found
        found = inner.operands(found)[passed.parameter_number]


def _through(inner: Computation, instruction: Instruction, opcodes: frozenset[str]) -> Instruction:
    while instruction.opcode in opcodes:
        instruction = inner.operands(instruction)[0]
    return instruction
