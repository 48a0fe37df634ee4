"""The charts of a page: a chip's memory against its limit, the roofline, latency over batch."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from fornax.pages import INK, SOFT, figure, svg
from fornax.plan.facts import ClassOfWork, Hardware
from fornax.plan.format import format_bytes, format_count
from fornax.plan.report.document import MemoryChart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE, _ALARM, _GRID = "#cbd2dd", "#b91c1c", "#e3e7ee"
_OWNER_COLOURS = {
    "parameters": "#c2410c",
    "weights": "#c2410c",
    "optimizer": "#f59e0b",
    "gradients": "#7c3aed",
    "sampler and hidden states": "#7c3aed",
    "states of linear layers": "#1d4ed8",
    "activations": "#1d4ed8",
    "temporaries": "#60a5fa",
    "reference": "#9a3412",
    "sampler": "#047857",
    "cache": "#047857",
    "batch": "#94a3b8",
    "programs": "#94a3b8",
    "other": "#cbd5e1",
}
"""Owners of memory in the order they stack."""
_COLOURS = ("#c2410c", "#1d4ed8", "#047857", "#7c3aed", "#b45309", "#0e7490", "#be185d")
_GIB = 1 << 30


def memory_picture(chart: MemoryChart) -> Markup:
    """A stacked bar a program, in GiB, and the line that a program must not cross."""
    title, bars = "Memory of one chip, GiB", chart.bars
    picture, axes = figure(7.6, 1.45 + 0.5 * len(bars))
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    rows = range(len(bars))
    left = [0.0] * len(bars)
    for owner in _owners(chart):
        sizes = [dict(bar.parts).get(owner, 0) for bar in bars]
        widths = [size / _GIB for size in sizes]
        colour = _OWNER_COLOURS.get(owner, "#64748b")
        label = f"{owner} {format_bytes(max(sizes))}"
        axes.barh(rows, widths, left=left, color=colour, height=0.6, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    usable = bars[0].usable / _GIB
    over = any(bar.total > bar.usable for bar in bars)
    colour = _ALARM if over else INK
    axes.axvline(usable, color=colour, linewidth=1.5, linestyle=(0, (4, 2)))
    axes.set_xlim(0, max([usable, *left]) * 1.16)
    axes.annotate(
        f"usable {usable:.1f}",
        (usable, -0.5),
        xytext=(-4, 1),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9,
        color=colour,
        annotation_clip=False,
    )
    for row, end in enumerate(left):
        axes.annotate(
            f"{end:.1f}",
            (end, row),
            xytext=(5, 0),
            textcoords="offset points",
            fontsize=9,
            va="center",
            color=_ALARM if end > usable else INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85},
        )
    axes.set_yticks(rows, [bar.name for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    axes.legend(
        frameon=False,
        fontsize=9,
        labelcolor=SOFT,
        ncols=4,
        loc="upper left",
        bbox_to_anchor=(0, -0.16 - 0.12 / len(bars)),
        borderaxespad=0.4,
        handlelength=1.0,
    )
    return svg(picture, title)


def _owners(chart: MemoryChart) -> list[str]:
    found = {owner for bar in chart.bars for owner, size in bar.parts if size}
    known = [owner for owner in _OWNER_COLOURS if owner in found]
    return [*known, *sorted(found - set(known))]


def roofline_picture(work: Sequence[ClassOfWork], hardware: Hardware) -> Markup:
    """FLOP/s over FLOPs a byte, both logarithmic: the chip's roof and a point a class.

    A point's area is its share of the step's time. Classes without FLOPs have no place here.
    """
    title = "Roofline of one chip"
    shown = [one for one in work if one.flops and one.bytes and one.seconds]
    picture, axes = figure(7.6, 4.4)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ridge = hardware.peak_flops / hardware.memory_bandwidth
    low = min([one.intensity for one in shown] + [ridge / 30]) / 3
    high = max([one.intensity for one in shown] + [ridge * 10]) * 3
    roof_x = [low, ridge, high]
    roof_y = [low * hardware.memory_bandwidth, hardware.peak_flops, hardware.peak_flops]
    axes.plot(roof_x, roof_y, color=INK, linewidth=1.5)
    axes.fill_between(roof_x, roof_y, color="#f6f8fb")
    whole = sum(one.seconds for one in work) or 1.0
    points = []
    for one, colour in zip(shown, itertools.cycle(_COLOURS), strict=False):
        achieved, share = one.flops / one.seconds, one.seconds / whole
        axes.scatter(
            [one.intensity],
            [achieved],
            s=30 + 1400 * share,
            color=colour,
            alpha=0.75,
            linewidths=0,
            zorder=3,
        )
        label = f"{one.name.replace('_', ' ')} {share:.0%}"
        points.append((one.intensity, achieved, colour, label))
    bottom = min([y for _, y, _, _ in points] + [hardware.peak_flops / 100]) / 4
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, hardware.peak_flops * 3)
    _label_points(axes, points, (low, high), (bottom, hardware.peak_flops * 3))
    axes.annotate(
        f"{format_count(hardware.peak_flops, 'FLOP/s')} in {hardware.peak_dtype}",
        (ridge, hardware.peak_flops),
        xytext=(-6, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=INK,
    )
    axes.grid(axis="both", color=_GRID, linewidth=0.8)
    label = "FLOPs a byte of memory traffic (areas are shares of the time)"
    axes.set_xlabel(label, fontsize=9, color=SOFT)
    axes.set_ylabel("FLOP/s", fontsize=9, color=SOFT)
    return svg(picture, title)


def _label_points(
    axes: "Axes",
    points: Sequence[tuple[float, float, str, str]],
    across: tuple[float, float],
    up: tuple[float, float],
) -> None:
    """Write each point's name under the roof beside it, in rows that do not overlap."""
    taken: list[tuple[float, float, float]] = []
    height = 0.055 * math.log(up[1] / up[0])
    for x, y, colour, text in sorted(points, key=lambda point: -point[1]):
        place = math.log(x / across[0]) / math.log(across[1] / across[0])
        right = place > 0.6
        span = 0.013 * len(text)
        start = place - span - 0.03 if right else place + 0.03
        level = math.log(y)
        while any(
            abs(level - other) < height and start < end and begin < start + span
            for begin, end, other in taken
        ):
            level -= height
        taken.append((start, start + span, level))
        label_x = across[0] * (across[1] / across[0]) ** (start + (span if right else 0))
        axes.annotate(
            text,
            (x, y),
            xytext=(label_x, math.exp(level)),
            textcoords="data",
            fontsize=9,
            color=colour,
            ha="right" if right else "left",
            va="center",
            arrowprops={"arrowstyle": "-", "color": _LINE, "linewidth": 0.8},
        )


