"""A program that the compiler refused because it needs more memory than there is."""

import dataclasses

from fornax.plan.compile import OutOfMemoryError
from fornax.plan.report.program import Buffer, Memory, MemoryPart, ProgramReport
from fornax.plan.report.words import nbytes
from fornax.plan.topology import Topology

__all__ = ["memory_of_refusal"]

_STATE = ("parameters", "optimizer", "batch")
_LARGEST = 12


def memory_of_refusal(
    guessed: ProgramReport, error: OutOfMemoryError, topology: Topology
) -> ProgramReport:
    """The estimate of the program with the memory that the compiler said it needs.

    The state is known exactly; what the compiler needs beyond it is divided among the other owners
    as the estimate divides it.
    """
    devices = topology.chip.devices
    used = error.used * devices
    state = sum(part.bytes for part in guessed.memory.parts if part.owner in _STATE)
    rest = guessed.memory.total - state
    factor = max(0, used - state) / rest if rest else 0.0
    parts = tuple(
        part
        if part.owner in _STATE
        else MemoryPart(owner=part.owner, bytes=round(part.bytes * factor))
        for part in guessed.memory.parts
    )
    buffers = tuple(
        Buffer(
            name=one.op_name or one.kind,
            owner="",
            shape=one.shape.partition("{")[0],
            bytes=one.bytes,
            unpadded_bytes=one.unpadded_bytes,
            source=one.source,
        )
        for one in error.allocations[:_LARGEST]
    )
    memory = Memory(
        parts=parts,
        usable=error.limit * devices,
        host=guessed.memory.host,
        buffers=buffers or guessed.memory.buffers,
    )
    return dataclasses.replace(
        guessed,
        name=error.program,
        memory=memory,
        notes=(
            f"the compiler refuses {error.program}: it needs {nbytes(error.used)} of a device's "
            f"{nbytes(error.limit)}. The total is the compiler's; how it divides among gradients, "
            "activations and temporaries, and all times, are estimates",
            *guessed.notes,
        ),
    )
