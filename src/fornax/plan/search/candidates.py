"""Estimating the whole space and keeping, of each mesh, the plans that no other one beats."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from fornax.config.errors import ConfigError, FornaxError
from fornax.models import DecoderConfig
from fornax.plan.analytic import Estimate, estimate
from fornax.plan.search.space import batch_sizes, meshes, micro_batches, rematted
from fornax.plan.topology import Topology
from fornax.train import TrainConfig

__all__ = ["Found", "find_candidates"]

_HOPELESS = 1.15
"""A plan that is estimated at more than this share of the usable memory is given up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What is left of the space."""

    fronts: tuple[Estimate, ...]
    """Of each mesh the plans that no other of it beats in both memory and time; fastest first."""
    given: Estimate | None
    given_problem: str | None
    considered: int
    pruned: Mapping[str, int]
    closest: Estimate | None
    """The plan that needs the least memory, fitting or not."""


def find_candidates(config: TrainConfig, topology: Topology, *, any_batch: bool) -> Found:
    """Estimate every combination.

    Raises:
      ConfigError: for a model that is not given.
    """
    model = config.model
    if model is None:
        raise ConfigError("model is null; describe it, or let init_from be read first")
    given, problem = _given(config, topology)
    counts: Counter[str] = Counter()
    fronts: list[Estimate] = [] if given is None or not given.memory.fits else [given]
    closest = given
    considered = 0
    for group in _groups(config, model, topology, any_batch):
        fitting: list[Estimate] = []
        for one in group:
            considered += 1
            found = _try(one, topology)
            if isinstance(found, str):
                counts[found] += 1
                continue
            if closest is None or found.memory.total < closest.memory.total:
                closest = found
            if found.memory.total > _HOPELESS * found.memory.usable:
                counts["does not fit in memory"] += 1
            else:
                fitting.append(found)
        front = _undominated(fitting)
        counts["another plan on the same mesh is faster and smaller"] += len(fitting) - len(front)
        fronts += [one for one in front if given is None or one.config != given.config]
    fronts.sort(key=lambda one: (one.step_seconds / one.tokens, one.memory.total))
    return Found(
        fronts=tuple(fronts),
        given=given,
        given_problem=problem,
        considered=considered,
        pruned={reason: count for reason, count in counts.items() if count},
        closest=closest,
    )


def _given(config: TrainConfig, topology: Topology) -> tuple[Estimate | None, str | None]:
    try:
        return estimate(config, topology), None
    except FornaxError as error:
        return None, str(error)


def _groups(
    config: TrainConfig, model: DecoderConfig, topology: Topology, any_batch: bool
) -> Iterator[Iterable[TrainConfig]]:
    """All plans of one mesh and batch size after another."""
    for batch_size in batch_sizes(config, topology, anything=any_batch):
        for mesh in meshes(config, model, topology):
            counts = micro_batches(batch_size, mesh)
            if not counts:
                continue
            base = dataclasses.replace(config, accumulate=1, batch_size=batch_size, mesh=mesh)
            yield [
                dataclasses.replace(one, accumulate=count)
                for count in counts
                for one in rematted(base, topology)
            ]


def _try(config: TrainConfig, topology: Topology) -> Estimate | str:
    """The estimate, or the kind of reason why there is none."""
    try:
        return estimate(config, topology)
    except FornaxError:
        return "does not divide over the mesh"


def _undominated(found: list[Estimate]) -> list[Estimate]:
    """Those that no other beats in memory and time both."""
    front: list[Estimate] = []
    for one in sorted(found, key=lambda e: (e.step_seconds, e.memory.total)):
        if not front or one.memory.total < front[-1].memory.total:
            front.append(one)
    return front
