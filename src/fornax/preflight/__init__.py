"""Is every parallel choice of a config numerically right? Found out on virtual CPU devices."""

from fornax.preflight.report import (
    GROUPS,
    Check,
    Divergence,
    Group,
    Report,
    format_check,
    format_report,
)
from fornax.preflight.run import preflight

__all__ = [
    "GROUPS",
    "Check",
    "Divergence",
    "Group",
    "Report",
    "format_check",
    "format_report",
    "preflight",
]
