"""What a check finds: a verdict on one foundation of a run, and how to fix what is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["CheckResult", "Outcome", "failed", "paragraphs", "passed", "skipped", "table"]


Verdict = Literal["pass", "fail", "skip"]


@dataclass(frozen=True)
class Outcome:
    """What one check found."""

    verdict: Verdict
    text: str
    """What was measured; of a failure its cause and cure; of a check left out the reason."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """An outcome with the name of its check."""

    check: str
    outcome: Outcome
    seconds: float
    """What it took, with all that it was the first to need."""


def passed(text: str) -> Outcome:
    """All is well; `text` is what was measured."""
    return Outcome("pass", text)


def failed(text: str) -> Outcome:
    """One paragraph: what was measured, its likely cause, its cure."""
    return Outcome("fail", text)


def skipped(text: str) -> Outcome:
    """The check does not apply; `text` says why."""
    return Outcome("skip", text)


def table(results: Sequence[CheckResult]) -> str:
    """A line for each check, and the time of all."""
    width = max(len(result.check) for result in results)
    lines = [
        f"{result.check:<{width}}  {result.outcome.verdict}  {result.seconds:5.1f} s  "
        f"{_short(result.outcome)}"
        for result in results
    ]
    total = sum(result.seconds for result in results)
    return "\n".join([*lines, f"{len(results)} checks in {total:.1f} s"])


def _short(outcome: Outcome) -> str:
    return "see below" if outcome.verdict == "fail" else outcome.text


def paragraphs(results: Sequence[CheckResult]) -> str:
    """The failures, a paragraph each; empty where there is none."""
    return "\n\n".join(
        f"{result.check}: {result.outcome.text}"
        for result in results
        if result.outcome.verdict == "fail"
    )
