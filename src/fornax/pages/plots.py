"""Pictures of a report as inline SVG: curves over steps, and bars with their values written on."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

__all__ = ["bars", "figure", "grid", "lines", "series", "svg", "thin"]

INK, SOFT = "#1c2330", "#5b6678"
"""Of titles and lines; of axes and legends."""
_GRID = "#e3e7ee"
_BUCKETS = 400
_COLOURS = ("#c2410c", "#1d4ed8", "#047857", "#7c3aed", "#b45309")


def figure(width: float, height: float):
    """An empty picture of that many inches in our style: (figure, axes)."""
    import matplotlib as mpl

    mpl.use("Agg", force=False)
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        made = Figure(figsize=(width, height), layout="constrained")
        axes = made.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GRID)
    axes.tick_params(colors=SOFT, labelsize=9, length=0)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return made, axes


def svg(made, label: str) -> Markup:
    """The picture as inline SVG with an accessible name; its text stays text, and where the page
    has colours of a dark scheme, text and lines take those."""
    import matplotlib as mpl

    out = io.StringIO()
    options = {"svg.fonttype": "none", "svg.hashsalt": label, "font.family": "sans-serif"}
    with mpl.rc_context(options):
        made.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    drawn = text[text.index("<svg") :]
    for colour, variable in ((INK, "ink"), (SOFT, "soft"), (_GRID, "line")):
        drawn = drawn.replace(colour, f"var(--{variable}, {colour})")
    named = drawn.replace("<svg", f'<svg role="img" aria-label="{Markup.escape(label)}"', 1)
    return Markup(named)


def lines(
    title: str,
    series: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    *,
    unit: str = "",
    log: bool = False,
    from_zero: bool = False,
) -> Markup:
    """Curves over steps; each series is (label, steps, values), its last value written beside it.

    Args:
      title: what is drawn; also the picture's accessible name.
      series: curves; those without points are left out.
      unit: written on the y axis.
      log: logarithmic y axis.
      from_zero: start the y axis at 0.
    """
    made, axes = figure(5.4, 2.7)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    shown = [s for s in series if len(s[1])]
    for (label, steps, values), colour in zip(shown, _COLOURS, strict=False):
        marker = "o" if len(steps) < 25 and len(shown) > 1 else None
        last = f"{values[-1]:.4g}"
        named = f"{label} {last}" if len(shown) > 1 else label
        axes.plot(
            steps, values, color=colour, linewidth=1.5, label=named, marker=marker, markersize=3.5
        )
        if len(shown) == 1:
            axes.annotate(
                last,
                (steps[-1], values[-1]),
                xytext=(5, 0),
                textcoords="offset points",
                fontsize=9,
                color=colour,
                va="center",
            )
    if log and any(value > 0 for _, _, values in shown for value in values):
        axes.set_yscale("log")
    if from_zero and shown:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("step", fontsize=9, color=SOFT)
    axes.set_ylabel(unit, fontsize=9, color=SOFT)
    if len(shown) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=SOFT)
    return svg(made, title)


def bars(
    title: str,
    items: Sequence[tuple[str, float]],
    *,
    unit: str = "",
    highlight: str | None = None,
    fmt: str = "{:.3g}",
) -> Markup:
    """Horizontal bars with their values at the end, in the order given.

    Args:
      title: what is drawn; also the picture's accessible name.
      items: (label, value).
      unit: written on the x axis.
      highlight: the label of the bar that is ours.
      fmt: how a value is written.
    """
    made, axes = figure(7.2, 0.75 + 0.36 * len(items))
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    labels = [label for label, _ in items]
    values = [value for _, value in items]
    colours = [_COLOURS[0] if label == highlight else "#94a3b8" for label in labels]
    axes.barh(labels, values, color=colours, height=0.62)
    for row, value in enumerate(values):
        axes.annotate(
            fmt.format(value),
            (value, row),
            xytext=(5, 0),
            textcoords="offset points",
            fontsize=9,
            color=INK,
            va="center",
        )
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    axes.margins(x=0.12)
    axes.set_xlabel(unit, fontsize=9, color=SOFT)
    return svg(made, title)


def grid(
    title: str,
    values: Sequence[Sequence[float]],
    *,
    rows: str,
    columns: str,
    unit: str,
    shares: bool = False,
) -> Markup:
    """Numbers as colours: of ratios 1 is white, a quarter blue, four red.

    Args:
      title: what is drawn; also the picture's accessible name.
      values: each above or equal to 0, all rows of one length.
      rows: what the rows are, written on the y axis.
      columns: what the columns are, written on the x axis.
      unit: written beside the scale.
      shares: whether they are shares of a whole, and not ratios: 0 is white, 1 red.
    """
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import FixedLocator, NullFormatter

    made, axes = figure(7.2, min(6.0, 1.4 + 0.22 * len(values)))
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.grid(visible=False)
    low, high = (0.0, 1.0) if shares else (0.25, 4.0)
    image = axes.imshow(
        [[min(high, max(low, value)) for value in row] for row in values],
        norm=Normalize(low, high) if shares else LogNorm(low, high),
        cmap="Reds" if shares else "RdBu_r",
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_ylabel(rows, fontsize=9, color=SOFT)
    axes.set_xlabel(columns, fontsize=9, color=SOFT)
    ticks = {0.25: "1/4 or less", 0.5: "1/2", 1: "1", 2: "2", 4: "4 or more"}
    if shares:
        ticks = {0: "none", 0.5: "half", 1: "all"}
    bar = made.colorbar(image, ax=axes, ticks=FixedLocator(list(ticks)))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.ax.set_yticklabels(list(ticks.values()))
    bar.ax.tick_params(colors=SOFT, labelsize=9, length=0, which="both")
    bar.set_label(unit, fontsize=9, color=SOFT)
    bar.outline.set_visible(False)
    return svg(made, title)


def series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of a metric, where it was recorded."""
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def thin(steps: list[int], values: list[float]) -> tuple[list[float], list[float]]:
    """Means over equal runs of points, so that a million steps draw as a few hundred points."""
    width = max(1, len(steps) // _BUCKETS)
    groups = [slice(i, i + width) for i in range(0, len(steps), width)]
    return (
        [sum(steps[g]) / len(steps[g]) for g in groups],
        [sum(values[g]) / len(values[g]) for g in groups],
    )
