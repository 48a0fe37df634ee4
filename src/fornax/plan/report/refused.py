"""A program that the compiler refused because it needs more memory than there is."""

import dataclasses

from fornax.plan.compile import OutOfMemoryError
from fornax.plan.report.program import Buffer, Memory, MemoryPart, ProgramReport
from fornax.plan.report.words import nbytes, operation
from fornax.plan.topology import Topology

__all__ = ["refused_program"]

_STATE = ("parameters", "optimizer", "batch")
_LARGEST = 12


def refused_program(
    guessed: ProgramReport, error: OutOfMemoryError, topology: Topology
) -> ProgramReport:
    """A report with the memory that the compiler said the program needs.

    The state is known exactly. What a training step needs beyond it is divided among the other
    owners as the estimate divides it, and its times are the estimate's; of another program both
    are unknown.

    Args:
      guessed: the estimate of the training step.
      error: what the compiler said.
      topology: the chips.
    """
    devices = topology.chip.devices
    trains = error.program == guessed.name
    memory = Memory(
        parts=_parts(guessed, error.used * devices, trains),
        usable=error.limit * devices,
        host=guessed.memory.host if trains else 0,
        buffers=_buffers(error) or (guessed.memory.buffers if trains else ()),
    )
    said = (
        f"the compiler refuses {error.program}: it needs {nbytes(error.used)} of a device's "
        f"{nbytes(error.limit)}. The total is the compiler's; "
    )
    if trains:
        said += "how it divides among owners, and all times, are estimates"
        return dataclasses.replace(guessed, memory=memory, notes=(said, *guessed.notes))
    return ProgramReport(
        name=error.program,
        memory=memory,
        flops=0.0,
        bytes=0.0,
        step_seconds=0.0,
        compute_seconds=0.0,
        exposed_seconds=0.0,
        optimistic_seconds=0.0,
        pessimistic_seconds=0.0,
        bound="memory",
        notes=(f"{said}its time is not known",),
    )


def _parts(guessed: ProgramReport, used: int, trains: bool) -> tuple[MemoryPart, ...]:
    sizes = {part.owner: part.bytes for part in guessed.memory.parts}
    state = sum(sizes[owner] for owner in _STATE if owner in sizes)
    room = max(0, used - state)
    if trains:
        rest = sum(sizes.values()) - state
        factor = room / rest if rest else 0.0
        found = {o: size if o in _STATE else round(size * factor) for o, size in sizes.items()}
    else:
        found = {owner: size if owner in _STATE else 0 for owner, size in sizes.items()}
        found["temporaries"] = room
    return tuple(MemoryPart(owner=owner, bytes=size) for owner, size in found.items())


def _buffers(error: OutOfMemoryError) -> tuple[Buffer, ...]:
    return tuple(
        Buffer(
            name=operation(one.op_name) or one.kind,
            owner="",
            shape=one.shape.partition("{")[0],
            bytes=one.bytes,
            unpadded_bytes=one.unpadded_bytes,
            source=one.source,
        )
        for one in error.allocations[:_LARGEST]
    )
