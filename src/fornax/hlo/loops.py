"""How often a `while` runs its body."""

import re

from fornax.hlo.module import Computation, Instruction

_NUMBER = re.compile(r"\s*(-?\d+)\s*$")


def trip_count(loop: Instruction) -> int | None:
    """Return how often a while runs: as the compiler notes it, else by its condition, else None."""
    known = loop.backend_config.get("known_trip_count")
    if isinstance(known, dict) and str(known.get("n", "")).isdigit():
        return int(known["n"])
    return _from_condition(loop)


def _from_condition(loop: Instruction) -> int | None:
    """Read `compare(induction variable, constant)`, its start from outside, its step inside."""
    bound = _bound(loop.callee("condition").root)
    if bound is None:
        return None
    index, limit, inclusive = bound
    end = _constant(limit)
    if limit.opcode == "get-tuple-element":
        end = _start(loop, limit.tuple_index)
    start, step = _start(loop, index), _step(loop.callee("body"), index)
    if start is None or end is None or not step or step < 0:
        return None
    return max(-(-(end - start + inclusive) // step), 0)


def _bound(root: Instruction) -> tuple[int, Instruction, int] | None:
    """Return the tuple index compared, the limit, and 1 if the limit itself is still run.

    The limit is a constant, or the element of the loop's state that holds it.
    """
    compare, sides = _unfused(root)
    if compare.opcode != "compare" or len(sides) != 2:
        return None
    direction = compare.attributes.get("direction", "")
    left, right = sides
    if left.opcode == "constant" or (
        right.opcode == "get-tuple-element" and direction in ("GT", "GE")
    ):
        left, right = right, left
        direction = {"GT": "LT", "GE": "LE"}.get(direction, "")
    if direction not in ("LT", "LE") or left.opcode != "get-tuple-element":
        return None
    return left.tuple_index, right, int(direction == "LE")


def _start(loop: Instruction, index: int) -> int | None:
    state = loop.operands[0]
    if state.opcode != "tuple":
        return None
    return _constant(_uncopied(state.operands[index]))


def _step(body: Computation, index: int) -> int | None:
    if body.root.opcode != "tuple":
        return None
    update, sides = _unfused(_uncopied(body.root.operands[index]))
    if update.opcode != "add":
        return None
    return next((value for value in map(_constant, sides) if value is not None), None)


def _uncopied(instruction: Instruction) -> Instruction:
    """Return what an instruction copies, or itself."""
    while instruction.opcode in ("copy", "bitcast"):
        instruction = instruction.operands[0]
    return instruction


def _unfused(instruction: Instruction) -> tuple[Instruction, list[Instruction]]:
    """Return an instruction, or the root of the fusion that it is, and what that takes."""
    if instruction.opcode != "fusion":
        return instruction, list(instruction.operands)
    root = instruction.callee().root
    return root, [
        instruction.operands[side.parameter_number] if side.opcode == "parameter" else side
        for side in root.operands
    ]


def _constant(instruction: Instruction) -> int | None:
    """Return the value of an integer scalar constant, else None."""
    found = _NUMBER.match(instruction.arguments) if instruction.opcode == "constant" else None
    return int(found.group(1)) if found else None
