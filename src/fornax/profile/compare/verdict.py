"""A comparison in a paragraph: what got slower, by how much, from which line; and as plain data."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from fornax.profile.compare.types import Change, Comparison

_NAMED = 4


def verdict(found: Comparison) -> str:
    """The comparison in a few sentences."""
    step = found.step
    change = f"{step.value - 1:+.1%} [{step.low - 1:+.1%}, {step.high - 1:+.1%}]"
    parts = [f"{_judgement(found)}: time of a step {change}."]
    parts += [_list("What adds time", found.slower), _list("What saves time", found.faster)]
    if not found.slower and not found.faster:
        parts.append("No operation changed by more than noise and 1 % of the step.")
    parts.append(_work(found))
    if found.calibrated:
        parts.append(
            f"{found.calibrated} operations that are the same in both took {found.machine:.3f} "
            f"times as long together, which is taken for the machine's doing and taken out "
            f"(noise of two runs: {found.noise:.1%} an operation)."
        )
    return " ".join(
        [*filter(None, parts), *(f"{note[0].upper()}{note[1:]}." for note in found.notes)]
    )


def _judgement(found: Comparison) -> str:
    allowed = f"the {100 * found.fail_over:.3g} % allowed"
    if found.failed:
        return f"Slower by more than {allowed}"
    if found.step.low > 1 or found.slower:
        beyond = found.step.value > 1 + found.fail_over
        return (
            f"Slower, not surely by more than {allowed}" if beyond else f"Slower within {allowed}"
        )
    if found.step.high < 1:
        return "Faster"
    return "No significant difference"


def _list(title: str, changes: Sequence[Change]) -> str:
    if not changes:
        return ""
    named = "; ".join(_one(change) for change in changes[:_NAMED])
    rest = f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
    return f"{title}: {named}{rest}."


def _one(change: Change) -> str:
    new = {"new": "new ", "gone": "no longer there: "}.get(change.kind, "")
    source = f" from {_short(change.source)}" if change.source else ""
    times = "" if change.kind in ("new", "gone") else f", {change.ratio.value:.2f} times as long"
    key = _short(change.key)
    source = "" if source.endswith(key) else source
    return f"{new}{key}{source} ({change.share:+.1%} of a step{times})"


def _short(source: str) -> str:
    """A line without the folders of a file that is not Fornax's."""
    return source.rpartition("/")[2] if source.startswith("/") else source


def _work(found: Comparison) -> str:
    return "; ".join(
        [
            f"FLOPs of a step {_grew(found.before.flops, found.after.flops)}",
            f"bytes {_grew(found.before.bytes, found.after.bytes)}.",
        ]
    )


def _grew(before: float, after: float) -> str:
    if before == after:
        return f"unchanged at {after:.4g}"
    share = f" ({after / before - 1:+.2%})" if before else ""
    return f"{before:.4g} -> {after:.4g}{share}"


def figures(found: Comparison) -> dict[str, Any]:
    """All as JSON's types, NaN as null: the fields of `Comparison`, `failed`, `verdict`."""
    return {
        "verdict": verdict(found),
        "failed": found.failed,
        **_plain(dataclasses.asdict(found)),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
