"""One command from the text on this machine to a portable model, every stage the real one."""

from fornax.quickstart.config import SIZES, QuickstartConfig
from fornax.quickstart.pipeline import run

__all__ = ["SIZES", "QuickstartConfig", "run"]
