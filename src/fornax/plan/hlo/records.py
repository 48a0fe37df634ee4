"""Make the record of one instruction: an operation, a collective, or a transfer to the host."""

import dataclasses
from collections.abc import Iterator

from fornax.plan.hlo.behind import Callers
from fornax.plan.hlo.collectives import transfer
from fornax.plan.hlo.contents import telling
from fornax.plan.hlo.custom_calls import FREE_TARGETS, custom_call_cost
from fornax.plan.hlo.facts import Collective, Operation
from fornax.plan.hlo.flops import Work, work
from fornax.plan.hlo.module import Computation, Instruction, Module
from fornax.plan.hlo.operations import category, compiler_cycles, product_dtype
from fornax.plan.hlo.sources import sources
from fornax.plan.hlo.traffic import hbm_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """How often, and how surely, the computation at hand runs."""

    count: float = 1.0
    exact: bool = True


class Recorder:
    """Records of a module's instructions, and notes of what they leave unsaid."""

    def __init__(self, module: Module, axes: dict[str, int]) -> None:
        self.module = module
        self.axes = axes
        self.notes: dict[str, None] = {}
        self._callers = Callers(module)

    def note(self, text: str) -> None:
        """Keep a note, once."""
        self.notes[text] = None

    def operation(
        self, computation: Computation, instruction: Instruction, visit: Visit
    ) -> Operation:
        """Return the record of what computes or copies on its own device."""
        told = telling(self.module, computation, instruction)
        own, ours = sources(self.module, told)
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
            op_name=told.op_name,
            source=own,
            fornax_source=ours,
            cycles=compiler_cycles(instruction),
        )

    def collective(
        self,
        computation: Computation,
        instruction: Instruction,
        visit: Visit,
        *,
        asynchronous: bool = False,
        around: tuple[Computation, Instruction] | None = None,
    ) -> Collective:
        """Return the record of a collective; `around`: the fusion or async start that holds it."""
        moved = transfer(self.module, computation, instruction, self.axes, fused=around is not None)
        if moved.note:
            self.note(moved.note)
        told = telling(self.module, computation, instruction, around)
        own, ours = sources(self.module, told)
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
            op_name=told.op_name,
            source=own,
            fornax_source=ours,
            argument=self._callers.argument(computation, instruction),
            channel=moved.channel,
            fused="" if around is None else around[1].name,
        )

    def host(
        self,
        computation: Computation,
        instruction: Instruction,
        visit: Visit,
        moved: int,
        *,
        asynchronous: bool = False,
    ) -> Collective:
        """Return the record of a copy of `moved` bytes between the device and its host."""
        told = telling(self.module, computation, instruction)
        own, ours = sources(self.module, told)
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
            op_name=told.op_name,
            source=own,
            fornax_source=ours,
        )

    def _work(self, computation: Computation, instruction: Instruction) -> Work:
        total = work(self.module, computation, instruction)
        if instruction.opcode == "fusion":
            inner = self.module.computations[instruction.attributes["calls"].lstrip("%")]
            for holder, each in deep(self.module, inner):
                if each.opcode == "custom-call" and each.target not in FREE_TARGETS:
                    cost = custom_call_cost(holder, each)
                    total += cost.work
                    if cost.note:
                        self.note(cost.note)
        return total


def deep(module: Module, computation: Computation) -> Iterator[tuple[Computation, Instruction]]:
    """Yield the instructions of a computation and of the fusions and calls in it."""
    for instruction in computation.instructions:
        yield computation, instruction
        if instruction.opcode in ("fusion", "call", "call-start", "async-start"):
            for name in instruction.called():
                if name in module.computations:
                    yield from deep(module, module.computations[name])
