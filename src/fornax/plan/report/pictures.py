"""The two pictures of a plan: a chip's memory against its limit, and the roofline."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from fornax.plan.report.data import Hardware
from fornax.plan.report.program import ClassOfWork, ProgramReport
from fornax.plan.report.words import nbytes, rate
from fornax.train.report import INK, SOFT, figure, svg

__all__ = ["memory_picture", "roofline_picture"]

_LINE, _ALARM = "#cbd2dd", "#b91c1c"
OWNER_COLOURS = {
    "parameters": "#c2410c",
    "optimizer": "#f59e0b",
    "gradients": "#7c3aed",
    "activations": "#1d4ed8",
    "temporaries": "#60a5fa",
    "cache": "#047857",
    "batch": "#94a3b8",
    "other": "#cbd5e1",
}
"""Owners of memory in the order they stack."""
_CLASS_COLOURS = ("#c2410c", "#1d4ed8", "#047857", "#7c3aed", "#b45309", "#0e7490", "#be185d")
_GIB = 1 << 30


def memory_picture(programs: Sequence[ProgramReport]) -> Markup:
    """A stacked bar a program, in GiB, and the line that a program must not cross."""
    title = "Memory of one chip, GiB"
    picture, axes = figure(7.6, 1.45 + 0.5 * len(programs))
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    names = [program.name for program in programs]
    owners = _owners(programs)
    left = [0.0] * len(programs)
    for owner in owners:
        sizes = [_size(program, owner) / _GIB for program in programs]
        largest = nbytes(max(_size(program, owner) for program in programs))
        colour = OWNER_COLOURS.get(owner, "#64748b")
        axes.barh(
            range(len(names)),
            sizes,
            left=left,
            color=colour,
            height=0.6,
            label=f"{owner} {largest}",
        )
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    usable = programs[0].memory.usable / _GIB
    over = any(not program.memory.fits for program in programs)
    colour = _ALARM if over else INK
    axes.axvline(usable, color=colour, linewidth=1.5, linestyle=(0, (4, 2)))
    reach = max([usable, *left]) * 1.16
    axes.set_xlim(0, reach)
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
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#e3e7ee", linewidth=0.8)
    axes.legend(
        frameon=False,
        fontsize=9,
        labelcolor=SOFT,
        ncols=4,
        loc="upper left",
        bbox_to_anchor=(0, -0.16 - 0.12 / len(names)),
        borderaxespad=0.4,
        handlelength=1.0,
    )
    return svg(picture, title)


def _owners(programs: Sequence[ProgramReport]) -> list[str]:
    found = {part.owner for program in programs for part in program.memory.parts if part.bytes}
    known = [owner for owner in OWNER_COLOURS if owner in found]
    return [*known, *sorted(found - set(known))]


def _size(program: ProgramReport, owner: str) -> int:
    return sum(part.bytes for part in program.memory.parts if part.owner == owner)


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
    for one, colour in zip(shown, _repeat(_CLASS_COLOURS), strict=False):
        achieved = one.flops / one.seconds
        area = 30 + 1400 * one.seconds / whole
        axes.scatter(
            [one.intensity], [achieved], s=area, color=colour, alpha=0.75, linewidths=0, zorder=3
        )
        share = one.seconds / whole
        points.append(
            (one.intensity, achieved, colour, f"{one.name.replace('_', ' ')} {share:.0%}")
        )
    bottom = min([y for _, y, _, _ in points] + [hardware.peak_flops / 100]) / 4
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, hardware.peak_flops * 3)
    _name(axes, points, (low, high), (bottom, hardware.peak_flops * 3))
    axes.annotate(
        f"{rate(hardware.peak_flops)} in {hardware.peak_dtype}",
        (ridge, hardware.peak_flops),
        xytext=(-6, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=INK,
    )
    axes.grid(axis="both", color="#e3e7ee", linewidth=0.8)
    axes.set_xlabel("FLOPs a byte of memory traffic", fontsize=9, color=SOFT)
    axes.set_ylabel("FLOP/s", fontsize=9, color=SOFT)
    return svg(picture, title)


def _name(axes, points, across: tuple[float, float], up: tuple[float, float]) -> None:
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
        axes.annotate(
            text,
            (x, y),
            xytext=(across[0] * (across[1] / across[0]) ** (start + (span if right else 0)),
                    math.exp(level)),
            textcoords="data",
            fontsize=9,
            color=colour,
            ha="right" if right else "left",
            va="center",
            arrowprops={"arrowstyle": "-", "color": _LINE, "linewidth": 0.8},
        )  # fmt: skip


def _repeat(colours: Sequence[str]):
    while True:
        yield from colours
