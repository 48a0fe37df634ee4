"""Walk a compiled program in its order and say what it does: the facts that a cost model needs."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from fornax.plan.hlo.collectives import collective_kind, host_transfer
from fornax.plan.hlo.custom_calls import FREE_TARGETS
from fornax.plan.hlo.facts import (
    Collective,
    Done,
    Item,
    Loop,
    Operation,
    ProgramFacts,
    Run,
    Start,
)
from fornax.plan.hlo.loops import trip_count
from fornax.plan.hlo.module import Computation, Instruction, Module
from fornax.plan.hlo.peak import find_peak
from fornax.plan.hlo.records import Recorder, Visit, deep
from fornax.plan.hlo.traffic import FREE


def analyse(module: Module, axes: Mapping[str, int]) -> ProgramFacts:
    """Return the facts of a program.

    Args:
        module: optimized and scheduled HLO, as parsed.
        axes: the mesh's axes and sizes in order; groups count positions in `mesh.devices.flat`.
    """
    reader = _Reader(module, dict(axes))
    schedule = reader.walk(module.entry, Visit())
    reader.note_unfinished()
    begun = tuple(_begun(schedule))
    operations = tuple(what for what in begun if isinstance(what, Operation))
    collectives = tuple(what for what in begun if isinstance(what, Collective))
    if not module.is_scheduled:
        reader.recorder.note(
            "the program is not scheduled: what overlaps, and its peak, are guesses"
        )
    return ProgramFacts(
        operations=operations,
        collectives=collectives,
        schedule=schedule,
        flops=sum(each.flops * each.count for each in operations),
        vector_flops=sum(each.vector_flops * each.count for each in operations),
        transcendentals=sum(each.transcendentals * each.count for each in operations),
        bytes=sum(each.bytes * each.count for each in operations),
        peak=find_peak(module),
        notes=tuple(reader.recorder.notes),
    )


class _Reader:
    def __init__(self, module: Module, axes: dict[str, int]) -> None:
        self.module = module
        self.recorder = Recorder(module, axes)
        self._pending: dict[tuple[str, str], list[Operation | Collective]] = {}

    def walk(self, computation: Computation, visit: Visit) -> tuple[Item, ...]:
        """Return the schedule of a computation and of all that it calls."""
        return tuple(
            item
            for instruction in computation.instructions
            for item in self._items(computation, instruction, visit)
        )

    def note_unfinished(self) -> None:
        """Name what was started and never waited for."""
        for what in (each for waiting in self._pending.values() for each in waiting):
            self.recorder.note(f"{what.name}: starts and is never waited for")

    def _items(
        self, computation: Computation, instruction: Instruction, visit: Visit
    ) -> Iterator[Item]:
        opcode = instruction.opcode
        if opcode == "while":
            yield self._loop(instruction, visit)
        elif opcode == "conditional":
            yield self._branch(instruction, visit)
        elif opcode == "call":
            body = self.walk(self._called(instruction, "to_apply"), visit)
            yield Loop(instruction.name, "call", 1, True, body)
        elif opcode.endswith("-done"):
            yield from self._done(computation, instruction)
        elif opcode.endswith("-start") or opcode == "send":
            yield from self._start(computation, instruction, visit)
        elif opcode == "fusion":
            yield from self._fusion(computation, instruction, visit)
        elif collective_kind(instruction):
            yield Run(self.recorder.collective(computation, instruction, visit))
        elif opcode == "custom-call" and instruction.target in FREE_TARGETS:
            return
        elif opcode not in FREE and not opcode.endswith("-update") and opcode != "recv":
            host = host_transfer(computation, instruction)
            if host:
                yield Run(self.recorder.host(computation, instruction, visit, host))
            else:
                yield Run(self.recorder.operation(computation, instruction, visit))

    def _loop(self, instruction: Instruction, visit: Visit) -> Loop:
        count = trip_count(self.module, instruction)
        if count is None:
            self.recorder.note(
                f"{instruction.name}: how often this loop runs is not known; counted once, so that "
                "all that is inside is a lower bound"
            )
        inner = Visit(
            visit.count * (1 if count is None else count), visit.exact and count is not None
        )
        body = self.walk(self._called(instruction, "body"), inner)
        return Loop(
            instruction.name, "while", 1 if count is None else count, count is not None, body
        )

    def _branch(self, instruction: Instruction, visit: Visit) -> Loop:
        """Take the branch with the most work."""
        names = [name for name in instruction.called() if name in self.module.computations]
        bodies = [self.walk(self.module.computations[name], visit) for name in names]
        chosen = max(range(len(bodies)), key=lambda number: _weight(bodies[number]))
        if any(_weight(body) for body in bodies):
            self.recorder.note(
                f"{instruction.name}: of {len(bodies)} branches the one with the most work is "
                f"counted, {names[chosen]}"
            )
        return Loop(instruction.name, "conditional", 1, True, bodies[chosen])

    def _start(
        self, computation: Computation, instruction: Instruction, visit: Visit
    ) -> Iterator[Item]:
        what: Operation | Collective
        inside = self._inside(instruction)
        host = host_transfer(computation, instruction)
        if collective_kind(instruction):
            what = self.recorder.collective(computation, instruction, visit, asynchronous=True)
        elif host:
            what = self.recorder.host(computation, instruction, visit, host, asynchronous=True)
        elif inside is not None:
            found = [each for each in deep(self.module, inside) if collective_kind(each[1])]
            if found:
                what = self.recorder.collective(
                    *found[0], visit, asynchronous=True, around=(computation, instruction)
                )
            else:
                what = self._async_work(inside, instruction, visit)
        else:
            what = dataclasses.replace(
                self.recorder.operation(computation, instruction, visit), asynchronous=True
            )
        self._pending.setdefault((computation.name, _key(instruction)), []).append(what)
        yield Start(what)

    def _done(self, computation: Computation, instruction: Instruction) -> Iterator[Item]:
        if instruction.opcode == "send-done":
            return
        start = computation.operands(instruction)[0]
        while start.opcode.endswith("-update"):
            start = computation.operands(start)[0]
        waiting = self._pending.get((computation.name, _key(start)))
        if waiting:
            yield Done(waiting.pop(0))
        elif instruction.opcode != "recv-done":
            self.recorder.note(f"{instruction.name}: what it waits for was not found")

    def _async_work(self, inside: Computation, instruction: Instruction, visit: Visit) -> Operation:
        """Return the operations of an async computation as one."""
        items = list(_begun(self.walk(inside, visit)))
        parts = [what for what in items if isinstance(what, Operation)]
        if not parts:
            return self.recorder.operation(inside, inside.root, visit)
        heaviest = max(parts, key=lambda part: (part.flops, part.bytes))
        return dataclasses.replace(
            heaviest,
            name=instruction.name,
            flops=sum(part.flops for part in parts),
            vector_flops=sum(part.vector_flops for part in parts),
            transcendentals=sum(part.transcendentals for part in parts),
            bytes=sum(part.bytes for part in parts),
            asynchronous=True,
        )

    def _fusion(
        self, computation: Computation, instruction: Instruction, visit: Visit
    ) -> Iterator[Item]:
        """Yield what a fusion does: its own work, and the collective in it if it holds one.

        TPU writes an asynchronous collective as a fusion that starts it, fusions that compute
        while it goes on and hold it too, and a fusion that waits for it.
        """
        members = list(deep(self.module, self._called(instruction, "calls")))
        found = [each for each in members if collective_kind(each[1])]
        overlapped = False
        for holder, each in members:
            if each.target not in ("AsyncCollectiveStart", "AsyncCollectiveDone"):
                continue
            overlapped = True
            starts = each.target == "AsyncCollectiveStart"
            for operand in filter(collective_kind, holder.operands(each)):
                channel = operand.attributes.get("channel_id", "")
                waiting = self._pending.setdefault((computation.name, f"channel {channel}"), [])
                if starts:
                    what = self.recorder.collective(
                        holder, operand, visit, asynchronous=True, around=(computation, instruction)
                    )
                    waiting.append(what)
                    yield Start(what)
                elif waiting:
                    yield Done(waiting.pop(0))
                else:
                    self.recorder.note(f"{instruction.name}: what it waits for was not found")
        config = any("async_collective_fusion_config" in c.backend_config for _, c in found)
        if found and not overlapped and not config:
            for holder, each in found:
                yield Run(
                    self.recorder.collective(holder, each, visit, around=(computation, instruction))
                )
        rest = self.recorder.operation(computation, instruction, visit)
        if not found or rest.flops or (config and not overlapped):
            yield Run(rest)

    def _called(self, instruction: Instruction, key: str) -> Computation:
        return self.module.computations[instruction.attributes[key].lstrip("%")]

    def _inside(self, instruction: Instruction) -> Computation | None:
        attributes = instruction.attributes
        key = "to_apply" if instruction.opcode == "call-start" else "calls"
        return self.module.computations.get(attributes.get(key, "").lstrip("%"))


def _key(start: Instruction) -> str:
    """Return what a start and its done have in common: the name, or a rendezvous by name."""
    rendezvous = start.attributes.get("frontend_attributes", "")
    _, found, rest = rendezvous.partition('_xla_host_transfer_rendezvous="')
    return "rendezvous " + rest.partition('"')[0] if found else start.name


def _begun(schedule: Iterable[Item]) -> Iterator[Operation | Collective]:
    for item in schedule:
        if isinstance(item, Loop):
            yield from _begun(item.body)
        elif not isinstance(item, Done):
            yield item.what


def _weight(schedule: Iterable[Item]) -> float:
    """Order branches: by FLOPs, bytes and what collectives move, each an equal part."""
    total = 0.0
    for what in _begun(schedule):
        total += what.bytes * what.count
        if isinstance(what, Operation):
            total += (what.flops + what.vector_flops) * what.count
    return total
