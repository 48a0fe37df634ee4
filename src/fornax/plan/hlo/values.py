"""Which memory each value of a computation lies in: what is new, and what shares another's place.

Tuples, bitcasts, loops and updates in place make no new memory. `Values` gives each array (leaf) of
each instruction a buffer; buffers that must be one are joined.
"""

import dataclasses
import re

from fornax.plan.hlo.module import Computation, Instruction, Module
from fornax.plan.hlo.shapes import Shape, leaves
from fornax.plan.hlo.traffic import updated_operands

_ALIASED = re.compile(r"\{([\d, ]*)\}:\s*\((\d+), \{([\d, ]*)\}")
_SAME = frozenset(
    ["bitcast", "opt-barrier", "while", "add-dependency", "async-update", "domain", "reshape"]
)
_NAMING = frozenset(["tuple", "get-tuple-element", "bitcast"])
"""They name memory and read none."""


@dataclasses.dataclass(slots=True, eq=False)
class Piece:
    """Memory for one array; `maker` and `leaf` say which, `shape` how it lies."""

    maker: Instruction
    leaf: int
    shape: Shape
    born: int
    died: int
    external: bool = False
    """It belongs to the caller (or is an argument): not counted here."""
    joined: "Piece | None" = None

    def find(self) -> "Piece":
        piece = self
        while piece.joined is not None:
            piece = piece.joined
        if piece is not self:
            self.joined = piece
        return piece


class Values:
    """The buffers of one computation, joined where XLA must let values share memory."""

    def __init__(self, module: Module, computation: Computation) -> None:
        self.module = module
        self.computation = computation
        self.of: dict[str, list[Piece]] = {}
        for time, instruction in enumerate(computation.instructions):
            self.of[instruction.name] = self._place(instruction, time)
        self._set_deaths()

    def join(self, kept: Piece, other: Piece) -> None:
        """Let two buffers be one."""
        kept, other = kept.find(), other.find()
        if kept is other:
            return
        if other.external and not kept.external:
            kept, other = other, kept
        other.joined = kept
        kept.born, kept.died = min(kept.born, other.born), max(kept.died, other.died)

    def buffers(self) -> list[Piece]:
        """Return all buffers, joined ones once."""
        found = (piece.find() for pieces in self.of.values() for piece in pieces)
        return list({id(piece): piece for piece in found}.values())

    def _place(self, instruction: Instruction, time: int) -> list[Piece]:
        operands = [self.of[name] for name in instruction.operands]
        opcode = instruction.opcode
        if opcode == "tuple":
            return [piece for operand in operands for piece in operand]
        if opcode == "get-tuple-element":
            start, stop = _range(self._shape_of(instruction), int(instruction.attributes["index"]))
            return operands[0][start:stop]
        if opcode in _SAME and operands and len(operands[0]) == len(leaves(instruction.shape)):
            return operands[0]
        if opcode.endswith("-done") or opcode in ("recv-done", "send-done"):
            return self._finish(instruction, operands, time)
        if opcode.endswith("-start") or opcode in ("send", "recv"):
            return self._begin(instruction, operands, time)
        made = self._new(instruction, instruction.shape, time)
        for leaf, operand, part in self._shared(instruction):
            made[leaf] = operands[operand][part]
        return made

    def _begin(
        self, instruction: Instruction, operands: list[list[Piece]], time: int
    ) -> list[Piece]:
        """Place `((operands), results, context)`: the operands stay where they are."""
        made = self._new(instruction, instruction.shape, time)
        given = [piece for operand in operands for piece in operand]
        if instruction.shape.elements is None:
            return made
        if instruction.opcode == "copy-start" or instruction.opcode == "slice-start":
            source = 1 if instruction.opcode == "copy-start" else 0
            made[source] = given[0]
            return made
        shapes = [leaf for each in self._operands(instruction) for leaf in leaves(each.shape)]
        for number, (piece, shape) in enumerate(zip(given, shapes, strict=True)):
            if number < len(made) and made[number].shape.dims == shape.dims:
                made[number] = piece
        return made

    def _finish(
        self, instruction: Instruction, operands: list[list[Piece]], time: int
    ) -> list[Piece]:
        """Take the results out of what a start made: the leaves of the same shape, last first."""
        start = self.computation.operands(instruction)[0]
        given = operands[0]
        wanted = leaves(instruction.shape)
        if start.opcode == "copy-start":
            return given[:1]
        if start.opcode in ("async-start", "async-update") or len(given) > len(wanted):
            offset = _results_at(start.shape, given, wanted)
            if offset is not None:
                return given[offset : offset + len(wanted)]
        if len(given) == len(wanted):
            return given
        return self._new(instruction, instruction.shape, time)

    def _new(self, instruction: Instruction, shape: Shape, time: int) -> list[Piece]:
        return [
            Piece(instruction, number, leaf, time, time)
            for number, leaf in enumerate(leaves(shape))
        ]

    def _shared(self, instruction: Instruction) -> list[tuple[int, int, int]]:
        """Return (leaf of the result, operand, leaf in it) that share memory by construction."""
        operands = self._operands(instruction)
        text = instruction.attributes.get("output_to_operand_aliasing")
        shared = [] if text is None else _aliased(text, instruction, operands)
        shared += _assigned(instruction, operands)
        for leaf, operand in updated_operands(self.module, instruction):
            shared.append((leaf, operand, 0))
        return shared

    def _operands(self, instruction: Instruction) -> list[Instruction]:
        return self.computation.operands(instruction)

    def _shape_of(self, instruction: Instruction) -> Shape:
        return self._operands(instruction)[0].shape

    def _set_deaths(self) -> None:
        for time, instruction in enumerate(self.computation.instructions):
            if instruction.opcode in _NAMING:
                continue
            for name in instruction.operands:
                for piece in self.of[name]:
                    piece.died = max(piece.died, time)
        end = len(self.computation.instructions)
        for piece in self.of[self.computation.root.name]:
            piece.died = end


