"""Where a program's memory goes: the compiler's buffer assignment by owner, at the peak and over
the program's order.

Arguments, constants and results that live to the end are there throughout; of the rest the
simulation of the heap says when each is taken and given back: the compiler's, or for programs that
lost it that of `simulation.py`.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from fornax.hlo import Buffer, Instruction, Module, Peak, contents_of, source_lines
from fornax.profile.facts import OWNERS, Memory, Moment, Owner, Program
from fornax.profile.schema import HloProto
from fornax.profile.simulation import FREE, SHARE, temporary_slots

_ARGUMENTS: tuple[tuple[Owner, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"\b(opt|optimizer|opt_state|mu|nu|momentum|moments?)\b")),
    ("cache", re.compile(r"\b(cache|kv_cache|kv_pages|pages)\b")),
    ("weights", re.compile(r"\b(params|parameters|weights?|w|kernel|model|embedding)\b")),
)
"""Owners by the name of an argument; the first that matches."""
_LARGEST = 200
_MOMENTS = 400


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """One buffer: who owns it, and how many bytes."""

    id: int
    owner: Owner
    bytes: int
    kind: Literal["argument", "output", "temporary", "constant"]
    maker: Instruction | None
    leaf: tuple[int, ...]


def read_memory(at: int, program: Program, module: Module | None) -> Memory | None:
    """The memory of a program; None where the capture has no buffer assignment of it, or nothing
    that says when its temporary buffers live.

    Args:
        at: the program's position in the profile.
        program: the program.
        module: its HLO, parsed.
    """
    if module is None:
        return None
    proto = HloProto.FromString(program.proto)
    if not proto.buffer_assignment.buffer_allocations:
        return None
    reading = _Assignment(module, proto)
    if not reading.is_complete:
        return None
    course, live, position = reading.course()
    held = sorted([*reading.resident, *live], key=lambda each: each.bytes, reverse=True)
    buffers = held[:_LARGEST]
    moment = course[position]
    peak = Peak(
        bytes=sum(each.bytes for each in held),
        temporaries=sum(each.bytes for each in live),
        instruction=moment.instruction,
        buffers=tuple(map(_buffer, buffers)),
    )
    return Memory(
        program=at,
        peak=peak,
        owners=moment.bytes,
        buffer_owners=tuple(each.owner for each in buffers),
        course=_thinned(course, position),
    )


class _Assignment:
    """One program's buffers, resident and temporary."""

    def __init__(self, module: Module, proto: Any) -> None:
        assignment = proto.buffer_assignment
        names = {
            instruction.id: instruction.name
            for computation in proto.hlo_module.computations
            for instruction in computation.instructions
        }
        known = {
            instruction.name: instruction
            for computation in module.computations.values()
            for instruction in computation.instructions
        }
        self._known = known
        self._names = names
        self._logical = {each.id: each for each in assignment.logical_buffers}
        self._main = [
            each
            for each in assignment.buffer_allocations
            if not each.is_thread_local and each.color == 0
        ]
        self._temporaries = temporary_slots(assignment).keys()
        self._traces = assignment.heap_simulator_traces
        self.resident = list(self._resident(module))

    def _resident(self, module: Module) -> Iterator[_Held]:
        for allocation in self._main:
            if allocation.is_entry_computation_parameter:
                maker = module.entry.parameters.get(allocation.parameter_number)
                name = maker.op_name if maker is not None else ""
                leaf = tuple(allocation.parameter_shape_index)
                owner = argument_owner(name)
                yield _Held(-1, owner, allocation.size, "argument", maker, leaf)
            elif allocation.is_constant:
                yield _Held(-1, "other", allocation.size, "constant", self._first(allocation), ())
            elif allocation.maybe_live_out:
                yield _Held(-1, "other", allocation.size, "output", self._first(allocation), ())

    def _first(self, allocation: Any) -> Instruction | None:
        largest = max(allocation.assigned, key=lambda each: each.size, default=None)
        return self._maker(largest.logical_buffer_id) if largest is not None else None

    def _maker(self, logical: int) -> Instruction | None:
        location = self._logical[logical].defined_at
        name = location.instruction_name or self._names.get(location.instruction_id, "")
        return self._known.get(name)

    def _temporary(self, logical: int) -> _Held:
        buffer = self._logical[logical]
        leaf = tuple(buffer.defined_at.shape_index)
        return _Held(logical, "activations", buffer.size, "temporary", self._maker(logical), leaf)

    def course(self) -> tuple[list[Moment], list[_Held], int]:
        """Memory over the program's order, what is live at its peak, and where that is."""
        base: dict[Owner, int] = dict.fromkeys(OWNERS, 0)
        for each in self.resident:
            base[each.owner] += each.bytes
        live: dict[int, _Held] = {}
        canonical: dict[int, int] = {}
        users: dict[int, int] = {}
        level, best = 0, -1
        fullest: tuple[list[_Held], int] = ([], 0)
        moments: list[Moment] = []
        for event in self._events():
            number = canonical.get(event.buffer_id, event.buffer_id)
            if event.kind == FREE:
                users[number] = users.get(number, 1) - 1
                if users[number] <= 0 and number in live:
                    level -= live.pop(number).bytes
                continue
            if event.kind == SHARE:
                number = canonical.get(event.share_with_canonical_id, event.share_with_canonical_id)
                canonical[event.buffer_id] = number
            users[number] = users.get(number, 0) + 1
            if number not in live:  # one that was given back may be shared again
                live[number] = self._temporary(number)
                level += live[number].bytes
                held: dict[Owner, int] = {**base, "activations": base["activations"] + level}
                name = event.instruction_name
                moments.append(Moment(position=len(moments), instruction=name, bytes=held))
            if level > best:
                best, fullest = level, (list(live.values()), max(len(moments) - 1, 0))
        if not moments:
            moments = [Moment(position=0, instruction="", bytes=base)]
        return moments, *fullest

    @property
    def is_complete(self) -> bool:
        """Whether it says of temporary buffers, if there are any, when they live."""
        return bool(self._traces) or not self._temporaries

    def _events(self) -> Iterator[Any]:
        """Events of the heap that holds temporaries.

        The number of its allocation in a trace is that before allocations were put in order, so
        that buffers are asked for where they lie.
        """
        for trace in self._traces:
            for event in trace.events:
                if event.buffer_id in self._temporaries:
                    yield event


