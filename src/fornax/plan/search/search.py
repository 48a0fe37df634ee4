"""The search: estimate every plan, prune, compile the most promising, correct, rank.

It is deterministic: the same arguments give the same plans in the same order.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from fornax.config import diff
from fornax.config.errors import ConfigError
from fornax.plan.closed_form import EVEN
from fornax.plan.cost.estimate import Estimate
from fornax.plan.format import format_bound, format_bytes, format_seconds
from fornax.plan.search.space import Candidates, find_candidates
from fornax.plan.topology import Topology
from fornax.train import TrainConfig

MARGIN = 0.95
"""Share of the usable memory that an estimate may take; a compiled program may take all."""
_HOPE = 1.05
"""Share up to which a plan is worth compiling: estimates miss either way."""
_CLASSES = {
    "attention": "attention",
    "attention_projections": "the attention's projections",
    "linear_attention": "linear attention",
    "mlp": "the MLP",
    "experts": "the experts",
    "dispatch": "tokens' ways to their experts and back",
    "logits_loss": "the output projection and the loss",
    "norms_elementwise": "norms and element-wise work",
    "rounding": "rounding to 8 bits",
    "embedding": "the embedding",
    "layer_inputs": "the layers' further inputs",
    "modules": "modules that predict further tokens, outside their layers",
    "optimizer": "the optimizer",
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What compiling a candidate showed."""

    total_bytes: int | None
    """The compiler's memory for the program, of a chip; None when it did not say."""
    step_seconds: float | None
    """Predicted from the compiled program; None when that is not known."""
    problem: str | None = None
    """Why it did not compile (one line), such as running out of memory by this much."""


