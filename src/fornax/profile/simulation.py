"""The order in which a program's temporary buffers live, for programs that carry none.

A program that jax's compilation cache loaded has its buffers and where the compiler placed them,
but not the simulation of its heap (`HloProto.buffer_assignment.heap_simulator_traces`), from which
memory over time is read. It follows from the schedule and from live ranges, by the rules of XLA's
`HloDataflowAnalysis` and `HloLiveRange`: a buffer lives from the instruction that defines it to the
last that reads it, through tuples and loops; what a computation returns lives to its end.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError

from fornax.hlo import Computation, Instruction, Module, Shape
from fornax.profile.schema import HloProto

__all__ = ["ALLOC", "FREE", "SHARE", "temporary_slots", "with_simulation"]

ALLOC, FREE, SHARE = 0, 1, 2
"""Kinds of events of a heap."""
_RUNNING = frozenset(["while", "conditional", "call", "call-start", "async-start"])
"""Opcodes whose computations have buffers of their own, which live while they run."""
_NAMING = frozenset(["tuple", "get-tuple-element"])
"""They name memory and read none."""

_Index = tuple[int, ...]
Slot = tuple[int, int, int]
"""Number of an allocation, offset and bytes in it: who lives there at one time is one buffer."""


def with_simulation(proto: bytes, module: Module) -> bytes:
    """The program with a simulation of its heap, if it has none and one can be derived.

    Args:
        proto: serialized `xla.HloProto`.
        module: its module, parsed.

    Returns:
        A serialized `xla.HloProto`: `proto` itself, or the same with one trace.
    """
    try:
        message = HloProto.FromString(proto)
    except DecodeError:
        return proto
    assignment = message.buffer_assignment
    slots = temporary_slots(assignment)
    if assignment.heap_simulator_traces or not slots or not module.is_scheduled:
        return proto
    names = {
        instruction.id: (computation.name, instruction.name)
        for computation in message.hlo_module.computations
        for instruction in computation.instructions
    }
    defined = {}
    for each in assignment.logical_buffers:
        place = names.get(each.defined_at.instruction_id)
        if place is None or place[0] not in module.computations:
            return proto
        maker = module.computations[place[0]].by_name.get(place[1])
        if maker is None:
            return proto
        index = tuple(each.defined_at.shape_index)
        if maker.shape.at(index).elements is None:  # else a tuple's table of addresses
            defined[maker, index] = each.id
    ranges = _Flow(module, defined).ranges()
    trace = assignment.heap_simulator_traces.add(whole_module=True)
    trace.buffer_allocation_index = max(slots.values(), key=lambda slot: slot[1] + slot[2])[0]
    makers = {number: maker for (maker, _), number in defined.items()}
    for kind, number, shared in _events(slots, ranges):
        maker = makers[number]
        trace.events.add(
            kind=kind,
            buffer_id=number,
            computation_name=maker.computation.name,
            instruction_name=maker.name,
            share_with_canonical_id=shared,
        )
    return message.SerializeToString()


def temporary_slots(assignment: Any) -> dict[int, Slot]:
    """Where each temporary buffer of the main memory lies."""
    return {
        each.logical_buffer_id: (allocation.index, each.offset, each.size)
        for allocation in assignment.buffer_allocations
        if not (
            allocation.is_thread_local
            or allocation.color
            or allocation.is_entry_computation_parameter
            or allocation.is_constant
            or allocation.maybe_live_out
        )
        for each in allocation.assigned
    }


def _events(
    slots: dict[int, Slot], ranges: dict[int, tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Kind, buffer and whom it shares with, in the order of time: at one instruction what it makes
    comes before what it was the last to read."""
    begins, ends = defaultdict(list), defaultdict(list)
    for number in sorted(slots.keys() & ranges.keys()):
        begin, end = ranges[number]
        begins[begin].append(number)
        ends[end].append(number)
    living: dict[Slot, list[int]] = defaultdict(list)
    holder: dict[Slot, int] = {}
    for time in sorted(begins.keys() | ends.keys()):
        for number in begins[time]:
            slot = slots[number]
            if living[slot]:
                yield SHARE, number, holder[slot]
            else:
                holder[slot] = number
                yield ALLOC, number, 0
            living[slot].append(number)
        for number in ends[time]:
            living[slots[number]].remove(number)
            yield FREE, number, 0


