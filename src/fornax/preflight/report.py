"""What a preflight found: one `Check` a line, all of them a `Report`; as data, JSON and text."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "GROUPS",
    "Check",
    "Divergence",
    "Group",
    "Report",
    "format_check",
    "format_report",
]

_GROUP = 12
_NAME = 66

Group = Literal[
    "rules",
    "data",
    "attention",
    "packing",
    "accumulation",
    "remat",
    "mesh",
    "z_loss",
    "experts",
    "precision",
    "checkpoint",
]

GROUPS: dict[Group, str] = {
    "rules": "look at `mesh.rules` and the sizes in `mesh`: the table in docs/guides/training.md "
    "says which logical axis each array carries",
    "data": "look at how the process finds its rows (`train.hosts`), `data.virtual_shards`, and "
    "any source, transform or packing of your own",
    "attention": "look at the implementation named (`kernels.attention`): its mask, its segment "
    "ids, its window and softcap, its gradient",
    "packing": "look at segment ids and positions: an attention that ignores them, or a loss "
    "weight across the end of a document",
    "accumulation": "look at how micro-batches add up: sums of losses and of weights, one division "
    "at the end, never a mean of means",
    "remat": "look at what the backward pass computes again: a function that is not pure, or a "
    "random key that is another the second time",
    "mesh": "look at what runs device by device (`jax.shard_map`): in_specs and out_specs, and a "
    "psum over each axis that the sum is divided over",
    "z_loss": "look at the loss: the z-loss is weight * log(sum(exp(logits)))^2, a token of weight "
    "0 excepted",
    "experts": "look at the losses of routers: shares and means are of all tokens of the batch, "
    "wherever they are",
    "precision": "look at what leaves float32: norms, softmax, the loss and sums over tokens must "
    "stay in it",
    "checkpoint": "look at the shardings that arrays are restored with: the mesh of now, not that "
    "of the checkpoint",
}
"""The groups of checks in the order they run, and where to look when one fails."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where two computations that should agree part ways."""

    what: str
    """`loss`, or `gradient of layers/attention/q/kernel (layer 1)`: the first in model order."""
    difference: float
    """Largest absolute difference of an element."""
    tolerance: float
    """The largest that rounding explains."""
    count: int = 1
    """How many arrays diverge."""
    of: int = 1
    """How many were compared."""

    def __str__(self) -> str:
        more = f" ({self.count} of {self.of} arrays diverge)" if self.of > 1 else ""
        return (
            f"{self.what} differs by {self.difference:.3g}, where rounding explains "
            f"{self.tolerance:.2g}{more}"
        )


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report."""

    group: Group
    name: str
    status: Literal["ok", "failed", "off"]
    """`off`: the config does not use it, so there was nothing to check."""
    detail: str = ""
    """What was compared, or what failed."""
    divergence: Divergence | None = None
    margin: float | None = None
    """The largest difference as a share of its tolerance; None where bits were compared."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return self.status != "failed"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything a preflight found."""

    shrunk: dict[str, Any]
    """What ran in place of the config: sizes by name."""
    checks: tuple[Check, ...]
    quick: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)

    @property
    def first_failure(self) -> Check | None:
        """The first check that failed."""
        return next((check for check in self.checks if not check.ok), None)

    def paragraph(self) -> str:
        """What failed first, and what to look at; or that nothing did."""
        failed = [check for check in self.checks if not check.ok]
        ran = sum(check.status != "off" for check in self.checks)
        if not failed:
            return f"all {ran} checks passed in {self.seconds:.0f} s"
        first = failed[0]
        return (
            f"{len(failed)} of {ran} checks failed, first {first.group}: {first.name}: "
            f"{first.detail}. What to do: {GROUPS[first.group]}"
        )

    def to_json(self) -> str:
        """The report as JSON."""
        content = {"ok": self.ok, "summary": self.paragraph(), **dataclasses.asdict(self)}
        return json.dumps(content, indent=1)


def format_check(check: Check) -> str:
    """One line: status, group, what was checked, seconds; the reason where it is not ok."""
    line = f"{check.status:<7}{check.group:<{_GROUP}} {check.name:<{_NAME}} {_measure(check):>18}"
    line = f"{line} {check.seconds:6.1f} s"
    if check.status == "ok" and not check.detail:
        return line
    return f"{line}\n{'':<{7 + _GROUP}} {check.detail}"


def _measure(check: Check) -> str:
    """How much of its tolerance the largest difference takes."""
    if check.status != "ok":
        return ""
    return "bit for bit" if check.margin is None else f"{check.margin:.1%} of tolerance"


def format_report(report: Report) -> str:
    """What ran, and what it means."""
    sizes = report.shrunk
    mesh = " x ".join(f"{axis}={size}" for axis, size in sizes["mesh"].items()) or "one device"
    return f"ran with {sizes['summary']}, on {mesh}\n{report.paragraph()}"
