"""Is every parallel choice of a config numerically right? Found out on virtual CPU devices."""

from fornax.plan.preflight.parent import preflight
from fornax.plan.preflight.result import GROUPS, Check, Divergence, Group, Report
from fornax.plan.preflight.show import show_check, show_report

__all__ = [
    "GROUPS",
    "Check",
    "Divergence",
    "Group",
    "Report",
    "preflight",
    "show_check",
    "show_report",
]
