"""Running programs that a model wrote, held by what the kernel grants an ordinary user."""

from fornax.rewards.sandbox.limits import Limits
from fornax.rewards.sandbox.run import REQUIRED, Outcome, Tested, run_program, run_tests

__all__ = ["REQUIRED", "Limits", "Outcome", "Tested", "run_program", "run_tests"]