Compile = Callable[[TrainConfig, Topology], Measured]
"""Compiles a candidate; every call counts against the budget."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan."""

    config: TrainConfig
    """The whole configuration, ready to use."""
    changes: Mapping[str, object]
    """Keys that differ from the configuration searched from, as nested mappings."""
    estimate: Estimate
    measured: Measured | None
    """What compilation showed, or None: estimate only."""
    step_seconds: float
    """Best known: from the compiled program, else the estimate with the search's correction."""
    total_bytes: int
    """Best known memory of a chip, likewise."""
    reason: str
    """Why it is good and what bounds it, in words."""

    @property
    def tokens_per_second_per_chip(self) -> float:
        """What the search maximises."""
        estimate = self.estimate
        return estimate.tokens / self.step_seconds / estimate.topology.num_chips


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best few plans and how they were found."""

    best: tuple[Candidate, ...]
    """Best first; empty when nothing fits."""
    given: Candidate | None
    """The configuration as it came, or None when it cannot run on the topology."""
    given_problem: str | None
    """Why it cannot, or does not fit."""
    considered: int
    """Combinations looked at."""
    pruned: Mapping[str, int]
    """Reason in words to how many combinations it left out."""
    compiled: int
    """Compilations made."""
    failed: tuple[tuple[str, str], ...]
    """Compiled and found wanting: (plan in words, problem)."""
    closest: Estimate | None
    """Where nothing fits: the combination that needs the least memory."""
    notes: tuple[str, ...]


def search(
    config: TrainConfig,
    topology: Topology,
    *,
    budget: int = 0,
    compile: Compile | None = None,  # noqa: A002
    keep: int = 3,
    expert_load: float = EVEN,
) -> SearchResult:
    """The plans that train fastest on a topology, best first.

    Args:
      config: the run; model, optimizer, dtypes, length and batch size stay.
      topology: the chips.
      budget: most compilations to make; 0 estimates only.
      compile: compiles one plan; needed with a budget.
      keep: how many plans to return.
      expert_load: as `estimate` takes it.

    Raises:
      ConfigError: for a budget without `compile`, or a model that is not given.
    """
    if budget > 0 and compile is None:
        raise ConfigError(f"budget={budget} compilations need a compiler; pass one, or budget=0")
    found = find_candidates(config, topology, expert_load=expert_load)
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
            (_plan_text(found.fronts[index].config), measured.problem)
            for index, measured in sorted(state.measured.items())
            if measured.problem is not None
        ),
        closest=None if best else found.closest,
        notes=_notes(topology, budget, state),
    )


@dataclass(kw_only=True)
class _State:
    """What is known of each candidate so far."""

    config: TrainConfig
    found: Candidates
    measured: dict[int, Measured] = field(default_factory=dict)
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
        return [
            self._candidate(self.found.fronts[index], index)
            for index in [*compiled, *others][:keep]
        ]

    def _candidate(self, estimate: Estimate, index: int | None) -> Candidate:
        measured = None if index is None else self.measured.get(index)
        if index is None:
            seconds = estimate.step_seconds * self.time_factor
            size = round(estimate.memory.total * self.memory_factor)
        else:
            seconds, size = self.seconds(index) * estimate.tokens, self.bytes(index)
        return Candidate(
            config=estimate.config,
            changes=_changed_keys(self.config, estimate.config),
            estimate=estimate,
            measured=measured,
            step_seconds=seconds,
            total_bytes=size,
            reason=_reason(estimate, size, seconds),
        )

    def given(self) -> Candidate | None:
        """The plan that the search started from."""
        estimate = self.found.given
        return None if estimate is None else self._candidate(estimate, None)

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


def _pruned(found: Candidates, state: _State) -> Iterable[tuple[str, int]]:
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


def _changed_keys(old: TrainConfig, new: TrainConfig) -> dict[str, object]:
    """Nested mappings of the keys that differ, with their new values."""
    changes: dict[str, object] = {}
    for change in diff(old, new):
        *parents, last = change.path.split(".")
        node = changes
        for parent in parents:
            node = cast("dict[str, object]", node.setdefault(parent, {}))
        node[last] = change.new
    return changes


def _plan_text(config: TrainConfig) -> str:
    """A plan in one line: mesh, micro-batches, what is kept."""
    sizes = config.mesh.axis_sizes()
    mesh = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "one device"
    stages = ", stages across slices" if config.mesh.across == "stage" else ""
    text = f"{mesh}{stages}, batch {config.batch_size}"
    if config.accumulate > 1:
        text += f" in {config.accumulate} micro-batches"
    text += f", remat {config.remat}"
    if config.remat_save:
        text += f", keeping {', '.join(config.remat_save)}"
    if config.remat_offload:
        text += f", on the host {', '.join(config.remat_offload)}"
    return text


def _reason(estimate: Estimate, total_bytes: int, step_seconds: float) -> str:
    """Why a plan is good and what bounds it."""
    step = estimate.step_seconds
    largest = max(estimate.step.work, key=lambda row: row.seconds)
    share = total_bytes / estimate.memory.usable
    rate = estimate.tokens / step_seconds / estimate.topology.num_chips
    bound = format_bound(estimate.step.bound, estimate.topology.chip.platform)
    sentences = [
        f"{rate:,.0f} tokens/s per chip: bound by {bound}; "
        f"{largest.seconds / step:.0%} of the step is {_CLASSES[largest.name]}",
        _exchange_text(estimate),
        _remat_text(estimate),
        f"{share:.0%} of the usable memory is taken",
    ]
    return "; ".join(sentence for sentence in sentences if sentence)


def _exchange_text(estimate: Estimate) -> str:
    if not estimate.step.collectives:
        return "chips exchange nothing"
    communication = sum(row.seconds for row in estimate.step.collectives)
    hidden = 1 - estimate.step.exposed_seconds / max(communication, 1e-30)
    exposed = estimate.step.exposed_seconds / estimate.step_seconds
    if exposed < 0.005:
        return "exchanges are hidden behind computation"
    worst = max(estimate.step.collectives, key=lambda row: row.exposed_seconds)
    return (
        f"exchanges cost {exposed:.0%} of the step ({hidden:.0%} of them hidden), most of it to "
        f"{worst.what} over {', '.join(worst.axes) or 'PCIe'}"
    )


def _remat_text(estimate: Estimate) -> str:
    config = estimate.config
    moved = " and kept values go to the host and back" if config.remat_offload else ""
    again = estimate.repeated_flops / estimate.step.flops
    if again < 0.005:
        return f"no product is computed twice{moved}"
    return f"{again:.0%} of the arithmetic is done a second time to save memory{moved}"


def search_text(result: SearchResult) -> str:
    """How far the search went, in a sentence."""
    left = ", ".join(f"{count:,} for {reason}" for reason, count in result.pruned.items())
    text = f"{result.considered:,} plans considered"
    text += f"; left out: {left}" if left else ""
    text += f"; {result.compiled} compiled"
    if result.failed:
        failed = "; ".join(f"{plan}: {problem}" for plan, problem in result.failed)
        text += f", of which {len(result.failed)} did not fit or compile ({failed})"
    if result.given is not None:
        given = result.given
        text += (
            f". As given: {format_seconds(given.step_seconds)} per step, "
            f"{given.tokens_per_second_per_chip:,.0f} tokens/s/chip, "
            f"{format_bytes(given.total_bytes)}"
        )
    if result.given_problem:
        text += f"; as given, {result.given_problem}"
    return f"{text}."


def nothing_fits(name: str, topology: Topology, result: SearchResult) -> str:
    """What to do where no plan fits."""
    text = f"no plan of {name} that was looked at fits {topology.name}"
    if result.closest is not None:
        memory = result.closest.memory
        text += (
            f": the one that needs least takes {format_bytes(memory.total)} of a chip's "
            f"{format_bytes(memory.usable)}"
        )
    return f"{text}; use more chips, a shorter seq_len or a smaller batch_size"
