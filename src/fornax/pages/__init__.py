"""Pages that stand alone in one HTML file: their frame, tables and pictures."""

from fornax.pages.page import STATIC, Section, bullets, fill, render, table
from fornax.pages.plots import INK, SOFT, bars, figure, grid, lines, series, svg, thin
from fornax.pages.standalone import SCRIPTS, STYLES, modules, standalone, to_json

__all__ = [
    "INK",
    "SCRIPTS",
    "SOFT",
    "STATIC",
    "STYLES",
    "Section",
    "bars",
    "bullets",
    "figure",
    "fill",
    "grid",
    "lines",
    "modules",
    "render",
    "series",
    "standalone",
    "svg",
    "table",
    "thin",
    "to_json",
]
