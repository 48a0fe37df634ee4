"""The page a run leaves behind: one HTML file with everything in it, made from the run's files."""

from fornax.train.report.page import Section, render, table
from fornax.train.report.plots import bars, lines
from fornax.train.report.training import duration, training_sections, write

__all__ = ["Section", "bars", "duration", "lines", "render", "table", "training_sections", "write"]
