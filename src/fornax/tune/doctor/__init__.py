"""Checks of a post-training run before its first step, by a trial run: `fornax tune doctor`."""

from fornax.tune.doctor.checks import check_config, require_sound, run_checks
from fornax.tune.doctor.results import CheckResult, Outcome, paragraphs, table

__all__ = [
    "CheckResult",
    "Outcome",
    "check_config",
    "paragraphs",
    "require_sound",
    "run_checks",
    "table",
]
