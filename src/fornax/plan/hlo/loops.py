"""How often a `while` runs its body."""

import re

from fornax.plan.hlo.module import Computation, Instruction, Module

_NUMBER = re.compile(r"\s*(-?\d+)\s*$")


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Return how often a while runs: as the compiler notes it, else by its condition, else None."""
    known = loop.backend_config.get("known_trip_count")
    if isinstance(known, dict) and str(known.get("n", "")).isdigit():
        return int(known["n"])
    return _from_condition(module, loop)


def _from_condition(module: Module, loop: Instruction) -> int | None:
    """Read `compare(induction variable, constant)`, its start from outside, its step inside."""
    condition = module.computations.get(loop.attributes.get("condition", "").lstrip("%"))
    body = module.computations.get(loop.attributes.get("body", "").lstrip("%"))
    if condition is None or body is None:
        return None
    bound = _bound(module, condition, condition.root)
    if bound is None:
        return None
    index, limit, inclusive = bound
    if isinstance(limit, Instruction):
        limit = _start(module, loop, int(limit.attributes["index"]))
    start = _start(module, loop, index)
    step = _step(module, body, index)
    if start is None or limit is None or not step or step < 0:
        return None
    return max(-(-(limit - start + inclusive) // step), 0)


def _bound(
    module: Module, computation: Computation, root: Instruction
) -> tuple[int, int | Instruction, int] | None:
    """Return the tuple index compared, the limit, and 1 if the limit itself is still run.

    The limit is a number, or the element of the loop's state that holds it.
    """
    if root.opcode == "fusion":
        inner = module.computations[root.attributes["calls"].lstrip("%")]
        arguments = dict(enumerate(computation.operands(root)))
        compare = inner.root
        sides = [
            arguments[side.parameter_number] if side.opcode == "parameter" else side
            for side in inner.operands(compare)
        ]
    else:
        compare, sides = root, computation.operands(root)
    if compare.opcode != "compare" or len(sides) != 2:
        return None
    direction = compare.attributes.get("direction", "")
    left, right = sides
    if left.opcode == "constant" or (
        right.opcode == "get-tuple-element" and direction in ("GT", "GE")
    ):
        left, right = right, left
        direction = {"GT": "LT", "GE": "LE"}.get(direction, "")
    limit = right if right.opcode == "get-tuple-element" else constant_value(right)
    if direction not in ("LT", "LE") or limit is None or left.opcode != "get-tuple-element":
        return None
    return int(left.attributes["index"]), limit, int(direction == "LE")


def _start(module: Module, loop: Instruction, index: int) -> int | None:
    for computation in module.computations.values():
        if computation.by_name.get(loop.name) is loop:
            operand = computation.operands(loop)[0]
            if operand.opcode == "tuple":
                return constant_value(_origin(computation, computation.operands(operand)[index]))
    return None


def _step(module: Module, body: Computation, index: int) -> int | None:
    if body.root.opcode != "tuple":
        return None
    update = body.operands(body.root)[index]
    operands = body.operands(update)
    if update.opcode == "fusion":
        inner = module.computations[update.attributes["calls"].lstrip("%")]
        update = inner.root
        operands = [
            operands[side.parameter_number] if side.opcode == "parameter" else side
            for side in inner.operands(update)
        ]
    if update.opcode != "add":
        return None
    values = [constant_value(operand) for operand in operands]
    return next((value for value in values if value is not None), None)


def _origin(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in ("copy", "bitcast") and instruction.operands:
        instruction = computation.operands(instruction)[0]
    return instruction


def constant_value(instruction: Instruction) -> int | None:
    """Return the value of an integer scalar constant, else None."""
    found = _NUMBER.match(instruction.arguments) if instruction.opcode == "constant" else None
    return int(found.group(1)) if found else None