def latency_picture(
    series: Sequence[tuple[int, Sequence[tuple[int, float, float]]]], limit: float | None
) -> Markup:
    """Time between tokens over the batch.

    Args:
      series: context, and of each batch (sequences, seconds, least seconds).
      limit: seconds asked for, drawn as a line.
    """
    title = "Time between tokens over batch, ms"
    picture, axes = figure(7.2, 3.2)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    for (context, points), colour in zip(series, itertools.cycle(_COLOURS), strict=False):
        batches = [batch for batch, _, _ in points]
        axes.plot(
            batches,
            [seconds * 1e3 for _, seconds, _ in points],
            color=colour,
            linewidth=1.5,
            marker="o",
            markersize=3.5,
            label=f"context {context:,}",
        )
        least = [seconds * 1e3 for _, _, seconds in points]
        axes.plot(batches, least, color=colour, linewidth=1, linestyle=(0, (2, 2)))
    if limit is not None:
        axes.axhline(limit * 1e3, color=SOFT, linewidth=1, linestyle=(0, (4, 2)))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sequences (dotted: at least, at published rates)", fontsize=9, color=SOFT)
    axes.set_ylabel("ms", fontsize=9, color=SOFT)
    axes.legend(frameon=False, fontsize=9, labelcolor=SOFT)
    return svg(picture, title)
