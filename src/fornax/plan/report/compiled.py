"""A report from a compiled program: what its text, its memory and its predicted times say."""

from fornax.mesh import Rules
from fornax.plan.artifact import Artifact
from fornax.plan.cost import Prediction
from fornax.plan.hlo.facts import Collective as Moved
from fornax.plan.hlo.facts import ProgramFacts
from fornax.plan.report.findings import LogicalAxes, unasked, whole_arrays
from fornax.plan.report.owners import buffers_of, parts_of
from fornax.plan.report.program import (
    ClassOfWork,
    Collective,
    Compilation,
    Memory,
    ProgramReport,
)
from fornax.plan.report.words import argument, operation
from fornax.plan.topology import Topology

__all__ = ["program_of_artifact"]


def program_of_artifact(
    artifact: Artifact,
    facts: ProgramFacts,
    prediction: Prediction,
    topology: Topology,
    *,
    rules: Rules,
    logical: LogicalAxes,
    residual: int = 0,
    cached: bool = False,
) -> ProgramReport:
    """One compiled program, its figures per chip.

    Args:
      artifact: what the compiler made.
      facts: what was read from its text.
      prediction: its time.
      topology: the chips.
      rules: the rule table it was traced with.
      logical: the logical axes of its parameters.
      residual: elements of the residual stream that one shard of the batch holds.
      cached: whether an earlier compilation was found.
    """
    devices = topology.chip.devices
    collectives = _collectives(prediction)
    step = prediction.step_seconds
    return ProgramReport(
        name=artifact.program,
        memory=Memory(
            parts=parts_of(artifact, facts.peak, devices),
            usable=int(topology.chip.usable_bytes),
            host=artifact.memory.host * devices,
            buffers=buffers_of(artifact, facts.peak),
        ),
        flops=facts.flops * devices,
        bytes=facts.bytes * devices,
        step_seconds=step,
        compute_seconds=prediction.compute_seconds,
        exposed_seconds=prediction.exposed_communication_seconds,
        optimistic_seconds=prediction.optimistic_seconds,
        pessimistic_seconds=prediction.pessimistic_seconds,
        bound=prediction.bound,
        work=_work(prediction, facts, devices),
        collectives=collectives,
        findings=(
            *whole_arrays(artifact, logical, rules),
            *unasked(collectives, rules, step, residual),
        ),
        compilation=Compilation(
            lower_seconds=artifact.lower_seconds,
            compile_seconds=artifact.compile_seconds,
            code_bytes=artifact.memory.code,
            hlo_bytes=len(artifact.hlo),
            cached=cached,
            versions={name: version for name, version in artifact.versions.items() if version},
        ),
        notes=tuple(dict.fromkeys((*artifact.notes, *facts.notes, *prediction.notes))),
    )


def _work(prediction: Prediction, facts: ProgramFacts, devices: int) -> tuple[ClassOfWork, ...]:
    """A row a category; the arithmetic of one without products is that of its elements."""
    elements: dict[str, float] = {}
    for one in facts.operations:
        elements[one.category] = elements.get(one.category, 0.0) + one.vector_flops * one.count
    return tuple(
        ClassOfWork(
            name=name,
            flops=(time.flops or elements.get(name, 0.0)) * devices,
            bytes=time.bytes * devices,
            seconds=time.seconds,
            bound="memory" if time.memory_bound_seconds > time.seconds / 2 else "compute",
        )
        for name, time in prediction.by_category.items()
    )


def _collectives(prediction: Prediction) -> tuple[Collective, ...]:
    return tuple(
        Collective(
            kind=one.collective.kind,
            axes=one.collective.axes,
            link=one.link,
            bytes=one.collective.bytes,
            count=round(one.collective.count),
            seconds=one.seconds,
            exposed_seconds=one.exposed_seconds,
            what=_what(one.collective),
            source=one.collective.source or one.collective.fornax_source,
        )
        for one in sorted(prediction.by_collective, key=lambda one: -one.seconds)
    )


def _what(collective: Moved) -> str:
    """The argument that is moved, else the operation that asked."""
    return argument(collective.argument) or operation(collective.op_name) or collective.name
