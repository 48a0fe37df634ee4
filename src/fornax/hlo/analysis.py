"""Walk a compiled program in its order and say what it does: the facts that a cost model needs."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from fornax.hlo.collectives import collective_kind, host_transfer, transfer
from fornax.hlo.custom_calls import FREE_TARGETS, custom_call_cost
from fornax.hlo.facts import (
    Collective,
    Done,
    Item,
    Loop,
    Operation,
    ProgramFacts,
    Run,
    Start,
)
from fornax.hlo.loops import trip_count
from fornax.hlo.module import Computation, Instruction, Module
from fornax.hlo.peak import find_peak
from fornax.hlo.provenance import argument_behind, named_source, source_lines
from fornax.hlo.traffic import FREE, hbm_bytes
from fornax.hlo.work import Work, category, compiler_cycles, product_dtype, work


def analyse(module: Module, axes: Mapping[str, int], *, grouped_rows: float = 1.0) -> ProgramFacts:
    """Return the facts of a program.

    Args:
        module: optimized and scheduled HLO, as parsed.
        axes: the mesh's axes and sizes in order; groups count positions in `mesh.devices.flat`.
        grouped_rows: share of the rows of grouped products that belong to a group; kernels pass
            over the others.
    """
    walk = _Walk(axes, grouped_rows)
    schedule = walk.computation(module.entry, 1.0)
    walk.note_unfinished()
    begun = tuple(_begun(schedule))
    operations = tuple(what for what in begun if isinstance(what, Operation))
    collectives = tuple(what for what in begun if isinstance(what, Collective))
    if not module.is_scheduled:
        walk.note("the program is not scheduled: what overlaps, and its peak, are guesses")
    return ProgramFacts(
        operations=operations,
        collectives=collectives,
        schedule=schedule,
        flops=sum(each.flops * each.count for each in operations),
        vector_flops=sum(each.vector_flops * each.count for each in operations),
        transcendentals=sum(each.transcendentals * each.count for each in operations),
        bytes=sum(each.bytes * each.count for each in operations),
        peak=find_peak(module),
        notes=tuple(walk.notes),
    )


class _Walk:
    """One pass over a program in its order, and notes of what it leaves unsaid."""

    def __init__(self, axes: Mapping[str, int], grouped_rows: float) -> None:
        self.axes = axes
        self.grouped_rows = grouped_rows
        self.notes: dict[str, None] = {}
        self._pending: dict[tuple[str, str], list[Operation | Collective]] = {}

    def note(self, text: str) -> None:
        """Keep a note, once."""
        if text:
            self.notes[text] = None

    def computation(self, computation: Computation, runs: float) -> tuple[Item, ...]:
        """Return the schedule of a computation, which runs so often, and of all that it calls."""
        return tuple(
            item
            for instruction in computation.instructions
            for item in self._items(instruction, runs)
        )

    def note_unfinished(self) -> None:
        """Name what was started and never waited for."""
        for what in (each for waiting in self._pending.values() for each in waiting):
            self.note(f"{what.name}: starts and is never waited for")

    def _items(self, instruction: Instruction, runs: float) -> Iterator[Item]:
        opcode = instruction.opcode
        if opcode == "while":
            yield self._loop(instruction, runs)
        elif opcode == "conditional":
            yield self._branch(instruction, runs)
        elif opcode == "call":
            body = self.computation(instruction.callee("to_apply"), runs)
            yield Loop(instruction.name, "call", 1, True, body)
        elif opcode.endswith("-done"):
            yield from self._done(instruction)
        elif opcode.endswith("-start") or opcode == "send":
            yield from self._start(instruction, runs)
        elif opcode == "fusion":
            yield from self._fusion(instruction, runs)
        elif collective_kind(instruction) or host_transfer(instruction):
            yield Run(self._collective(instruction, runs))
        elif opcode == "custom-call" and instruction.target in FREE_TARGETS:
            return
        elif opcode not in FREE and not opcode.endswith("-update") and opcode != "recv":
            yield Run(self._operation(instruction, runs))

    def _loop(self, instruction: Instruction, runs: float) -> Loop:
        known = trip_count(instruction)
        if known is None:
            self.note(
                f"{instruction.name}: how often this loop runs is not known; counted once, so that "
                "all that is inside is a lower bound"
            )
        count, exact = 1 if known is None else known, known is not None
        body = self.computation(instruction.callee("body"), runs * count)
        return Loop(instruction.name, "while", count, exact, body)

    def _branch(self, instruction: Instruction, runs: float) -> Loop:
        """Take the branch with the most work."""
        branches = instruction.called()
        bodies = [self.computation(branch, runs) for branch in branches]
        weights = [_weight(body) for body in bodies]
        chosen = weights.index(max(weights))
        if any(weights):
            self.note(
                f"{instruction.name}: of {len(bodies)} branches the one with the most work is "
                f"counted, {branches[chosen].name}"
            )
        return Loop(instruction.name, "conditional", 1, True, bodies[chosen])

    def _start(self, instruction: Instruction, runs: float) -> Iterator[Item]:
        what: Operation | Collective
        inside = _async_computation(instruction)
        if collective_kind(instruction) or host_transfer(instruction):
            what = self._collective(instruction, runs)
        elif inside is not None:
            found = next(filter(collective_kind, _deep(inside)), None)
            if found is not None:
                what = self._collective(found, runs, fused=True)
            else:
                what = self._async_work(inside, instruction, runs)
        else:
            what = self._operation(instruction, runs)
        self._waiting(instruction, _key(instruction)).append(what)
        yield Start(what)

    def _done(self, instruction: Instruction) -> Iterator[Item]:
        if instruction.opcode == "send-done":
            return
        start = instruction.operands[0]
        while start.opcode.endswith("-update"):
            start = start.operands[0]
        waiting = self._waiting(instruction, _key(start))
        if waiting:
            yield Done(waiting.pop(0))
        elif instruction.opcode != "recv-done":
            self.note(f"{instruction.name}: what it waits for was not found")

    def _waiting(self, instruction: Instruction, key: str) -> list[Operation | Collective]:
        """What was started under a key in the instruction's computation and is not done."""
        return self._pending.setdefault((instruction.computation.name, key), [])

    def _async_work(self, inside: Computation, start: Instruction, runs: float) -> Operation:
        """Return the operations of an async computation as one."""
        begun = _begun(self.computation(inside, runs))
        parts = [what for what in begun if isinstance(what, Operation)]
        if not parts:
            return self._operation(inside.root, runs)
        heaviest = max(parts, key=lambda part: (part.flops, part.bytes))
        return dataclasses.replace(
            heaviest,
            name=start.name,
            flops=sum(part.flops for part in parts),
            vector_flops=sum(part.vector_flops for part in parts),
            transcendentals=sum(part.transcendentals for part in parts),
            bytes=sum(part.bytes for part in parts),
        )

    def _fusion(self, fusion: Instruction, runs: float) -> Iterator[Item]:
        """Yield what a fusion does: its own work, and the collective in it if it holds one.

        TPU writes an asynchronous collective as a fusion that starts it, fusions that compute
        while it is in progress and hold it too, and a fusion that waits for it.
        """
        members = list(_deep(fusion.callee()))
        found = [each for each in members if collective_kind(each)]
        overlapped = False
        for each in members:
            if each.target not in ("AsyncCollectiveStart", "AsyncCollectiveDone"):
                continue
            overlapped = True
            for operand in filter(collective_kind, each.operands):
                waiting = self._waiting(
                    fusion, f"channel {operand.attributes.get('channel_id', '')}"
                )
                if each.target == "AsyncCollectiveStart":
                    what = self._collective(operand, runs, fused=True)
                    waiting.append(what)
                    yield Start(what)
                elif waiting:
                    yield Done(waiting.pop(0))
                else:
                    self.note(f"{fusion.name}: what it waits for was not found")
        config = any("async_collective_fusion_config" in c.backend_config for c in found)
        if found and not overlapped and not config:
            for each in found:
                yield Run(self._collective(each, runs, fused=True))
        rest = self._operation(fusion, runs)
        if not found or rest.flops or (config and not overlapped):
            yield Run(rest)

    def _operation(self, instruction: Instruction, runs: float) -> Operation:
        """Return the record of what computes or copies on its own device."""
        named = named_source(instruction)
        asking, ours = source_lines(named)
        kind = category(instruction)
        if instruction.opcode == "custom-call":
            cost = custom_call_cost(instruction, self.grouped_rows)
            kind, done, moved = cost.category, cost.work, cost.bytes
            self.note(cost.note)
        else:
            done, moved = self._work(instruction), hbm_bytes(instruction)
        return Operation(
            name=instruction.name,
            opcode=instruction.opcode,
            category=kind,
            flops=done.flops,
            vector_flops=done.vector_flops,
            transcendentals=done.transcendentals,
            bytes=moved,
            dtype=product_dtype(instruction),
            count=runs,
            op_name=named.op_name,
            source=asking,
            fornax_source=ours,
            cycles=compiler_cycles(instruction),
        )

    def _work(self, instruction: Instruction) -> Work:
        total = work(instruction)
        if instruction.opcode == "fusion":
            for each in _deep(instruction.callee()):
                if each.opcode == "custom-call" and each.target not in FREE_TARGETS:
                    cost = custom_call_cost(each, self.grouped_rows)
                    total += cost.work
                    self.note(cost.note)
        return total

    def _collective(
        self,
        instruction: Instruction,
        runs: float,
        *,
        fused: bool = False,
    ) -> Collective:
        """Return the record of a transfer; `fused`: a fusion or an async start holds it."""
        moved = transfer(instruction, self.axes, fused=fused)
        self.note(moved.note)
        named = named_source(instruction)
        asking, ours = source_lines(named)
        return Collective(
            name=instruction.name,
            kind=moved.kind,
            axes=moved.axes,
            groups=moved.groups,
            group_size=moved.group_size,
            bytes=moved.bytes,
            dtype=moved.dtype,
            count=runs,
            op_name=named.op_name,
            source=asking,
            fornax_source=ours,
            argument="" if moved.kind == "host-transfer" else argument_behind(instruction),
        )


def _deep(computation: Computation) -> Iterator[Instruction]:
    """Yield the instructions of a computation and of the fusions and calls in it."""
    for instruction in computation.instructions:
        yield instruction
        if instruction.opcode in ("fusion", "call", "call-start", "async-start"):
            for called in instruction.called():
                yield from _deep(called)


def _async_computation(start: Instruction) -> Computation | None:
    key = "to_apply" if start.opcode == "call-start" else "calls"
    return start.callee(key) if key in start.attributes else None


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
