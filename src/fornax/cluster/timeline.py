"""A picture of a run on its time line: a lane per rank, faults, losses, and where the time went.

The SVG stands alone and follows the reader's light or dark scheme; the page holds it and a table of
the faults.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from fornax.cluster.files import ClusterFiles
from fornax.config.errors import ConfigError
from fornax.config.goodput import Account, Category, Fault, Goodput, Span, attribute, summarise
from fornax.config.jsonl import read_json_lines
from fornax.pages import Section, render, table
from fornax.train.report import duration

__all__ = ["draw_timeline", "write_timeline"]

_LEFT, _LANES, _GAP, _PANEL, _TOP = 66.0, 800.0, 34.0, 268.0, 44.0
_LOSS_HEIGHT = 110.0
_MIN_PIXELS = 0.75
_LABEL_ROWS = 3
_NAMES: dict[Category, tuple[str, str]] = {
    "step": ("steps that were kept", "#2f9e74"),
    "wait_for_data": ("waiting for data", "#93cdb1"),
    "compile": ("compile", "#7c5cd6"),
    "restore": ("restore", "#2f7fc9"),
    "snapshot": ("copy to memory", "#ecc94b"),
    "checkpoint": ("checkpoint", "#c98a1b"),
    "evaluate": ("evaluation", "#26a0ad"),
    "exchange": ("exchange of slices", "#b06fc7"),
    "profile": ("capture of a profile", "#d96c9f"),
    "spikes": ("loss spikes", "#a63d0a"),
    "lost": ("steps done again", "#f0a48d"),
    "detection": ("detection", "#dc3a26"),
    "recovery": ("recovery", "#7d8899"),
    "waiting": ("waiting for hosts", "#57606f"),
    "initialise": ("start", "#b3bdcb"),
    "other": ("end", "#d3dae3"),
}
_STYLE = """
.timeline { --ink: #1c2330; --soft: #5b6678; --line: #dfe4ec; --lane: #f1f4f8; --mark: #b42318;
  --loss: #1d4ed8; font-family: system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif }
.timeline text { fill: var(--ink); font-size: 12px }
.timeline .soft { fill: var(--soft); font-size: 11px }
.timeline .large { font-size: 22px; font-weight: 600 }
.timeline .number { fill: #ffffff; font-size: 10px; font-weight: 600; text-anchor: middle }
.timeline .end { text-anchor: end }
.timeline .middle { text-anchor: middle }
.timeline .lane { fill: var(--lane) }
.timeline .grid { stroke: var(--line); stroke-width: 1 }
.timeline .fault { stroke: var(--mark); stroke-width: 1.2; stroke-dasharray: 3 3 }
.timeline .mark { fill: var(--mark) }
.timeline .loss { fill: none; stroke: var(--loss); stroke-width: 1.5 }
@media (prefers-color-scheme: dark) { .timeline { --ink: #e6e9ef; --soft: #9aa4b5;
  --line: #2e3644; --lane: #232a36; --mark: #ff6b5a; --loss: #7ea6ff } }
"""


def write_timeline(run_dir: Path, path: Path | None = None) -> Path:
    """Write the page, by default to `timeline.html` in the run directory, or a picture (`.svg`).

    Raises:
      ConfigError: when the directory holds no run, or the file cannot be written.
    """
    path = path or run_dir / "timeline.html"
    account, goodput = attribute(run_dir), summarise(run_dir / "goodput.jsonl")
    picture = draw_timeline(run_dir)
    if path.suffix == ".svg":
        try:
            path.write_text(picture, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
        return path
    sections = [Section(title="Time line", body=picture)]
    faults = _all_faults(run_dir, account)
    if faults:
        sections.append(_faults_section(account, faults))
    return render(
        path,
        title=run_dir.resolve().name,
        subtitle="a run on its time line",
        figures=[
            ("goodput", f"{goodput.goodput:.1%}"),
            ("wall time", duration(goodput.wall_seconds)),
            ("steps", f"{account.steps:,}"),
            ("faults", str(len(faults))),
        ],
        sections=sections,
    )


def draw_timeline(run_dir: Path) -> Markup:
    """The picture, as SVG.

    Raises:
      ConfigError: when the directory holds no run.
    """
    account = attribute(run_dir)
    if not account.spans:
        raise ConfigError(
            f"{run_dir} holds no record of a run; name the run directory of a fornax launch or "
            "fornax train"
        )
    lanes = _lanes(run_dir)
    faults = _all_faults(run_dir, account)
    goodput = summarise(run_dir / "goodput.jsonl")
    frame = _Frame.of(account, len(lanes))
    losses = [
        (record["time"], record["loss"])
        for record in read_json_lines(run_dir / "metrics.jsonl")
        if record.get("loss") is not None
    ]
    body = [
        *_axis(frame),
        *(part for row, lane in enumerate(lanes) for part in _lane(frame, row, lane)),
        *_losses(frame, losses, account.faults),
        *_faults(frame, faults, [lane.rank for lane in lanes]),
        *_panel(goodput),
    ]
    width, height = _LEFT + _LANES + _GAP + _PANEL, max(frame.bottom, _panel_height(goodput))
    share = f"{goodput.goodput:.1%}"
    title = f"{len(lanes)} ranks, {len(faults)} faults, goodput {share}"
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" role="img" '
        f'aria-label="{title}" viewBox="0 0 {width:g} {height:g}"><style>{_STYLE}</style>'
        f"{''.join(body)}</svg>"
    )


@dataclass(frozen=True)
class _Lane:
    rank: int
    spans: Sequence[Span]


def _lanes(run_dir: Path) -> list[_Lane]:
    """What each rank did; of rank 0 the run's own record."""
    found = [_Lane(0, attribute(run_dir).spans)]
    for rank, path in sorted(ClusterFiles(run_dir).goodput_records().items()):
        if rank:
            found.append(_Lane(rank, attribute(run_dir, str(path.relative_to(run_dir))).spans))
    return found


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """Where what is drawn: times are seconds since 1970."""

    begin: float
    seconds: float
    pitch: float
    """Pixels from one lane to the next."""
    lanes: int

    @classmethod
    def of(cls, account: Account, lanes: int) -> "_Frame":
        begin, end = account.spans[0].begin, account.spans[-1].end
        pitch = max(9.0, min(34.0, 320.0 / lanes))
        return cls(begin=begin, seconds=max(end - begin, 1e-3), pitch=pitch, lanes=lanes)

    def x(self, time: float) -> float:
        return _LEFT + _LANES * min(1.0, max(0.0, (time - self.begin) / self.seconds))

    def y(self, row: float) -> float:
        return _TOP + row * self.pitch

    @property
    def lanes_end(self) -> float:
        return self.y(self.lanes)

    @property
    def loss_top(self) -> float:
        return self.lanes_end + 34

    @property
    def bottom(self) -> float:
        return self.loss_top + _LOSS_HEIGHT + 14


def _axis(frame: _Frame) -> Iterator[str]:
    step = _tick(frame.seconds)
    for number in range(int(frame.seconds / step) + 1):
        x = frame.x(frame.begin + number * step)
        yield (
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP:g}" '
            f'y2="{frame.loss_top + _LOSS_HEIGHT:g}"/>'
            f'<text class="soft middle" x="{x:.1f}" y="{frame.lanes_end + 17:g}">'
            f"{_clock(number * step)}</text>"
        )


def _tick(seconds: float) -> float:
    """A round time of which about eight fit."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
    return next((s for s in steps if seconds / s <= 9), 86400 * math.ceil(seconds / 777600))


def _clock(seconds: float) -> str:
    if seconds < 3600:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02}"


def _lane(frame: _Frame, row: int, lane: _Lane) -> Iterator[str]:
    height = frame.pitch * (0.74 if frame.pitch > 14 else 0.82)
    y = frame.y(row) + (frame.pitch - height) / 2
    yield (
        f'<rect class="lane" x="{_LEFT:g}" y="{y:.1f}" width="{_LANES:g}" height="{height:.1f}"/>'
    )
    every = math.ceil(13 / frame.pitch)
    if row % every == 0:
        yield (
            f'<text class="soft end" x="{_LEFT - 8:g}" y="{y + height / 2 + 4:.1f}">'
            f"rank {lane.rank}</text>"
        )
    for begin, end, cause in _visible(frame, lane.spans):
        if cause is not None:
            yield (
                f'<rect x="{begin:.2f}" y="{y:.1f}" width="{end - begin:.2f}" '
                f'height="{height:.1f}" fill="{_NAMES[cause][1]}"/>'
            )


def _visible(frame: _Frame, spans: Sequence[Span]) -> list[tuple[float, float, Category | None]]:
    """Pieces of a lane in pixels; one too narrow to be seen belongs to the piece before it."""
    found: list[tuple[float, float, Category | None]] = []
    for span in spans:
        begin, end = frame.x(span.begin), frame.x(span.end)
        if found and (span.cause == found[-1][2] or end - begin < _MIN_PIXELS):
            found[-1] = (found[-1][0], end, found[-1][2])
        else:
            found.append((begin, end, span.cause))
    return found


def _losses(
    frame: _Frame, losses: Sequence[tuple[float, float]], faults: Sequence[Fault]
) -> Iterator[str]:
    """A curve over time, interrupted by the faults."""
    finite = [(time, value) for time, value in losses if math.isfinite(value)]
    if not finite:
        return
    low, high = min(v for _, v in finite), max(v for _, v in finite)
    high = high if high > low else low + 1.0

    def y(value: float) -> float:
        return frame.loss_top + (_LOSS_HEIGHT - 8) * (high - value) / (high - low) + 4

    for value in (high, (low + high) / 2, low):
        yield (
            f'<line class="grid" x1="{_LEFT:g}" x2="{_LEFT + _LANES:g}" y1="{y(value):.1f}" '
            f'y2="{y(value):.1f}"/>'
            f'<text class="soft end" x="{_LEFT - 8:g}" y="{y(value) + 4:.1f}">{value:.3g}</text>'
        )
    yield f'<text class="soft" x="4" y="{frame.loss_top - 6:g}">loss</text>'
    cuts = [-math.inf, *(fault.began for fault in faults), math.inf]
    for begin, end in pairwise(cuts):
        points: list[str] = []
        last = -1.0
        for time, value in finite:
            if begin <= time < end and frame.x(time) - last >= 1:
                last = frame.x(time)
                points.append(f"{last:.1f},{y(value):.1f}")
        if len(points) == 1:
            x, _, height = points[0].partition(",")
            yield f'<circle fill="var(--loss)" cx="{x}" cy="{height}" r="1.5"/>'
        elif points:
            yield f'<polyline class="loss" points="{" ".join(points)}"/>'


def _faults(frame: _Frame, faults: Sequence[Fault], ranks: Sequence[int]) -> Iterator[str]:
    """A line through all lanes, a number on the lane of the rank, and words where there is room."""
    free = [0.0] * _LABEL_ROWS
    for number, fault in enumerate(faults, 1):
        x = frame.x(fault.began)
        label = f"{number} {_what(fault)}"
        wide = 6.2 * len(label) + 10
        at = min(x - 4, _LEFT + _LANES + _GAP - wide)
        row = next((r for r in range(_LABEL_ROWS) if free[r] <= at), None)
        top = _TOP
        if row is not None:
            free[row] = at + wide
            top = _TOP - 6 - 13 * row
            yield f'<text x="{at:.1f}" y="{top:g}">{escape(label)}</text>'
        yield (
            f'<line class="fault" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 3:g}" '
            f'y2="{frame.loss_top + _LOSS_HEIGHT:g}"/>'
        )
        if fault.rank in ranks:
            y = frame.y(ranks.index(fault.rank) + 0.5)
            radius = min(7.5, frame.pitch / 2)
            yield f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
            if radius > 6:
                yield f'<text class="number" x="{x:.1f}" y="{y + 3.5:.1f}">{number}</text>'


def _all_faults(run_dir: Path, account: Account) -> list[Fault]:
    """Those after which a group formed again, and slow ranks that were named and stayed."""
    events = read_json_lines(ClusterFiles(run_dir).events)
    slow = [e for e in events if e.get("slow") is not None and not e.get("evict")]
    return sorted([*account.faults, *(_slow(e, events) for e in slow)], key=lambda f: f.began)


def _slow(named: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Fault:
    drills = [
        e["time"]
        for e in events
        if e.get("drill") == "slow"
        and (e["epoch"], e["rank"]) == (named["epoch"], named["slow"])
        and e["time"] <= named["time"]
    ]
    return Fault(
        kind="slow",
        rank=named["slow"],
        epoch=named["epoch"],
        drill="slow" if drills else None,
        began=max(drills, default=named["time"]),
        named=named["time"],
        formed=None,
    )


def _what(fault: Fault) -> str:
    """In words: what was injected, else what was found."""
    whose = "" if fault.rank is None else f" rank {fault.rank}"
    return f"{fault.drill or fault.kind}{whose}"


def _shown(goodput: Goodput) -> list[tuple[Category, float]]:
    wall = goodput.wall_seconds or 1.0
    return [(c, goodput.seconds[c]) for c in _NAMES if goodput.seconds[c] / wall >= 5e-4]


def _panel_height(goodput: Goodput) -> float:
    return _TOP + 50 + 24 * len(_shown(goodput))


def _panel(goodput: Goodput) -> Iterator[str]:
    """Goodput, and a bar for each cause, which are the colours' legend as well."""
    left, wall = _LEFT + _LANES + _GAP, goodput.wall_seconds or 1.0
    yield f'<text class="large" x="{left:g}" y="{_TOP + 14:g}">{goodput.goodput:.1%}</text>'
    yield (
        f'<text class="soft" x="{left + 84:g}" y="{_TOP + 14:g}">goodput of '
        f"{duration(goodput.wall_seconds)}</text>"
    )
    most = max((spent for _, spent in _shown(goodput)), default=1.0)
    for number, (cause, spent) in enumerate(_shown(goodput)):
        y = _TOP + 36 + 24 * number
        name, colour = _NAMES[cause]
        wide = max(1.5, _PANEL * spent / most)
        yield (
            f'<text class="soft" x="{left:g}" y="{y + 9:g}">{name}</text>'
            f'<text class="soft end" x="{left + _PANEL - 50:g}" y="{y + 9:g}">{spent:.1f} s</text>'
            f'<text class="soft end" x="{left + _PANEL:g}" y="{y + 9:g}">{spent / wall:.1%}</text>'
            f'<rect x="{left:g}" y="{y + 13:g}" width="{wide:.1f}" height="5" rx="1" '
            f'fill="{colour}"/>'
        )


def _faults_section(account: Account, faults: Sequence[Fault]) -> Section:
    begin = account.spans[0].begin

    def trained(fault: Fault) -> float | None:
        """When the new group had compiled its step and made steps."""
        after = [s for s in account.spans if fault.formed and s.begin >= fault.formed]
        return next((s.begin for s in after if s.cause == "step" and s.seconds > 0.01), None)

    def since(fault: Fault, time: float | None) -> str:
        return "—" if time is None else f"{time - fault.began:.1f} s"

    rows = [
        (
            number,
            _clock(fault.began - begin),
            _what(fault),
            fault.kind,
            since(fault, fault.named),
            since(fault, fault.formed),
            since(fault, trained(fault)),
        )
        for number, fault in enumerate(faults, 1)
    ]
    head = ("", "at", "what", "verdict", "named after", "group formed after", "trains after")
    return Section(title="Faults", body=table(head, rows))
