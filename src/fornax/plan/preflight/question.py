"""One question that a preflight asks, and how its answer becomes a line of the report."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from fornax.config import FornaxError
from fornax.plan.preflight.compare import Comparison
from fornax.plan.preflight.lab import Failed, NotUsed
from fornax.plan.preflight.result import Check, Group

__all__ = ["Question", "answer"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Something to check."""

    group: Group
    name: str
    ask: Callable[[], str | Comparison]
    """Returns what was compared bit by bit in words, or a comparison; raises `Failed` or
    `NotUsed`."""
    alone: bool = False
    """Whether it is one choice without the others: a quick preflight asks it only when the choices
    together fail."""


def answer(question: Question) -> Check:
    """Ask. Whatever the program under test raises is a failure of it."""
    began = time.monotonic()
    status, detail, found = "ok", "", None
    try:
        result = question.ask()
        if isinstance(result, Comparison):
            found = result
            if found.divergence is not None:
                status, detail = "failed", str(found.divergence)
        else:
            detail = result
    except NotUsed as reason:
        status, detail = "off", str(reason)
    except (Failed, FornaxError) as error:
        status, detail = "failed", str(error)
    except Exception as error:
        lines = str(error).strip().splitlines()
        status = "failed"
        detail = f"it does not run: {type(error).__name__}: {lines[0][:300] if lines else ''}"
    return Check(
        group=question.group,
        name=question.name,
        status=status,  # pyrefly: ignore[bad-argument-type]
        detail=detail,
        divergence=None if found is None else found.divergence,
        margin=None if found is None else found.margin,
        seconds=round(time.monotonic() - began, 2),
    )
