"""Bytes of main memory that one instruction reads and writes.

Only what is touched counts: the slice of a stacked weight that a layer takes, the rows that a
gather picks, the region that an update in place writes. Inside a fusion the demand runs backwards
from the results: an elementwise operation needs as large a part of its operands as is needed of it.
Arrays in the chip's vector memory or on the host cost no HBM traffic.
"""

from collections.abc import Sequence

from fornax.hlo.module import Computation, Instruction
from fornax.hlo.shapes import HBM, Shape, leaves

_FREE = (
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id while "
    "conditional call opt-barrier domain add-dependency async-done async-update copy-done "
    "get-dimension-size"
)
FREE = frozenset(_FREE.split())
_UPDATES = frozenset(["dynamic-update-slice", "scatter"])
_VIEWS = frozenset(["bitcast", "reshape"])
_PASSING = _VIEWS | {"copy", "transpose", "convert"}
_TRANSFERS = frozenset(["all-gather", "all-reduce", "reduce-scatter", "all-to-all"])
_SLICES = frozenset(["slice", "dynamic-slice", "gather"])


def hbm_bytes(instruction: Instruction) -> int:
    """Return the bytes read and written by one run of an instruction."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode in FREE:
        return 0
    if opcode == "fusion":
        return round(_fusion(instruction))
    if opcode.endswith("-start"):
        moved, ends = transfer_ends(instruction)
        return moved.bytes * sum(leaves(end)[0].space == HBM for end in ends)
    if opcode == "dynamic-update-slice":
        update = operands[1].shape
        written = update.bytes if instruction.shape.space == HBM else 0
        return written + update.bytes_in(HBM)
    if opcode == "scatter":
        updates, indices = operands[-1].shape, operands[len(operands) // 2].shape
        return 3 * updates.bytes_in(HBM) + indices.bytes_in(HBM)
    out = instruction.shape.bytes_in(HBM)
    if opcode in _SLICES:
        touched = min(instruction.shape.bytes, operands[0].shape.bytes)
        read = touched if operands[0].shape.space == HBM else 0
        return out + read + sum(operand.shape.bytes_in(HBM) for operand in operands[1:])
    return out + sum(operand.shape.bytes_in(HBM) for operand in operands)


def transfer_ends(instruction: Instruction) -> tuple[Shape, tuple[Shape, Shape]]:
    """Return what a copy, a slice or an update of a slice moves, and the arrays it moves between.

    Of a start, what it moves is what its done returns.
    """
    given = instruction.operands[0].shape
    if instruction.opcode.startswith("dynamic-update-slice"):
        update = instruction.operands[1].shape
        return update, (given, update)
    moved = instruction.shape
    if instruction.opcode.endswith("-start") and moved.elements is not None:
        moved = moved.elements[0 if instruction.opcode == "copy-start" else 1]
    return moved, (given, moved)


def _fusion(fusion: Instruction) -> float:
    inner, out = fusion.callee(), fusion.shape
    needed, written = _demand(inner)
    total = 0.0
    for number, operand in enumerate(fusion.operands):
        parameter = inner.parameters.get(number)
        if parameter is None:
            continue
        size = parameter.shape.size
        share = min(needed.get(parameter, 0.0) / size, 1.0) if size else 0.0
        total += share * operand.shape.bytes_in(HBM)
    arrays = leaves(out)
    shares = written if len(written) == len(arrays) else [1.0] * len(arrays)
    return total + sum(a.bytes_in(HBM) * share for a, share in zip(arrays, shares, strict=True))


_Needed = dict[Instruction, float]
"""Elements that are needed of each instruction."""


def _demand(inner: Computation) -> tuple[_Needed, list[float]]:
    """Return elements needed of each instruction, and the share written of each result."""
    needed: _Needed = {}
    written: list[float] = []
    in_place: set[Instruction] = set()
    for result in inner.results:
        target = _through(result, _VIEWS)
        if target.opcode == "parameter" or _is_transfer(target):
            written.append(0.0)
        elif target.opcode in _UPDATES and _base(target).opcode == "parameter":
            in_place.add(target)
            update = _update_of(target).size
            needed[target] = float(update)
            written.append(update / max(target.shape.size, 1))
        else:
            share = 1.0
            if target.opcode == "fusion" and target.shape.elements is None:
                share = _demand(target.callee())[1][0]
            needed[result] = share * result.shape.size
            needed[target] = share * target.shape.size
            written.append(share)
    for instruction in reversed(inner.instructions):
        amount = min(needed.get(instruction, 0.0), instruction.shape.size)
        if amount and instruction.opcode == "fusion":
            _ask_nested(instruction, amount, needed)
        elif amount and instruction.opcode != "tuple" and not _is_transfer(instruction):
            _ask(instruction, amount, instruction in in_place, needed)
    return needed, written


def _ask(user: Instruction, amount: float, in_place: bool, needed: _Needed) -> None:
    """Add to `needed` what an instruction asks of its operands for `amount` of its elements."""
    share = amount / max(user.shape.size, 1)
    for position, operand in enumerate(user.operands):
        size = float(operand.shape.size)
        if user.opcode in _SLICES and position == 0:
            needed[operand] = needed.get(operand, 0.0) + min(amount, size)
            continue
        if user.opcode in _UPDATES:
            ask = size
            if position == 0:
                ask = 0.0 if in_place else max(amount - _update_of(user).size, 0.0)
        elif user.opcode == "broadcast":
            ask = min(size, amount)
        elif user.opcode in ("dynamic-slice", "iota"):
            ask = size
        else:
            ask = size * share
        needed[operand] = max(needed.get(operand, 0.0), ask)


def _ask_nested(user: Instruction, amount: float, needed: _Needed) -> None:
    """Add to `needed` what a fusion inside of a fusion asks of its operands."""
    nested = user.callee()
    wanted, written = _demand(nested)
    made = written[0] * user.shape.size if user.shape.elements is None else amount
    share = min(amount / made, 1.0) if made else 0.0
    for position, operand in enumerate(user.operands):
        parameter = nested.parameters.get(position)
        ask = share * wanted.get(parameter, 0.0) if parameter is not None else 0.0
        needed[operand] = min(needed.get(operand, 0.0) + ask, float(operand.shape.size))


def updated_operands(instruction: Instruction) -> Sequence[tuple[int, int]]:
    """Return (leaf of the result, operand) of arrays that an instruction updates in place."""
    if instruction.opcode in _UPDATES:
        return [(0, 0)] if instruction.shape.elements is None else []
    if instruction.opcode != "fusion":
        return []
    found = []
    for leaf, result in enumerate(instruction.callee().results):
        target = _through(result, _VIEWS)
        if target.opcode in _UPDATES:
            base = _base(target)
            if base.opcode == "parameter" and base.shape.bytes == result.shape.bytes:
                found.append((leaf, base.parameter_number))
    return found


def _is_transfer(instruction: Instruction) -> bool:
    return instruction.opcode in _TRANSFERS or instruction.target.startswith("AsyncCollective")


def _update_of(instruction: Instruction) -> Shape:
    """Return the shape of what an update writes into its first operand."""
    return instruction.operands[1 if instruction.opcode == "dynamic-update-slice" else -1].shape


def _base(update: Instruction) -> Instruction:
    """Return where the array that is updated comes from: in place, a parameter of the fusion.

    A nested fusion that only passes its operand on (another tiling of bfloat16, say) is looked
    through as the operations themselves are.
    """
    found = update.operands[0]
    while True:
        found = _through(found, _PASSING)
        if found.opcode != "fusion":
            return found
        passed = _through(found.callee().root, _PASSING)
        if passed.opcode != "parameter":
            return found
        found = found.operands[passed.parameter_number]


def _through(instruction: Instruction, opcodes: frozenset[str]) -> Instruction:
    while instruction.opcode in opcodes:
        instruction = instruction.operands[0]
    return instruction
