"""Walk a compiled program in its order and say what it does: the facts that a cost model needs."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from fornax.plan.hlo.collectives import collective_kind, host_transfer, transfer
from fornax.plan.hlo.custom_calls import FREE_TARGETS, custom_call_cost
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
from fornax.plan.hlo.flops import Work, work
from fornax.plan.hlo.loops import trip_count
from fornax.plan.hlo.module import Computation, Instruction, Module
from fornax.plan.hlo.operations import category, compiler_cycles, product_dtype
from fornax.plan.hlo.peak import find_peak
from fornax.plan.hlo.sources import sources
from fornax.plan.hlo.traffic import FREE, hbm_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Visit:
    """How often, and how surely, the computation at hand runs."""

    count: float = 1.0
    exact: bool = True


def analyse(module: Module, axes: Mapping[str, int]) -> ProgramFacts:
    """Return the facts of a program.

    Args:
        module: optimized and scheduled HLO, as parsed.
        axes: the mesh's axes and sizes in order; groups count positions in `mesh.devices.flat`.
    """
    reader = _Reader(module, dict(axes))
    schedule = reader.walk(module.entry, _Visit())
    operations, collectives = reader.operations(schedule), reader.collectives(schedule)
    if not module.is_scheduled:
        reader.note("the program is not scheduled: what overlaps, and its peak, are guesses")
    return ProgramFacts(
        operations=operations,
        collectives=collectives,
        schedule=schedule,
        flops=sum(each.flops * each.count for each in operations),
        vector_flops=sum(each.vector_flops * each.count for each in operations),
        transcendentals=sum(each.transcendentals * each.count for each in operations),
        bytes=sum(each.bytes * each.count for each in operations),
        peak=find_peak(module),
        notes=tuple(reader.notes),
    )


class _Reader:
    def __init__(self, module: Module, axes: dict[str, int]) -> None:
        self.module = module
        self.axes = axes
        self.notes: dict[str, None] = {}
        self._pending: dict[tuple[str, str], Operation | Collective] = {}

    def note(self, text: str) -> None:
        self.notes[text] = None

    def walk(self, computation: Computation, visit: _Visit) -> tuple[Item, ...]:
        """Return the schedule of a computation and of all that it calls."""
        return tuple(
            item
            for instruction in computation.instructions
            for item in self._items(computation, instruction, visit)
        )

    def operations(self, schedule: Iterable[Item]) -> tuple[Operation, ...]:
        return tuple(what for what in _begun(schedule) if isinstance(what, Operation))

    def collectives(self, schedule: Iterable[Item]) -> tuple[Collective, ...]:
        return tuple(what for what in _begun(schedule) if isinstance(what, Collective))

    def _items(
        self, computation: Computation, instruction: Instruction, visit: _Visit
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
            yield Run(self._collective(computation, instruction, visit, False))
        elif opcode == "custom-call" and instruction.target in FREE_TARGETS:
            return
        elif opcode not in FREE and not opcode.endswith("-update") and opcode != "recv":
            host = host_transfer(computation, instruction)
            if host:
                yield Run(self._host(computation, instruction, visit, host, False))
            else:
                yield Run(self._operation(computation, instruction, visit))

    def _loop(self, instruction: Instruction, visit: _Visit) -> Loop:
        count = trip_count(self.module, instruction)
        if count is None:
            self.note(
                f"{instruction.name}: how often this loop runs is not known; counted once, so that "
                "all that is inside is a lower bound"
            )
        inner = _Visit(
            visit.count * (1 if count is None else count), visit.exact and count is not None
        )
        body = self.walk(self._called(instruction, "body"), inner)
        return Loop(
            instruction.name, "while", 1 if count is None else count, count is not None, body
        )

    def _branch(self, instruction: Instruction, visit: _Visit) -> Loop:
        """Take the branch with the most work."""
        names = [name for name in instruction.called() if name in self.module.computations]
        bodies = [self.walk(self.module.computations[name], visit) for name in names]
        chosen = max(range(len(bodies)), key=lambda number: _weight(bodies[number]))
        if any(_weight(body) for body in bodies):
            self.note(
                f"{instruction.name}: of {len(bodies)} branches the one with the most work is "
                f"counted, {names[chosen]}"
            )
        return Loop(instruction.name, "conditional", 1, True, bodies[chosen])

    def _start(
        self, computation: Computation, instruction: Instruction, visit: _Visit
    ) -> Iterator[Item]:
        what: Operation | Collective
        inside = self._inside(instruction)
        host = host_transfer(computation, instruction)
        if collective_kind(instruction):
            what = self._collective(computation, instruction, visit, True)
        elif host:
            what = self._host(computation, instruction, visit, host, True)
        elif inside is not None:
            found = [each for each in _deep(self.module, inside) if collective_kind(each[1])]
            if found:
                what = self._collective(*found[0], visit, True, fused=instruction.name)
            else:
                what = self._async_work(inside, instruction, visit)
        else:
            what = dataclasses.replace(
                self._operation(computation, instruction, visit), asynchronous=True
            )
        self._pending[computation.name, _key(instruction)] = what
        yield Start(what)

    def _done(self, computation: Computation, instruction: Instruction) -> Iterator[Item]:
        if instruction.opcode == "send-done":
            return
        start = computation.operands(instruction)[0]
        while start.opcode.endswith("-update"):
            start = computation.operands(start)[0]
        what = self._pending.pop((computation.name, _key(start)), None)
        if what is not None:
            yield Done(what)
        elif instruction.opcode != "recv-done":
            self.note(f"{instruction.name}: what it waits for was not found")

    def _async_work(
        self, inside: Computation, instruction: Instruction, visit: _Visit
    ) -> Operation:
        """Return the operations of an async computation as one."""
        items = list(_begun(self.walk(inside, visit)))
        parts = [what for what in items if isinstance(what, Operation)]
        if not parts:
            return self._operation(inside, inside.root, visit)
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
        self, computation: Computation, instruction: Instruction, visit: _Visit
    ) -> Iterator[Item]:
        """Yield what a fusion does: its own work, and the collective in it if it holds one.

        TPU writes an asynchronous collective as a fusion that starts it, fusions that compute
        while it goes on and hold it too, and a fusion that waits for it.
        """
        members = list(_deep(self.module, self._called(instruction, "calls")))
        found = [each for each in members if collective_kind(each[1])]
        overlapped = False
        for holder, each in members:
            if each.target not in ("AsyncCollectiveStart", "AsyncCollectiveDone"):
                continue
            overlapped = True
            for operand in holder.operands(each):
                if collective_kind(operand):
                    yield from self._fused_end(computation, instruction, holder, operand, visit)
        config = any("async_collective_fusion_config" in c.backend_config for _, c in found)
        if found and not overlapped and not config:
            for holder, each in found:
                yield Run(self._collective(holder, each, visit, False, fused=instruction.name))
        rest = self._operation(computation, instruction, visit)
        if not found or rest.flops or (config and not overlapped):
            yield Run(rest)

    def _fused_end(
        self,
        computation: Computation,
        fusion: Instruction,
        holder: Computation,
        collective: Instruction,
        visit: _Visit,
    ) -> Iterator[Item]:
        """Yield the start of a collective whose channel is not yet open, else its end."""
        key = (computation.name, "channel " + collective.attributes.get("channel_id", ""))
        if key in self._pending:
            yield Done(self._pending.pop(key))
        else:
            what = self._collective(holder, collective, visit, True, fused=fusion.name)
            self._pending[key] = what
            yield Start(what)

    def _operation(
        self, computation: Computation, instruction: Instruction, visit: _Visit
    ) -> Operation:
        own, ours = sources(self.module, instruction)
        kind = category(self.module, computation, instruction)
        if instruction.opcode == "custom-call":
            cost = custom_call_cost(computation, instruction)
            kind, done, moved = cost.category, cost.work, cost.bytes
            if cost.note:
                self.note(cost.note)
        else:
            done = self._work(computation, instruction)
            moved = hbm_bytes(self.module, computation, instruction)
        return Operation(
            name=instruction.name,
            computation=computation.name,
            opcode=instruction.opcode,
            category=kind,
            flops=done.flops,
            vector_flops=done.vector_flops,
            transcendentals=done.transcendentals,
            bytes=moved,
            dtype=product_dtype(self.module, computation, instruction),
            count=visit.count,
            exact=visit.exact,
            op_name=instruction.op_name,
            source=own,
            fornax_source=ours,
            cycles=compiler_cycles(instruction),
        )

    def _work(self, computation: Computation, instruction: Instruction) -> Work:
        total = work(self.module, computation, instruction)
        if instruction.opcode == "fusion":
            for holder, each in _deep(self.module, self._called(instruction, "calls")):
                if each.opcode == "custom-call":
                    total += custom_call_cost(holder, each).work
        return total

    def _collective(
        self,
        computation: Computation,
        instruction: Instruction,
        visit: _Visit,
        asynchronous: bool,
        fused: str = "",
    ) -> Collective:
        moved = transfer(self.module, computation, instruction, self.axes, fused=bool(fused))
        if moved.note:
            self.note(moved.note)
        own, ours = sources(self.module, instruction)
        return Collective(
            name=instruction.name,
            computation=computation.name,
            kind=moved.kind,
            axes=moved.axes,
            groups=moved.groups,
            group_size=moved.group_size,
            bytes=moved.bytes,
            dtype=moved.dtype,
            count=visit.count,
            exact=visit.exact,
            asynchronous=asynchronous,
            op_name=instruction.op_name,
            source=own,
            fornax_source=ours,
            channel=moved.channel,
            fused=fused,
        )

    def _host(
        self,
        computation: Computation,
        instruction: Instruction,
        visit: _Visit,
        moved: int,
        asynchronous: bool,
    ) -> Collective:
        own, ours = sources(self.module, instruction)
        return Collective(
            name=instruction.name,
            computation=computation.name,
            kind="host-transfer",
            axes=(),
            groups=(),
            group_size=1,
            bytes=moved,
            dtype=product_dtype(self.module, computation, instruction),
            count=visit.count,
            exact=visit.exact,
            asynchronous=asynchronous,
            op_name=instruction.op_name,
            source=own,
            fornax_source=ours,
        )

    def _called(self, instruction: Instruction, key: str) -> Computation:
        return self.module.computations[instruction.attributes[key].lstrip("%")]

    def _inside(self, instruction: Instruction) -> Computation | None:
        name = instruction.attributes.get("calls", "").lstrip("%")
        return self.module.computations.get(name)


def _key(start: Instruction) -> str:
    """Return what a start and its done have in common: the name, or a rendezvous by name."""
    rendezvous = start.attributes.get("frontend_attributes", "")
    _, found, rest = rendezvous.partition('_xla_host_transfer_rendezvous="')
    return "rendezvous " + rest.partition('"')[0] if found else start.name


def _deep(module: Module, computation: Computation) -> Iterator[tuple[Computation, Instruction]]:
    """Yield the instructions of a computation and of the fusions and calls in it."""
    for instruction in computation.instructions:
        yield computation, instruction
        if instruction.opcode in ("fusion", "call", "async-start"):
            for name in instruction.called():
                if name in module.computations:
                    yield from _deep(module, module.computations[name])


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
