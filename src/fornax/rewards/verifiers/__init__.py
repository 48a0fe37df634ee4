"""Built-in rewards that check an answer: mathematics, programs, JSON, patterns, Python source."""

from fornax.rewards.verifiers.table import BUILT_IN, build

__all__ = ["BUILT_IN", "build"]
