"""Running programs that a model wrote, held by what the kernel grants an ordinary user."""

from fornax.rewards.sandbox.limits import Limits
from fornax.rewards.sandbox.run import REQUIRED, Outcome, run_program

__all__ = ["REQUIRED", "Limits", "Outcome", "run_program"]