def _range(shape: Shape, index: int) -> tuple[int, int]:
    """Return where the leaves of element `index` lie among the leaves of a tuple."""
    elements = shape.elements or ()
    start = sum(len(leaves(element)) for element in elements[:index])
    return start, start + len(leaves(elements[index]))


def _results_at(shape: Shape, given: list[Piece], wanted: tuple[Shape, ...]) -> int | None:
    """Return at which leaf of a start's shape its results begin."""
    elements = shape.elements or ()
    if len(elements) >= 2:
        start, stop = _range(shape, 1)
        if stop - start == len(wanted):
            return start
    for offset in range(len(given) - len(wanted), -1, -1):
        part = given[offset : offset + len(wanted)]
        if all(p.shape.dims == w.dims for p, w in zip(part, wanted, strict=True)):
            return offset
    return None


def _aliased(
    text: str, instruction: Instruction, operands: list[Instruction]
) -> list[tuple[int, int, int]]:
    shared = []
    for out, operand, inside in _ALIASED.findall(text):
        leaf = leaf_at(instruction.shape, _index(out))
        part = leaf_at(operands[int(operand)].shape, _index(inside))
        shared.append((leaf, int(operand), part))
    return shared


def _assigned(instruction: Instruction, operands: list[Instruction]) -> list[tuple[int, int, int]]:
    """Read which operands the TPU compiler gave the same memory as results.

    `"aliasing_operands":{"lists":[{"indices":["0","2"]}]}`: numbers from the count of operands on
    are results.
    """
    found = instruction.backend_config.get("aliasing_operands", {})
    if not isinstance(found, dict):
        return []
    shared, results = [], len(leaves(instruction.shape))
    for each in found.get("lists", []):
        numbers = [int(number) for number in each.get("indices", [])]
        given = [number for number in numbers if number < len(operands)]
        for number in numbers:
            leaf = number - len(operands)
            if given and 0 <= leaf < results:
                shared.append((leaf, given[0], 0))
    return shared


def leaf_at(shape: Shape, index: tuple[int, ...]) -> int:
    """Return the number of the leaf at an index into nested tuples."""
    number = 0
    for position in index:
        number += _range(shape, position)[0]
        shape = shape.at((position,))
    return number


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())