def argument_owner(name: str) -> Owner:
    """Whose an argument of that name is: `state.params['embed']`, `opt_state[0].mu['w']`."""
    return next((owner for owner, pattern in _ARGUMENTS if pattern.search(name)), "other")


def _buffer(held: _Held) -> Buffer:
    maker = held.maker
    if maker is None:
        return Buffer(
            name="",
            bytes=held.bytes,
            unpadded_bytes=held.bytes,
            shape="",
            op_name="",
            source="",
            fornax_source="",
            kind=held.kind,
        )
    content = maker if held.kind == "argument" else contents_of(maker, 0)
    source, ours = source_lines(content)
    shape = maker.shape.at(held.leaf) if held.leaf else maker.shape
    return Buffer(
        name=maker.name + (f"{{{','.join(map(str, held.leaf))}}}" if held.leaf else ""),
        bytes=held.bytes,
        unpadded_bytes=shape.unpadded_bytes,
        shape=str(shape),
        op_name=content.op_name,
        source=source,
        fornax_source=ours,
        kind=held.kind,
    )


def _thinned(course: Sequence[Moment], peak: int) -> tuple[Moment, ...]:
    """At most `_MOMENTS`, of each stretch the fullest, which keeps the peak."""
    if len(course) <= _MOMENTS:
        return tuple(course)
    step = -(-len(course) // _MOMENTS)
    stretches: list[Sequence[Moment]] = [course[n : n + step] for n in range(0, len(course), step)]
    return tuple(max(stretch, key=_total) for stretch in stretches)


def _total(moment: Moment) -> int:
    held: Mapping[Owner, int] = moment.bytes
    return sum(held.values())
