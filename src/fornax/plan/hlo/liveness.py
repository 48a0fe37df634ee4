"""The peak of live memory in a scheduled program, and the buffers that make it.

A pass over live ranges: a value lives from the instruction that makes it to the last that reads it;
loops add the peak of their bodies where they stand. Only HBM counts.
"""

import dataclasses

from fornax.plan.hlo.module import Instruction, Module
from fornax.plan.hlo.shapes import HBM
from fornax.plan.hlo.values import Piece, Values, leaf_at

_ELEMENTWISE_SHARING = frozenset(
    ["fusion", "add", "subtract", "multiply", "divide", "select", "convert", "negate", "all-reduce"]
)
_CALLING = frozenset(["while", "conditional", "call", "call-start", "async-start"])
ALIGNMENT = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Live:
    """The most that one computation holds besides what its caller owns, and where."""

    bytes: int
    path: tuple[Instruction, ...]
    pieces: tuple[Piece, ...]


class Liveness:
    """Live ranges of a module's computations, each looked at once."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._known: dict[str, Live] = {}

    def entry(self) -> tuple[Live, Values]:
        """Return the peak of temporaries and new outputs of the entry, and its values."""
        values = Values(self.module, self.module.entry)
        for instruction in self.module.entry.parameters.values():
            for piece in values.of[instruction.name]:
                piece.find().external = True
        root = values.of[self.module.entry.root.name]
        for index, (number, inside) in self.module.aliases.items():
            out = root[leaf_at(self.module.entry.root.shape, index)]
            parameter = self.module.entry.parameters[number]
            values.join(values.of[parameter.name][leaf_at(parameter.shape, inside)], out)
        return self._peak(values), values

    def inside(self, name: str) -> Live:
        """Return the peak of a called computation, without its parameters and its results."""
        if name not in self._known:
            computation = self.module.computations[name]
            values = Values(self.module, computation)
            for parameter in computation.parameters.values():
                for piece in values.of[parameter.name]:
                    piece.find().external = True
            for piece in values.of[computation.root.name]:
                piece.find().external = True
            self._known[name] = self._peak(values)
        return self._known[name]

    def _peak(self, values: Values) -> Live:
        self._share(values)
        instructions = values.computation.instructions
        change = [0] * (len(instructions) + 2)
        counted = [piece for piece in values.buffers() if not piece.external and size_of(piece)]
        for piece in counted:
            change[piece.born] += size_of(piece)
            change[piece.died + 1] -= size_of(piece)
        best, level = Live(0, (), ()), 0
        at = -1
        for time, instruction in enumerate(instructions):
            level += change[time]
            inner = self._called(instruction)
            if level + inner.bytes > best.bytes:
                best, at = Live(level + inner.bytes, (instruction, *inner.path), inner.pieces), time
        live = tuple(p for p in counted if p.born <= at <= p.died)
        return dataclasses.replace(best, pieces=live + best.pieces)

    def _called(self, instruction: Instruction) -> Live:
        if instruction.opcode not in _CALLING:
            return Live(0, (), ())
        lives = [self.inside(n) for n in instruction.called() if n in self.module.computations]
        return max(lives, key=lambda live: live.bytes, default=Live(0, (), ()))

    def _share(self, values: Values) -> None:
        """Let results take the memory of an operand that is read for the last time."""
        for time, instruction in enumerate(values.computation.instructions):
            if instruction.opcode not in _ELEMENTWISE_SHARING:
                continue
            if "aliasing_operands" in instruction.backend_config:
                continue  # The compiler said what shares; `Values` has read it.
            for made in values.of[instruction.name]:
                piece = made.find()
                if piece.born != time or piece.external:
                    continue
                for operand in values.computation.operands(instruction):
                    for old in values.of[operand.name]:
                        given = old.find()
                        if given is not piece and _fits(given, piece, time):
                            values.join(given, piece)
                            break
                    else:
                        continue
                    break


def _fits(given: Piece, made: Piece, time: int) -> bool:
    return (
        not given.external
        and given.died == time
        and given.born < time
        and given.shape.space == made.shape.space
        and given.shape.bytes == made.shape.bytes
    )


def size_of(piece: Piece) -> int:
    """Return the bytes of HBM that a buffer takes."""
    if piece.shape.space != HBM:
        return 0
    return -(-piece.shape.bytes // ALIGNMENT) * ALIGNMENT
