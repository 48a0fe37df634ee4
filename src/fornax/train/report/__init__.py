"""The page a run leaves behind: one HTML file with everything in it, made from the run's files."""

from fornax.train.report.page import Section, bullets, render, table
from fornax.train.report.plots import INK, SOFT, bars, figure, lines, svg
from fornax.train.report.training import duration, training_sections, write

__all__ = [
    "INK",
    "SOFT",
    "Section",
    "bars",
    "bullets",
    "duration",
    "figure",
    "lines",
    "render",
    "svg",
    "table",
    "training_sections",
    "write",
]
