"""What a search for quantization rules found, as lines for a terminal and as a page."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fornax.pages import INK, SOFT, Section, bars, figure, render, svg, table
from fornax.quant import Report

__all__ = ["command_of", "search_lines", "write_page"]

_HEAD = ("", "MB", "of floats", "KL, expected", "KL", "loss")
_FRONTIER, _UNIFORM = "#c2410c", "#1d4ed8"
_SHOWN = 24
"""Bars of the most sensitive groups."""


def search_lines(report: Report) -> Iterator[str]:
    """The measured points, and what was chosen."""
    found = _search(report)
    rows = [_HEAD, *_rows(report)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_HEAD))]
    for row in rows:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *rest])
    yield from _went_back(found)
    yield f"chosen: step {found['chosen']} of {len(found['frontier']) - 1}, made again by:"
    yield f"  {command_of(report)}"


def command_of(report: Report, between: str = " ") -> str:
    """The command that makes the directory again, with `between` before each option."""
    assert report.data is not None
    parts = [
        ["fornax", "quantize", report.source],
        ["--scheme", report.scheme],
        ["--group-size", report.group_size] if report.group_size is not None else [],
        ["--rules", *report.rules] if report.rules else [],
        ["--data", report.data],
        ["--samples", report.samples, "--length", report.length, "--seed", report.seed],
        ["--out", "DIR"],
    ]
    return between.join(shlex.join(map(str, part)) for part in parts if part)


def write_page(report: Report, folder: Path) -> None:
    """Write `quantization_report.html` into a folder.

    Raises:
      ConfigError: the page cannot be written.
    """
    found, held = _search(report), report.held_out
    assert held is not None
    share = report.bytes_after / report.bytes_before
    render(
        folder / "quantization_report.html",
        title="Bits chosen by what they cost",
        subtitle=f"fornax quantize --search --max-loss {found['max_loss']}, {report.source}",
        figures=[
            ("MB of tensors", f"{report.bytes_after / 1e6:,.1f}"),
            ("of the float model", f"{share:.1%}"),
            (f"loss on {held.tokens:,} held-out tokens", f"{held.increase:+.3%}"),
            ("KL, nats per token", f"{held.kl:.5f}"),
        ],
        sections=[_frontier(report), _rules(report), _sensitivity(found)],
    )


def _search(report: Report) -> Mapping[str, Any]:
    assert report.search is not None
    return report.search


def _rows(report: Report) -> list[tuple[str, ...]]:
    """The measured points by size, the largest first."""
    found = _search(report)
    points = [p for p in (*found["frontier"], *found["uniform"]) if p["measured"] is not None]
    return [
        (
            _name(point, found["chosen"]),
            f"{point['bytes'] / 1e6:,.2f}",
            f"{point['bytes'] / report.bytes_before:.1%}",
            f"{point['expected_kl']:.5f}",
            f"{point['measured']['kl']:.5f}",
            f"{_increase(point):+.3%}",
        )
        for point in sorted(points, key=lambda point: -point["bytes"])
    ]


def _name(point: Mapping[str, Any], chosen: int) -> str:
    if point["step"] is None:
        return f"{point['scheme']} everywhere"
    return f"step {point['step']}{', chosen' if point['step'] == chosen else ''}"


def _increase(point: Mapping[str, Any]) -> float:
    return point["measured"]["loss"] / point["measured"]["float_loss"] - 1


def _went_back(found: Mapping[str, Any]) -> Iterator[str]:
    for step, rise in found["gone_back"]:
        yield (
            f"step {step} was within {found['max_loss']} on the rows to choose by and not on those "
            f"of the verification, where it raised the loss by {rise:.3%}: went back."
        )


def _frontier(report: Report) -> Section:
    found = _search(report)
    lead = (
        "Steps of the frontier are numbered from the float model; each lowers the bits of one "
        "group of matrices. Expected is the sum of what groups cost alone; KL and loss are "
        "measured on rows of text that neither calibration nor verification sees. The last step "
        "is chosen where neither the loss nor KL, as a share of the loss, is above "
        f"{found['max_loss']}."
    )
    body = _plot(found) + table(_HEAD, _rows(report))
    return Section(
        title="Size and loss",
        lead=" ".join([lead, *_went_back(found)]),
        body=body,
    )


def _plot(found: Mapping[str, Any]) -> Markup:
    title = "Divergence from the float model by size"
    made, axes = figure(7.2, 3.8)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    path = [point for point in found["frontier"] if point["expected_kl"] > 0]
    axes.plot(
        [point["bytes"] / 1e6 for point in path],
        [point["expected_kl"] for point in path],
        color=SOFT,
        linewidth=1,
        linestyle="--",
        label="frontier, expected",
    )
    for name, points, colour, marker in (
        ("frontier, measured", found["frontier"], _FRONTIER, "o"),
        ("one scheme everywhere, measured", found["uniform"], _UNIFORM, "s"),
    ):
        shown = [point for point in points if point["measured"] is not None]
        axes.scatter(*_places(shown), color=colour, marker=marker, s=22, label=name, zorder=3)
    chosen = found["frontier"][found["chosen"]]
    axes.scatter(
        *_places([chosen]), s=110, facecolors="none", edgecolors=INK, label="chosen", zorder=4
    )
    for point in found["uniform"]:
        axes.annotate(
            point["scheme"],
            (point["bytes"] / 1e6, point["measured"]["kl"]),
            xytext=(6, 5),
            textcoords="offset points",
            fontsize=9,
            color=_UNIFORM,
        )
    axes.set_yscale("log")
    axes.set_xlabel("MB of tensors", fontsize=9, color=SOFT)
    axes.set_ylabel("KL, nats per token", fontsize=9, color=SOFT)
    axes.legend(frameon=False, fontsize=9, labelcolor=SOFT)
    return svg(made, title)


def _places(points: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    return [p["bytes"] / 1e6 for p in points], [p["measured"]["kl"] for p in points]


def _rules(report: Report) -> Section:
    return Section(
        title="The rules",
        lead="What makes this directory again.",
        body=Markup("<pre>{}</pre>").format(command_of(report, " \\\n  ")),
    )


def _sensitivity(found: Mapping[str, Any]) -> Section:
    """The most sensitive groups under the scheme that costs most, and all figures as a table."""
    groups: dict[str, dict[str, float]] = {}
    for option in found["options"]:
        groups.setdefault(option["group"], {})[option["scheme"]] = option["kl"]
    worst = sorted(groups.items(), key=lambda item: -max(item[1].values()))[:_SHOWN]
    rows = [
        (name, *(f"{own[s]:.6f}" if s in own else "—" for s in found["schemes"]))
        for name, own in groups.items()
    ]
    return Section(
        title="What each group costs alone",
        lead="KL in nats per token with the one group quantized and the rest in floats.",
        body=bars(
            "The most sensitive groups, by their worst scheme",
            [(name, max(own.values())) for name, own in worst],
            unit="KL, nats per token",
        )
        + table(("group", *found["schemes"]), rows),
    )
