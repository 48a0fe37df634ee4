"""Many exchanges as few rows: those of one kind over the same axes and link belong together."""

from collections.abc import Iterable
from dataclasses import dataclass

from fornax.plan.report.program import Collective

__all__ = ["Exchange", "exchanges"]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """All exchanges of one kind over the same mesh axes and link."""

    kind: str
    axes: tuple[str, ...]
    link: str
    count: int
    moved: int
    """Bytes over all runs of a step."""
    seconds: float
    exposed_seconds: float


def exchanges(collectives: Iterable[Collective]) -> list[Exchange]:
    """The rows, most time first."""
    groups: dict[tuple[str, tuple[str, ...], str], list[Collective]] = {}
    for one in collectives:
        groups.setdefault((one.kind, one.axes, one.link), []).append(one)
    rows = [
        Exchange(
            kind=kind,
            axes=axes,
            link=link,
            count=sum(one.count for one in members),
            moved=sum(one.moved for one in members),
            seconds=sum(one.seconds for one in members),
            exposed_seconds=sum(one.exposed_seconds for one in members),
        )
        for (kind, axes, link), members in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.seconds, row.kind, row.axes))
