"""The instructions of a program and what each takes, for the picture around an operation."""

from typing import Any

from fornax.hlo import Computation, HloParseError, Module, parse

__all__ = ["graph"]

_INSIDE = frozenset(["fusion", "reduce", "reduce-window", "scatter", "sort", "map", "all-reduce"])
"""Callers whose computations are one operation to the device."""
_LIMIT = 20_000
"""Instructions of one program that a page carries: the first that are reached."""


def graph(text: str) -> dict[str, Any] | None:
    """Instructions that a device runs by themselves, as columns; None if the text is not HLO.

    `operands` holds for each the positions of what it takes, `callees` the names of the
    computations that a loop or call runs.
    """
    try:
        module = parse(text)
    except HloParseError:
        return None
    instructions = [i for c in _running(module) for i in c.instructions][:_LIMIT]
    place = {id(instruction): at for at, instruction in enumerate(instructions)}
    computations = list(dict.fromkeys(i.computation.name for i in instructions))
    number = {name: at for at, name in enumerate(computations)}
    return {
        "computations": computations,
        "name": [i.name for i in instructions],
        "opcode": [i.opcode for i in instructions],
        "shape": [i.shape_text for i in instructions],
        "computation": [number[i.computation.name] for i in instructions],
        "operands": [[place[id(o)] for o in i.operands if id(o) in place] for i in instructions],
    }


def _running(module: Module) -> list[Computation]:
    """The entry and what it runs as sequences of operations, fusions' insides left out."""
    found: dict[str, Computation] = {}
    waiting = [module.entry]
    while waiting:
        computation = waiting.pop()
        if computation.name in found:
            continue
        found[computation.name] = computation
        for instruction in computation.instructions:
            if instruction.opcode not in _INSIDE:
                waiting += instruction.called()
    return list(found.values())
