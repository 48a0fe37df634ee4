"""The page a run leaves behind: one HTML file with everything in it, made from the run's files."""

from fornax.train.report.page import Section, render, table
from fornax.train.report.plots import bars, figure, lines, svg
from fornax.train.report.training import duration, training_sections, write

__all__ = [
    "Section",
    "bars",
    "duration",
    "figure",
    "lines",
    "render",
    "svg",
    "table",
    "training_sections",
    "write",
]
