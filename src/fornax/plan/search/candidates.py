"""Estimating the whole space and keeping, of each mesh, the plans that no other one beats."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fornax.config.errors import ConfigError, FornaxError
from fornax.models import DecoderConfig
from fornax.plan.analytic import Estimate, estimate
from fornax.plan.search.space import batch_sizes, meshes, micro_batches, rematted
from fornax.plan.topology import Topology
from fornax.train import TrainConfig

__all__ = ["Found", "find_candidates"]

_DIVIDES = "does not divide over the mesh"
_MORE = "more micro-batches than memory asks for"
_ROOMY = 0.85
"""A plan that takes no more than this share of the usable memory fits though estimates miss."""
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
        for one in _walk(group, topology, counts):
            considered += 1
            if closest is None or one.memory.total < closest.memory.total:
                closest = one
            if one.memory.total > _HOPELESS * one.memory.usable:
                counts["does not fit in memory"] += 1
            else:
                fitting.append(one)
        front = _undominated(fitting)
        counts["another plan on the same mesh is faster and smaller"] += len(fitting) - len(front)
        fronts += [one for one in front if given is None or one.config != given.config]
    considered += sum(counts[reason] for reason in (_DIVIDES, _MORE))
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


@dataclasses.dataclass(frozen=True)
class _Group:
    """One mesh and batch size, without its remat policy and micro-batches."""

    config: TrainConfig
    micro_batches: Sequence[int]


def _groups(
    config: TrainConfig, model: DecoderConfig, topology: Topology, any_batch: bool
) -> Iterator[_Group]:
    """All meshes for one batch size after another."""
    for batch_size in batch_sizes(config, anything=any_batch):
        for mesh in meshes(config, batch_size, model, topology):
            counts = micro_batches(batch_size, mesh)
            if counts:
                changed = dataclasses.replace(
                    config, accumulate=1, batch_size=batch_size, mesh=mesh
                )
                yield _Group(changed, counts)


def _walk(group: _Group, topology: Topology, counts: Counter[str]) -> Iterator[Estimate]:
    """For each remat policy the fewest micro-batches that fit, and those before.

    More of them save memory and never time.
    """
    for kept in rematted(group.config, topology):
        for place, number in enumerate(group.micro_batches):
            try:
                found = estimate(dataclasses.replace(kept, accumulate=number), topology)
            except FornaxError:
                counts[_DIVIDES] += 1
                continue
            yield found
            if found.memory.total <= _ROOMY * found.memory.usable:
                counts[_MORE] += len(group.micro_batches) - place - 1
                break


def _undominated(found: list[Estimate]) -> list[Estimate]:
    """Those that no other beats in memory and time both."""
    front: list[Estimate] = []
    for one in sorted(found, key=lambda e: (e.step_seconds, e.memory.total)):
        if not front or one.memory.total < front[-1].memory.total:
            front.append(one)
    return front
