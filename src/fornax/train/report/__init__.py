"""The page a run leaves behind: one HTML file with everything in it, made from the run's files."""

from fornax.train.report.training import cost_line, duration, training_sections, write

__all__ = ["cost_line", "duration", "training_sections", "write"]