class _Flow:
    """Which buffer each array of each instruction lies in, and when it is read last."""

    def __init__(self, module: Module, defined: dict[tuple[Instruction, _Index], int]) -> None:
        """`defined`: an instruction, a position in its shape -> the buffer that begins there."""
        self._module = module
        self._defined = defined
        self._known: dict[tuple[Instruction, _Index], int | None] = {}
        self._order: list[Instruction] = []
        self._time: dict[Instruction, int] = {}
        self._begins: dict[Instruction, int] = {}
        """When the computations of one that runs some begin, which hold from there on what it took;
        what a conditional took lives as long as it runs."""
        self._ends: dict[Computation, int] = {}
        self._flatten(module.entry)

    def ranges(self) -> dict[int, tuple[int, int]]:
        """Buffer -> when it begins, and the last time that it is read at."""
        begin = {
            number: self._time[maker]
            for (maker, _), number in self._defined.items()
            if maker in self._time
        }
        end = dict(begin)
        for instruction in self._order:
            if instruction.opcode in _NAMING:
                continue
            time = self._begins.get(instruction, self._time[instruction])
            for operand in instruction.operands:
                self._extend(end, operand, time)
            if instruction.opcode == "while":  # the body takes what its condition was given
                condition = instruction.callee("condition")
                for parameter in condition.parameters.values():
                    self._extend(end, parameter, self._ends[condition])
        for computation, time in self._ends.items():
            self._extend(end, computation.root, time)
        return {number: (begin[number], end[number]) for number in begin}

    def _extend(self, end: dict[int, int], read: Instruction, time: int) -> None:
        for index in _indices(read.shape):
            number = self._buffer(read, index)
            if number in end:
                end[number] = max(end[number], time)

    def _flatten(self, computation: Computation) -> None:
        """Put instructions in one order, those of loops before their loop."""
        for instruction in computation.instructions:
            if instruction.opcode in _RUNNING:
                if instruction.opcode != "conditional":
                    self._begins[instruction] = len(self._order)
                for called in instruction.called():
                    if called not in self._ends:
                        self._flatten(called)
            self._time[instruction] = len(self._order)
            self._order.append(instruction)
        self._ends[computation] = len(self._order)

    def _buffer(self, instruction: Instruction, index: _Index) -> int | None:
        """The buffer of one array of an instruction; None where that is not known."""
        place: tuple[Instruction, _Index] | None = (instruction, index)
        passed = []
        while place is not None and place not in self._defined and place not in self._known:
            passed.append(place)
            place = _source(*place)
            if place in passed:
                place = None
        found = None
        if place is not None:
            found = self._defined.get(place, self._known.get(place))
        self._known.update(dict.fromkeys(passed, found))
        return found


def _source(instruction: Instruction, index: _Index) -> tuple[Instruction, _Index] | None:
    """Whose array an instruction hands on at a position, where it makes none itself."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "parameter":
        caller = instruction.computation.caller
        if caller is None or caller.opcode not in _RUNNING:
            return None
        if caller.opcode == "conditional":
            branch = caller.called().index(instruction.computation)
            return caller.operands[1 + branch], index
        return caller.operands[instruction.parameter_number], index
    if opcode == "tuple":
        return operands[index[0]], index[1:]
    if opcode == "get-tuple-element":
        return operands[0], (instruction.tuple_index, *index)
    if opcode == "call":
        return instruction.called()[0].root, index
    if not operands:
        return None
    given = operands[0]
    if opcode.endswith("-done") and given.shape != instruction.shape:
        # A start holds (operands, results, …), that of a copy (result, operand, …).
        return given, (0 if given.opcode == "copy-start" else 1, *index)
    if index in _indices(given.shape):
        return given, index
    return None


def _indices(shape: Shape) -> list[_Index]:
    """Positions of the arrays of a shape."""
    if shape.elements is None:
        return [()]
    return [(at, *rest) for at, part in enumerate(shape.elements) for rest in _indices(part)]
