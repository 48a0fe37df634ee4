"""A report from closed forms: what an estimate says, in the words of a plan."""

from fornax.plan.analytic import Estimate
from fornax.plan.report.program import (
    Buffer,
    ClassOfWork,
    Collective,
    Memory,
    MemoryPart,
    ProgramReport,
)

__all__ = ["program_of_estimate"]

_OWNERS = ("parameters", "optimizer", "gradients", "activations", "temporaries", "batch", "other")
_LARGEST = 12


def program_of_estimate(estimate: Estimate) -> ProgramReport:
    """The training step as an estimate sees it."""
    memory = estimate.memory
    return ProgramReport(
        name="train_step",
        memory=Memory(
            parts=tuple(MemoryPart(owner=owner, bytes=getattr(memory, owner)) for owner in _OWNERS),
            usable=memory.usable,
            host=memory.host,
            buffers=_parts(estimate),
        ),
        flops=estimate.flops,
        bytes=estimate.bytes,
        step_seconds=estimate.step_seconds,
        compute_seconds=estimate.compute_seconds,
        exposed_seconds=estimate.exposed_seconds,
        optimistic_seconds=estimate.optimistic_seconds,
        pessimistic_seconds=estimate.pessimistic_seconds,
        bound=estimate.bound,
        work=tuple(
            ClassOfWork(
                name=one.name,
                flops=one.flops,
                bytes=one.bytes,
                seconds=one.seconds,
                bound=one.bound,
            )
            for one in estimate.operations
        ),
        collectives=tuple(
            Collective(
                kind=one.kind,
                axes=one.axes,
                link=one.link,
                bytes=one.bytes,
                count=one.count,
                seconds=one.seconds,
                exposed_seconds=one.exposed_seconds,
                what=one.name,
            )
            for one in estimate.collectives
        ),
        notes=estimate.notes,
    )


def _parts(estimate: Estimate) -> tuple[Buffer, ...]:
    """The largest parts of the peak. Closed forms know arrays by what they are, not by a line."""
    largest = sorted(estimate.memory.parts.items(), key=lambda part: -part[1])[:_LARGEST]
    return tuple(
        Buffer(name=name, owner="", shape="", bytes=size, unpadded_bytes=size)
        for name, size in largest
        if size
    )
