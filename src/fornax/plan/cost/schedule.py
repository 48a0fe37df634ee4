"""A compiled program's schedule as timed items: operations by the roofline, collectives by the
network, each where the compiler put it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fornax.plan.cost import queues
from fornax.plan.cost.network import Network, Span, Transfer, collective_seconds
from fornax.plan.cost.roofline import Rates, Timed, operation_seconds
from fornax.plan.cost.span import Place, Torus, permute_span, spans_of
from fornax.plan.hlo.facts import Collective, Done, Item, Loop, Operation, Run

__all__ = ["Prices", "collective_spans", "collectives_of", "timed_items"]

Spans = Mapping[str, tuple[Span, ...]]
"""Name of a collective to how its groups are joined; several where groups differ."""


def collectives_of(schedule: Sequence[Item]) -> Iterator[Collective]:
    """Every collective of a schedule, once for each place it begins."""
    for item in schedule:
        if isinstance(item, Loop):
            yield from collectives_of(item.body)
        elif not isinstance(item, Done) and isinstance(item.what, Collective):
            yield item.what


def collective_spans(
    schedule: Sequence[Item], devices: Sequence[Place], topology: Torus
) -> dict[str, tuple[Span, ...]]:
    """How the groups of each collective are joined.

    Args:
      schedule: `ProgramFacts.schedule`.
      devices: in the order of `mesh.devices.flat`.
      topology: the slice.
    """
    known: dict[tuple[bool, int], tuple[Span, ...]] = {}
    found: dict[str, tuple[Span, ...]] = {}
    for collective in collectives_of(schedule):
        pairs = collective.kind in ("collective-permute", "send-recv")
        key = (pairs, hash(collective.groups))
        if key not in known:
            known[key] = (
                (permute_span(collective.groups, devices, topology),)
                if pairs
                else spans_of(collective.groups, devices, topology)
            )
        found[collective.name] = known[key]
    return found


@dataclass(frozen=True)
class Prices:
    """What things take."""

    rates: Rates
    network: Network
    spans: Spans

    def operation(self, operation: Operation) -> Timed:
        """One run of an operation."""
        return operation_seconds(operation, self.rates)

    def collective(self, collective: Collective) -> Transfer:
        """One collective: of groups that are joined differently, the slowest."""
        alone = Span(shared=float(self.rates.chip.devices))
        spans = self.spans.get(collective.name) or (alone,)
        times = (
            collective_seconds(collective.kind, collective.bytes, span, self.network)
            for span in spans
        )
        return max(times, key=lambda transfer: transfer.seconds)


def timed_items(schedule: Sequence[Item], prices: Prices) -> tuple[queues.Item, ...]:
    """The schedule for `queues.walk`.

    Copies that run beside the computation take the queue `memory`.
    """
    return tuple(_timed(item, prices) for item in schedule)


def _timed(item: Item, prices: Prices) -> queues.Item:
    if isinstance(item, Loop):
        body = timed_items(item.body, prices)
        return queues.Loop(name=item.name, count=max(1, round(item.count)), body=body)
    what, waits = item.what, isinstance(item, Run)
    if isinstance(item, Done):
        return queues.Done(name=what.name)
    if isinstance(what, Collective):
        transfer = prices.collective(what)
        seconds, links = transfer.seconds, transfer.links
    else:
        seconds, links = prices.operation(what).seconds, ("memory",)
        if waits:
            return queues.Compute(name=what.name, seconds=seconds)
    return queues.Exchange(name=what.name, seconds=seconds, links=links, waits=waits)
