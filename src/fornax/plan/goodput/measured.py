"""What a real run says of the figures that the simulator needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fornax.config import ConfigError
from fornax.config.goodput import Account, Category, attribute, summarise
from fornax.config.jsonl import read_json_lines

__all__ = ["Measured", "measure"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Means over a run, in seconds; None for what did not happen in it."""

    hosts: int
    state: float
    """Bytes of a snapshot, of all hosts together."""
    step: float
    """A kept step, with what it waited for its data."""
    copy: float | None
    """Training stood still for a snapshot in memory."""
    interval: float | None
    """Steps between the two snapshots around a step: long distances count as often as they last."""
    faults: int
    detection: float | None
    """From a fault to its verdict."""
    recovery: float | None
    """From the verdict to a group that has formed again, with what reading the state took beyond
    `copy`."""
    compile: float | None
    """Compiling in a group that has formed again."""

    @property
    def memory_rate(self) -> float | None:
        """Bytes/s of one host, from its devices into its memory."""
        return self.state / self.hosts / self.copy if self.copy else None


def measure(run_dir: Path) -> Measured:
    """Read a run directory, of a launch or of one process.

    Raises:
      ConfigError: when the run made no steps.
    """
    ledger = run_dir / "goodput.jsonl"
    account, seconds = attribute(run_dir), summarise(ledger).seconds
    records = read_json_lines(ledger)
    facts = [record for record in records if "state_bytes" in record]
    if account.steps < 1 or not facts:
        raise ConfigError(
            f"{run_dir} has no record of steps ({ledger.name}); name the run directory of a fornax "
            "launch or fornax train that made some"
        )
    copies = [span.seconds for span in account.spans if span.cause == "snapshot"]
    copy = sum(copies) / len(copies) if copies else None
    count = len(account.faults)
    recovery = restore = 0.0
    if count:
        recovery = _after_faults(account, "recovery") / count
        restore = _after_faults(account, "restore") / count
    return Measured(
        hosts=facts[-1]["hosts"],
        state=facts[-1]["state_bytes"],
        step=(seconds["step"] + seconds["wait_for_data"]) / account.steps,
        copy=copy,
        interval=_interval(records),
        faults=count,
        detection=seconds["detection"] / count if count else None,
        recovery=recovery + max(0.0, restore - (copy or 0.0)) if count else None,
        compile=_after_faults(account, "compile") / count if count else None,
    )


def _interval(records: Sequence[Mapping[str, Any]]) -> float | None:
    taken = [(r["attempt"], r["step"]) for r in records if r.get("seconds", {}).get("snapshot")]
    apart = [b[1] - a[1] for a, b in pairwise(taken) if a[0] == b[0] and b[1] > a[1]]
    return sum(steps * steps for steps in apart) / sum(apart) if apart else None


def _after_faults(account: Account, cause: Category) -> float:
    """Seconds of a cause since the first fault."""
    since = account.faults[0].began
    return sum(s.seconds for s in account.spans if s.cause == cause and s.begin >= since)
