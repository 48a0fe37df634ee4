"""From a compiled step to its time without attention, which depends on what the sequences hold."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fornax.plan.artifact import Artifact
from fornax.plan.cost import Calibration, Prediction, predict_schedule
from fornax.plan.cost.schedule import collective_spans
from fornax.plan.hlo.facts import Item, Loop, Operation, ProgramFacts
from fornax.plan.serving.latency import Body
from fornax.plan.topology import Topology

__all__ = ["Compiled", "body_of", "choice_of", "exchanges_of", "unknown_of", "without_attention"]


_ATTENTION = ("attention", "kernel")


@dataclass(frozen=True)
class Compiled:
    """A program that was compiled, and what was read from it."""

    artifact: Artifact
    facts: ProgramFacts
    size: int


def body_of(
    artifact: Artifact, facts: ProgramFacts, topology: Topology, calibration: Calibration
) -> Body:
    """A step without attention."""
    found = _predict(artifact, without_attention(facts.schedule), topology, calibration)
    memory = sum(one.memory_bound_seconds for one in found.by_category.values())
    exchange = found.exposed_communication_seconds
    return Body(
        weights=memory,
        compute=max(0.0, found.step_seconds - memory - exchange),
        exchange=exchange,
        compiled=True,
    )


def choice_of(
    artifact: Artifact, facts: ProgramFacts, topology: Topology, calibration: Calibration
) -> float:
    """Seconds of a greedy choice: what requests may ask for beyond it stands in branches."""
    return _predict(artifact, _straight(facts.schedule), topology, calibration).step_seconds


def _predict(
    artifact: Artifact, schedule: Sequence[Item], topology: Topology, calibration: Calibration
) -> Prediction:
    spans = collective_spans(schedule, artifact.devices, topology)
    return predict_schedule(schedule, spans, topology, calibration)


def without_attention(schedule: Sequence[Item]) -> tuple[Item, ...]:
    """The schedule without attention, whose time depends on what the sequences hold: its kernels,
    and loops of unknown length. What is written and prepared for attention stays."""
    kept: list[Item] = []
    for item in schedule:
        if isinstance(item, Loop):
            if item.exact:
                body = without_attention(item.body)
                kept.append(Loop(item.name, item.kind, item.count, item.exact, body))
        elif not (isinstance(item.what, Operation) and item.what.category in _ATTENTION):
            kept.append(item)
    return tuple(kept)


def _straight(schedule: Sequence[Item]) -> tuple[Item, ...]:
    """The schedule without branches and loops of unknown length."""
    kept: list[Item] = []
    for item in schedule:
        if not isinstance(item, Loop):
            kept.append(item)
        elif item.exact and item.kind != "conditional":
            body = _straight(item.body)
            kept.append(Loop(item.name, item.kind, item.count, item.exact, body))
    return tuple(kept)


def unknown_of(programs: Iterable[ProgramFacts]) -> list[str]:
    """What was not understood of steps, less what their attention is counted for by itself."""
    counted = ("attention", "how often this loop runs")
    notes = dict.fromkeys(note for facts in programs for note in facts.notes)
    return [note for note in notes if not any(word in note for word in counted)]


def exchanges_of(facts: ProgramFacts) -> tuple[str, ...]:
    """Collectives as words, equal ones together."""
    found: dict[tuple[str, int], float] = {}
    for one in facts.collectives:
        key = (one.kind, one.bytes)
        found[key] = found.get(key, 0.0) + one.count
    return tuple(f"{count:g} x {kind} of {size:,} bytes" for (kind, size), count in found.items())
