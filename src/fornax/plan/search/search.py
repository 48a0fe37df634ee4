"""The search: estimate every plan, prune, compile the most promising, correct, rank.

It is deterministic: the same arguments give the same plans in the same order.
"""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable

from fornax.config.errors import ConfigError
from fornax.plan.analytic import Estimate
from fornax.plan.search.candidates import Found, find_candidates
from fornax.plan.search.changes import changed_keys
from fornax.plan.search.reason import plan_words, reason_words
from fornax.plan.search.result import Candidate, Compile, Measured, SearchResult
from fornax.plan.topology import Topology
from fornax.train import TrainConfig

__all__ = ["search"]

MARGIN = 0.95
"""Share of the usable memory that an estimate may take; a compiled program may take all."""
_HOPE = 1.05
"""Share up to which a plan is worth compiling: estimates miss either way."""


def search(
    config: TrainConfig,
    topology: Topology,
    *,
    budget: int = 0,
    compile: Compile | None = None,  # noqa: A002
    any_batch: bool = False,
    keep: int = 3,
) -> SearchResult:
    """The plans that train fastest on a topology, best first.

    Args:
      config: the run; model, optimizer, dtypes, length and (unless `any_batch`) batch size stay.
      topology: the chips.
      budget: most compilations to make; 0 estimates only.
      compile: compiles one plan; needed with a budget.
      any_batch: whether the batch size may change; the rate of tokens then decides.
      keep: how many plans to return.

    Raises:
      ConfigError: for a budget without `compile`, or a model that is not given.
    """
    if budget > 0 and compile is None:
        raise ConfigError(f"budget={budget} compilations need a compiler; pass one, or budget=0")
    found = find_candidates(config, topology, any_batch=any_batch)
    state = _State(config=config, found=found)
    if compile is not None:
        state.compile_best(compile, topology, budget, keep)
    best = state.best(keep)
    return SearchResult(
        best=tuple(best),
        given=state.given(),
        given_problem=found.given_problem or state.given_problem(),
        considered=found.considered,
        pruned=dict(_pruned(found, state)),
        compiled=len(state.measured),
        failed=tuple(
            (plan_words(found.fronts[index].config), measured.problem)
            for index, measured in sorted(state.measured.items())
            if measured.problem is not None
        ),
        closest=None if best else found.closest,
        memory_factor=state.memory_factor,
        time_factor=state.time_factor,
        notes=_notes(topology, budget, state),
    )


@dataclasses.dataclass(kw_only=True)
class _State:
    """What is known of each candidate so far."""

    config: TrainConfig
    found: Found
    measured: dict[int, Measured] = dataclasses.field(default_factory=dict)
    memory_factor: float = 1.0
    time_factor: float = 1.0

    def seconds(self, index: int) -> float:
        """Best known time of a step for each token: compiled, else corrected."""
        measured = self.measured.get(index)
        estimate = self.found.fronts[index]
        known = measured.step_seconds if measured else None
        seconds = estimate.step_seconds * self.time_factor if known is None else known
        return seconds / estimate.tokens

    def bytes(self, index: int) -> int:
        """Best known memory."""
        measured = self.measured.get(index)
        known = measured.total_bytes if measured else None
        estimated = self.found.fronts[index].memory.total * self.memory_factor
        return round(estimated) if known is None else known

    def fits(self, index: int, share: float) -> bool:
        """Whether it fits as far as is known."""
        measured = self.measured.get(index)
        if measured is not None and measured.problem is not None:
            return False
        limit = self.found.fronts[index].memory.usable
        return self.bytes(index) <= limit * (1.0 if measured is not None else share)

    def order(self, share: float) -> list[int]:
        """Candidates that fit, fastest first."""
        fitting = [i for i in range(len(self.found.fronts)) if self.fits(i, share)]
        return sorted(fitting, key=lambda i: (self.seconds(i), self.bytes(i), i))

    def compile_best(self, compile: Compile, topology: Topology, budget: int, keep: int) -> None:  # noqa: A002
        """Compile the most promising ones, learning from each."""
        for _ in range(budget):
            order = self.order(_HOPE)
            waiting = [index for index in order if index not in self.measured]
            if not waiting:
                return
            done = [index for index in order if index in self.measured]
            ahead = [i for i in done if self.seconds(i) <= self.seconds(waiting[0])]
            if len(ahead) >= keep:
                return
            self.measured[waiting[0]] = compile(self.found.fronts[waiting[0]].config, topology)
            self._correct()

    def _correct(self) -> None:
        """The factors between estimates and compiled programs, the median of those seen."""
        memory, time = [], []
        for index, measured in self.measured.items():
            estimate = self.found.fronts[index]
            if measured.total_bytes:
                memory.append(measured.total_bytes / estimate.memory.total)
            if measured.step_seconds:
                time.append(measured.step_seconds / estimate.step_seconds)
        self.memory_factor = statistics.median(memory) if memory else 1.0
        self.time_factor = statistics.median(time) if time else 1.0

    def best(self, keep: int) -> list[Candidate]:
        """The fastest that fit; compiled ones first where any was compiled."""
        order = self.order(MARGIN)
        compiled = [index for index in order if index in self.measured]
        others = [index for index in order if index not in self.measured]
        return [self._candidate(index) for index in [*compiled, *others][:keep]]

    def _candidate(self, index: int) -> Candidate:
        return self._made(self.found.fronts[index], index)

    def _made(self, estimate: Estimate, index: int | None) -> Candidate:
        measured = None if index is None else self.measured.get(index)
        if index is None:
            seconds = estimate.step_seconds * self.time_factor
            size = round(estimate.memory.total * self.memory_factor)
        else:
            seconds, size = self.seconds(index) * estimate.tokens, self.bytes(index)
        return Candidate(
            config=estimate.config,
            changes=changed_keys(self.config, estimate.config),
            estimate=estimate,
            measured=measured,
            step_seconds=seconds,
            total_bytes=size,
            reason=reason_words(estimate, size, seconds),
        )

    def given(self) -> Candidate | None:
        """The plan that the search started from."""
        estimate = self.found.given
        return None if estimate is None else self._made(estimate, None)

    def given_problem(self) -> str | None:
        """Why the plan it started from does not fit, if so."""
        given = self.given()
        if given is None or given.total_bytes <= given.estimate.memory.usable:
            return None
        over = given.total_bytes - given.estimate.memory.usable
        return (
            f"it needs {given.total_bytes / 2**30:.1f} GiB of a chip's "
            f"{given.estimate.memory.usable / 2**30:.1f}, {over / 2**30:.1f} too many"
        )


def _pruned(found: Found, state: _State) -> Iterable[tuple[str, int]]:
    counts: Counter[str] = Counter(found.pruned)
    for index in range(len(found.fronts)):
        if index not in state.measured and not state.fits(index, MARGIN):
            counts["estimated memory too close to the limit"] += 1
    return sorted((reason, count) for reason, count in counts.items() if count)


def _notes(topology: Topology, budget: int, state: _State) -> tuple[str, ...]:
    notes = []
    if budget == 0:
        notes.append(
            "estimated only: nothing was compiled, so memory may be 10 % off and times more"
        )
    elif not state.measured:
        notes.append("nothing was worth compiling")
    if topology.chip.platform != "tpu":
        notes.append(f"there is no compiler for {topology.chip.name} here: figures are estimates")
    return tuple(notes)
