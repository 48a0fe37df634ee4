"""The peak of live memory in a scheduled program: where it is, and the buffers that make it.

A pass over live ranges: a value lives from the instruction that makes it to the last that reads it;
loops add the peak of their bodies where they stand. Only HBM counts. Buffers are named in a user's
terms, by what they hold and its source line.
"""

import dataclasses
from typing import Literal

from fornax.hlo.buffers import Allocation, Assignment, leaf_at
from fornax.hlo.facts import Buffer, Peak
from fornax.hlo.module import Instruction, Module
from fornax.hlo.provenance import contents_of, source_lines
from fornax.hlo.shapes import HBM, leaves

_ELEMENTWISE_SHARING = frozenset(
    ["fusion", "add", "subtract", "multiply", "divide", "select", "convert", "negate", "all-reduce"]
)
_CALLING = frozenset(["while", "conditional", "call", "call-start", "async-start"])


@dataclasses.dataclass(frozen=True, slots=True)
class _Live:
    """The most that one computation holds besides what its caller owns, and where."""

    bytes: int = 0
    path: tuple[Instruction, ...] = ()
    allocations: tuple[Allocation, ...] = ()


def find_peak(module: Module, most: int = 40) -> Peak:
    """Return the peak of HBM and the `most` largest buffers that are live there."""
    entry = module.entry
    values = Assignment(entry)
    for index, (number, inside) in module.aliases.items():
        parameter = entry.parameters[number]
        out = values.of[entry.root][leaf_at(entry.root.shape, index)]
        values.join(values.of[parameter][leaf_at(parameter.shape, inside)], out)
    live = _peak(values, {})
    arguments = [
        Allocation(parameter, number, leaf, 0, 0)
        for parameter in entry.parameters.values()
        for number, leaf in enumerate(leaves(parameter.shape))
        if leaf.space == HBM
    ]
    outputs = {allocation.find() for allocation in values.of[entry.root]}
    found = [_buffer(argument, "argument") for argument in arguments]
    for allocation in sorted(live.allocations, key=lambda each: each.bytes, reverse=True)[:most]:
        found.append(_buffer(allocation, "output" if allocation.find() in outputs else "temporary"))
    found.sort(key=lambda buffer: buffer.bytes, reverse=True)
    return Peak(
        bytes=sum(argument.bytes for argument in arguments) + live.bytes,
        temporaries=live.bytes,
        instruction=" > ".join(step.name for step in live.path),
        buffers=tuple(found[:most]),
    )


def _peak(values: Assignment, known: dict[str, _Live], *, looped: bool = False) -> _Live:
    """The peak of one computation, which a loop runs if `looped`; `known` keeps those of the
    computations that it calls."""
    _share(values)
    instructions = values.computation.instructions
    change = [0] * (len(instructions) + 2)
    counted = [each for each in values.all() if not each.external and each.bytes]
    for each in counted:
        change[each.start] += each.bytes
        change[each.end + 1] -= each.bytes
    for start, stop, size in _free_carries(values) if looped else ():
        change[start] -= size
        change[stop] += size
    best, level, at = _Live(), 0, -1
    for time, instruction in enumerate(instructions):
        level += change[time]
        inner = _called(instruction, known)
        if level + inner.bytes > best.bytes:
            at = time
            best = _Live(level + inner.bytes, (instruction, *inner.path), inner.allocations)
    live = tuple(each for each in counted if each.start <= at <= each.end)
    return dataclasses.replace(best, allocations=live + best.allocations)


def _free_carries(values: Assignment) -> list[tuple[int, int, int]]:
    """When a loop's body needs no memory of a value that it carries: from the last reading of what
    came in, a copy say, until what goes out is made: (first instruction, first not, bytes)."""
    computation = values.computation
    parameters = list(computation.parameters.values())
    if len(parameters) != 1 or parameters[0].shape != computation.root.shape:
        return []
    pairs = zip(values.of[parameters[0]], values.of[computation.root], strict=True)
    found = [(carried.find(), made.find()) for carried, made in pairs]
    return [
        (carried.end + 1, made.start, carried.bytes)
        for carried, made in found
        if carried is not made and carried.external and carried.end < made.start
    ]


def _called(instruction: Instruction, known: dict[str, _Live]) -> _Live:
    """The largest peak of what an instruction calls, without parameters and results."""
    if instruction.opcode not in _CALLING:
        return _Live()
    for computation in instruction.called():
        if computation.name not in known:
            values = Assignment(computation)
            values.give_away(computation.root)
            known[computation.name] = _peak(values, known, looped=instruction.opcode == "while")
    lives = [known[computation.name] for computation in instruction.called()]
    return max(lives, key=lambda live: live.bytes, default=_Live())


def _share(values: Assignment) -> None:
    """Let results take the memory of an operand that is read for the last time."""
    for time, instruction in enumerate(values.computation.instructions):
        if instruction.opcode not in _ELEMENTWISE_SHARING:
            continue
        if "aliasing_operands" in instruction.backend_config:
            continue  # The compiler said what shares; `Assignment` has read it.
        for made in map(Allocation.find, values.of[instruction]):
            if made.start != time or made.external:
                continue
            candidates = (each.find() for o in instruction.operands for each in values.of[o])
            given = next((each for each in candidates if _fits(each, made, time)), None)
            if given is not None:
                values.join(given, made)


def _fits(given: Allocation, made: Allocation, time: int) -> bool:
    return (
        given is not made
        and not given.external
        and given.end == time
        and given.start < time
        and given.shape.space == made.shape.space
        and given.shape.bytes == made.shape.bytes
    )


def _buffer(allocation: Allocation, kind: Literal["argument", "output", "temporary"]) -> Buffer:
    maker = allocation.maker
    holder = maker if kind == "argument" else contents_of(maker, allocation.leaf)
    asking, ours = source_lines(holder)
    parts = len(leaves(maker.shape)) > 1
    return Buffer(
        name=maker.name + (f"{{{allocation.leaf}}}" if parts else ""),
        bytes=allocation.bytes,
        unpadded_bytes=allocation.shape.unpadded_bytes,
        shape=str(allocation.shape),
        op_name=holder.op_name,
        source=asking,
        fornax_source=ours,
        kind=kind,
    )
