"""What a buffer holds: the instruction that computes its values, if its maker only makes room.

Compilers allocate a stack of saved activations before the loop that fills it, and copy arrays
between layouts: neither says what is in them. So from room that is only made we go on to the loop
that updates it, and from there, as from a copy, back to what was computed.
"""

import dataclasses
import re

from fornax.plan.hlo.module import Computation, Instruction, Module
from fornax.plan.hlo.shapes import leaves
from fornax.plan.hlo.traffic import updated_operands

_PASSING_NAMES = (
    "bitcast convert copy reshape transpose copy-done copy-start broadcast reduce-precision pad "
    "slice-done slice-start dynamic-slice-done opt-barrier concatenate"
)
_PASSING = frozenset(_PASSING_NAMES.split())
_ROOM = frozenset(["AllocateBuffer"])
_STEPS = 24
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="[^"]*"')
_READERS = 5
_TURNS = 3
"""How often a value is followed from one turn of a loop into the turn before."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """An instruction, and the fusion around it with its own place, if there is one."""

    computation: Computation
    instruction: Instruction
    around: "_Place | None" = None


def holder_of(
    module: Module, computation: Computation, maker: Instruction, leaf: int
) -> Instruction:
    """Return the instruction that best says what the `leaf`-th array made by `maker` is."""
    place = _Place(computation, maker)
    if maker.target in _ROOM or maker.opcode in ("broadcast", "constant"):
        place = _filler(module, computation, maker, leaf, _STEPS) or place
    told = _origin(module, place, leaf)
    return told if told.op_name or told.frame else maker


def telling(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    around: tuple[Computation, Instruction] | None = None,
) -> Instruction:
    """Return an instruction, or where it has no name in the source what it works on.

    `around` is the fusion that holds it and the computation that this one stands in.
    """
    if instruction.op_name or not instruction.operands:
        return instruction
    if instruction.opcode == "fusion":
        told = _origin(module, _Place(computation, instruction), 0)
    else:
        place = _Place(computation, instruction, _Place(*around) if around else None)
        written = 1 if instruction.opcode.startswith("dynamic-update-slice") else 0
        told = _origin(module, _operand(place, written), 0)
    if told.frame or told.source[0]:
        return told
    # An argument has a name and no line: the line is that of who reads it.
    reader = _reader(*(around or (computation, instruction)))
    return reader or (told if told.op_name else instruction)


def _reader(computation: Computation, instruction: Instruction) -> Instruction | None:
    """Return the nearest instruction with a name that reads what one makes.

    What is sent comes back by the receive of the same name: a collective across slices.
    """
    rendezvous = _RENDEZVOUS.search(instruction.rest)
    front = [instruction]
    if rendezvous:
        front = [e for e in computation.instructions if rendezvous.group() in e.rest]
    for _ in range(_READERS):
        front = [user for each in front for user in computation.users.get(each.name, [])]
        found = next((user for user in front if user.op_name), None)
        if found is not None:
            return found
    return None


def _filler(
    module: Module, computation: Computation, room: Instruction, leaf: int, steps: int
) -> _Place | None:
    """Return what is first written into an array, by following it to an update in place."""
    if steps == 0:
        return None
    for user in computation.users.get(room.name, []):
        positions = [n for n, name in enumerate(user.operands) if name == room.name]
        for leaf_out, operand in updated_operands(module, user):
            if operand in positions:
                return _written(module, _Place(computation, user), leaf_out)
        found = None
        if user.opcode == "while":
            found = _inside_loop(module, user, leaf, steps)
        elif user.opcode == "tuple":
            before = user.operands[: positions[0]]
            offset = sum(len(leaves(computation.by_name[name].shape)) for name in before)
            found = _filler(module, computation, user, offset + leaf, steps - 1)
        elif user.opcode in ("bitcast", "copy", "copy-start", "copy-done"):
            found = _filler(module, computation, user, 0, steps - 1)
        if found is not None:
            return found
    return None


def _inside_loop(module: Module, loop: Instruction, leaf: int, steps: int) -> _Place | None:
    body = module.computations[loop.attributes["body"].lstrip("%")]
    state = body.parameters[0]
    for part in body.users.get(state.name, []):
        if part.opcode == "get-tuple-element":
            elements = state.shape.elements or ()
            index = int(part.attributes["index"])
            before = sum(len(leaves(element)) for element in elements[:index])
            if before <= leaf < before + len(leaves(elements[index])):
                found = _filler(module, body, part, leaf - before, steps - 1)
                return found or _next_state(body, part)
    return None


def _next_state(body: Computation, part: Instruction) -> _Place | None:
    """Return what a loop's body makes of an element of its state."""
    state = body.parameters[0]
    if body.root.opcode != "tuple" or part.operands[0] != state.name:
        return None
    if str(body.root.shape) != str(state.shape):  # A branch, not a loop's body.
        return None
    following = body.operands(body.root)[int(part.attributes["index"])]
    return None if following is part else _Place(body, following)


def _written(module: Module, place: _Place, leaf: int) -> _Place:
    """Return the value that an update in place, or a fusion that ends in one, writes."""
    if place.instruction.opcode == "fusion":
        place = _inner(module, place, leaf)
        while place.instruction.opcode in ("bitcast", "reshape"):
            place = _operand(place, 0)
    if place.instruction.opcode in ("dynamic-update-slice", "scatter"):
        return _operand(place, 1 if place.instruction.opcode == "dynamic-update-slice" else -1)
    return place


def _origin(module: Module, place: _Place, leaf: int) -> Instruction:
    """Go back through copies and conversions to what was computed."""
    turns = 0
    for _ in range(_STEPS):
        instruction = place.instruction
        if instruction.opcode == "fusion":
            inner = _inner(module, place, leaf)
            told = inner.instruction
            if told.opcode not in _PASSING and told.opcode != "parameter" and told.op_name:
                return told
            place, leaf = inner, 0
        elif instruction.opcode == "parameter" and place.around is not None:
            place = _operand(place.around, instruction.parameter_number)
        elif instruction.opcode == "get-tuple-element":
            source = place.computation.operands(instruction)[0]
            if source.opcode == "parameter" and turns < _TURNS:
                following = _next_state(place.computation, instruction)
                if following is not None:
                    place, turns = following, turns + 1
                    continue
            if source.opcode not in ("fusion", "custom-call"):
                return instruction
            leaf = int(instruction.attributes["index"])
            place = dataclasses.replace(place, instruction=source)
        elif instruction.operands and (
            instruction.opcode in _PASSING or not (instruction.op_name or instruction.frame)
        ):
            place = _operand(place, 0)
        else:
            return instruction
    return place.instruction


def _inner(module: Module, place: _Place, leaf: int) -> _Place:
    """Return the result inside a fusion that is its `leaf`-th."""
    inside = module.computations[place.instruction.attributes["calls"].lstrip("%")]
    root = inside.root
    if root.opcode == "tuple":
        root = inside.operands(root)[min(leaf, len(root.operands) - 1)]
    return _Place(inside, root, place)


def _operand(place: _Place, number: int) -> _Place:
    operand = place.computation.operands(place.instruction)[number]
    return dataclasses.replace(place, instruction=operand)
