"""What a search found: the best few plans with reasons, and what was left out for which reason."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fornax.config import dump_yaml
from fornax.config.text import write_yaml
from fornax.plan.analytic.result import Estimate
from fornax.plan.topology import Topology
from fornax.train import TrainConfig

__all__ = ["Candidate", "Compile", "Measured", "SearchResult"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What compiling a candidate showed."""

    total_bytes: int | None
    """The compiler's memory for the program, of a chip; None when it did not say."""
    step_seconds: float | None
    """Predicted from the compiled program; None when that is not known."""
    problem: str | None = None
    """Why it did not compile (one line), such as running out of memory by so much."""
    artifact: Any = None
    """Whatever the caller wants back with the candidate."""


Compile = Callable[[TrainConfig, Topology], Measured]
"""Compiles a candidate; every call counts against the budget."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan."""

    config: TrainConfig
    """The whole configuration, ready to use."""
    changes: Mapping[str, Any]
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

    @property
    def yaml(self) -> str:
        """The changed keys as YAML, to lay over the configuration searched from."""
        return write_yaml(dict(self.changes))

    @property
    def full_yaml(self) -> str:
        """The whole configuration as YAML."""
        return dump_yaml(self.config)


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
    memory_factor: float
    """Compiled memory over estimated, the median of what was compiled; 1 without."""
    time_factor: float
    """Compiled-program time over estimated, likewise."""
    notes: tuple[str, ...]
