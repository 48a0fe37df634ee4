"""A preflight as text: a line for each check as it comes, and what it all means at the end."""

from fornax.plan.preflight.result import Check, Report

__all__ = ["show_check", "show_report"]

_GROUP = 12
_NAME = 66


def show_check(check: Check) -> str:
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


def show_report(report: Report) -> str:
    """What ran, and what it means."""
    sizes = report.shrunk
    mesh = " x ".join(f"{axis}={size}" for axis, size in sizes["mesh"].items()) or "one device"
    return (
        f"ran with {sizes['num_layers']} layers, width {sizes['hidden_size']}, "
        f"{sizes['num_heads']} heads over {sizes['kv_heads']} key heads, "
        f"{sizes['batch_size']} rows of {sizes['seq_len']} tokens, on {mesh}\n{report.paragraph()}"
    )
