"""Which memory each value of a computation lies in: what is new, and what shares another's place.

Tuples, bitcasts, loops and updates in place make no new memory. `Assignment` gives each array
(leaf) of each instruction an allocation; allocations that must be one are joined.
"""

import dataclasses
from collections.abc import Sequence

from fornax.hlo.module import Computation, Index, Instruction, parse_aliases
from fornax.hlo.shapes import HBM, Shape, leaves
from fornax.hlo.traffic import updated_operands

_ALIGNMENT = 512
_SAME = frozenset(
    ["bitcast", "opt-barrier", "while", "add-dependency", "async-update", "domain", "reshape"]
)
_NAMING = frozenset(["tuple", "get-tuple-element", "bitcast"])
"""They name memory and read none."""


@dataclasses.dataclass(slots=True, eq=False)
class Allocation:
    """Memory for one array; `maker` and `leaf` say which, `shape` how it lies."""

    maker: Instruction
    leaf: int
    shape: Shape
    start: int
    """Number of the instruction that makes it, in the computation's order."""
    end: int
    """Of the last that reads it."""
    external: bool = False
    """It belongs to the caller (or is an argument): not counted here."""
    joined: "Allocation | None" = None

    def find(self) -> "Allocation":
        """What it was joined to, at the end of all joins."""
        found = self
        while found.joined is not None:
            found = found.joined
        if found is not self:
            self.joined = found
        return found

    @property
    def bytes(self) -> int:
        """Bytes of HBM, aligned."""
        return -(-self.shape.bytes_in(HBM) // _ALIGNMENT) * _ALIGNMENT


class Assignment:
    """The allocations of one computation, joined where XLA must let values share memory."""

    def __init__(self, computation: Computation) -> None:
        self.computation = computation
        self.of: dict[Instruction, list[Allocation]] = {}
        for time, instruction in enumerate(computation.instructions):
            self.of[instruction] = self._place(instruction, time)
        self._set_ends()
        for parameter in computation.parameters.values():
            self.give_away(parameter)

    def give_away(self, instruction: Instruction) -> None:
        """Count what an instruction makes as its computation's caller's."""
        for allocation in self.of[instruction]:
            allocation.find().external = True

    def join(self, kept: Allocation, other: Allocation) -> None:
        """Let two allocations be one."""
        kept, other = kept.find(), other.find()
        if kept is other:
            return
        if other.external and not kept.external:
            kept, other = other, kept
        other.joined = kept
        kept.start, kept.end = min(kept.start, other.start), max(kept.end, other.end)

    def all(self) -> list[Allocation]:
        """Return all allocations, joined ones once."""
        return list(dict.fromkeys(each.find() for made in self.of.values() for each in made))

    def _place(self, instruction: Instruction, time: int) -> list[Allocation]:
        operands = [self.of[operand] for operand in instruction.operands]
        opcode = instruction.opcode
        if opcode == "tuple":
            return [each for operand in operands for each in operand]
        if opcode == "get-tuple-element":
            start, stop = _range(instruction.operands[0].shape, instruction.tuple_index)
            return operands[0][start:stop]
        if opcode in _SAME and operands and len(operands[0]) == len(leaves(instruction.shape)):
            return operands[0]
        if opcode.endswith("-done"):
            return _finish(instruction, operands[0], time)
        made = _new(instruction, time)
        if opcode.endswith("-start") or opcode in ("send", "recv"):
            _begin(instruction, operands, made)
            return made
        for leaf, operand, part in _shared(instruction):
            made[leaf] = operands[operand][part]
        return made

    def _set_ends(self) -> None:
        for time, instruction in enumerate(self.computation.instructions):
            if instruction.opcode in _NAMING:
                continue
            for operand in instruction.operands:
                for allocation in self.of[operand]:
                    allocation.end = max(allocation.end, time)
        for allocation in self.of[self.computation.root]:
            allocation.end = len(self.computation.instructions)


def _new(instruction: Instruction, time: int) -> list[Allocation]:
    return [
        Allocation(instruction, number, leaf, time, time)
        for number, leaf in enumerate(leaves(instruction.shape))
    ]


def _begin(
    instruction: Instruction, operands: list[list[Allocation]], made: list[Allocation]
) -> None:
    """Place `((operands), results, context)`: the operands stay where they are."""
    given = [each for operand in operands for each in operand]
    if instruction.shape.elements is None:
        return
    if instruction.opcode in ("copy-start", "slice-start"):
        made[1 if instruction.opcode == "copy-start" else 0] = given[0]
        return
    shapes = [leaf for operand in instruction.operands for leaf in leaves(operand.shape)]
    for number, (allocation, shape) in enumerate(zip(given, shapes, strict=True)):
        if number < len(made) and made[number].shape.dims == shape.dims:
            made[number] = allocation


def _finish(instruction: Instruction, given: list[Allocation], time: int) -> list[Allocation]:
    """Take the results out of what a start made: the leaves of the same shape, last first."""
    start = instruction.operands[0]
    wanted = leaves(instruction.shape)
    if start.opcode == "copy-start":
        return given[:1]
    if start.opcode in ("async-start", "async-update") or len(given) > len(wanted):
        offset = _results_at(start.shape, given, wanted)
        if offset is not None:
            return given[offset : offset + len(wanted)]
    return given if len(given) == len(wanted) else _new(instruction, time)


def _results_at(shape: Shape, given: list[Allocation], wanted: Sequence[Shape]) -> int | None:
    """Return at which leaf of a start's shape its results begin."""
    if len(shape.elements or ()) >= 2:
        start, stop = _range(shape, 1)
        if stop - start == len(wanted):
            return start
    for offset in range(len(given) - len(wanted), -1, -1):
        part = given[offset : offset + len(wanted)]
        if all(p.shape.dims == w.dims for p, w in zip(part, wanted, strict=True)):
            return offset
    return None


def _shared(instruction: Instruction) -> list[tuple[int, int, int]]:
    """Return (leaf of the result, operand, leaf in it) that share memory by construction."""
    aliases = parse_aliases(instruction.attributes.get("output_to_operand_aliasing", ""))
    shared = [
        (
            leaf_at(instruction.shape, out),
            operand,
            leaf_at(instruction.operands[operand].shape, inside),
        )
        for out, operand, inside in aliases
    ]
    shared += _assigned(instruction)
    return shared + [(leaf, operand, 0) for leaf, operand in updated_operands(instruction)]


def _assigned(instruction: Instruction) -> list[tuple[int, int, int]]:
    """Read which operands the TPU compiler gave the same memory as results.

    `"aliasing_operands":{"lists":[{"indices":["0","2"]}]}`: numbers from the count of operands on
    are results.
    """
    found = instruction.backend_config.get("aliasing_operands", {})
    if not isinstance(found, dict):
        return []
    shared, count, results = [], len(instruction.operands), len(leaves(instruction.shape))
    for each in found.get("lists", []):
        numbers = [int(number) for number in each.get("indices", [])]
        given = next((number for number in numbers if number < count), None)
        if given is not None:
            shared += [(n - count, given, 0) for n in numbers if count <= n < count + results]
    return shared


def leaf_at(shape: Shape, index: Index) -> int:
    """Return the number of the leaf at an index into nested tuples."""
    number = 0
    for position in index:
        number += _range(shape, position)[0]
        shape = shape.at((position,))
    return number


def _range(shape: Shape, index: int) -> tuple[int, int]:
    """Return where the leaves of element `index` lie among the leaves of a tuple."""
    elements = shape.elements or ()
    start = sum(len(leaves(element)) for element in elements[:index])
    return start, start + len(leaves(elements[index]))
