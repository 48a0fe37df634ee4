"""`visualize`: a picture of the pipeline with the time and the records measured at each stage."""

import html
import itertools
import time
from dataclasses import dataclass, replace
from pathlib import Path

from fornax.config.errors import DataError
from fornax.data.batches import open_batches
from fornax.data.config import DataConfig, Prefetch
from fornax.data.stream import StageTimes

_BOX_WIDTH, _BOX_HEIGHT, _GAP, _MARGIN, _TOP = 230, 92, 44, 28, 112


@dataclass(frozen=True)
class Stage:
    """One stage: its seconds, and what went in and came out."""

    name: str
    seconds: float
    entered: int
    left: int
    units: tuple[str, str]
    """What goes in and what comes out: records, documents, rows, batches."""

    @property
    def dropped(self) -> int:
        """Records that went in and did not come out; 0 where the units differ."""
        return self.entered - self.left if self.units == ("records", "records") else 0


@dataclass(frozen=True)
class Profile:
    """A measured run of a pipeline without prefetch."""

    parts: tuple[tuple[str, tuple[Stage, ...]], ...]
    """The stages of each part of a mixture, by the part's name."""
    shared: tuple[Stage, ...]
    """Packing and filling, which all parts share."""
    seconds: float
    """Time of the whole run."""
    batches: int
    tokens: int
    """Tokens in the batches, padding left out."""
    places: int
    """Places in the batches, padding included."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, padding left out."""
        return self.tokens / self.seconds


def visualize(
    config: DataConfig,
    output: Path,
    *,
    split: str = "train",
    batch_size: int = 8,
    seq_len: int = 1024,
    batches: int = 100,
) -> Profile:
    """Run a pipeline for `batches` batches and write its picture to `output`.

    Args:
        config: the pipeline; it runs without prefetch, so that times add up.
        output: an .svg or .html file to write; it needs nothing else to be shown.
        split, batch_size, seq_len: as for `open_batches`.
        batches: batches to make.

    Raises:
        DataError: as `open_batches`, for a pipeline that gives no batch, or for a file of another
            kind.
    """
    if output.suffix not in (".svg", ".html"):
        raise DataError(f"{output} must end in .svg or .html")
    found = profile(config, split=split, batch_size=batch_size, seq_len=seq_len, batches=batches)
    picture = draw(found, f"{split} split, batch {batch_size} x {seq_len}")
    if output.suffix == ".html":
        picture = (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            "<title>Fornax data pipeline</title>"
            f'<body style="margin:0;background:#fff">{picture}</body></html>'
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{output} cannot be written: {error}") from error
    return found


def profile(
    config: DataConfig, *, split: str, batch_size: int, seq_len: int, batches: int
) -> Profile:
    """Run a pipeline without prefetch for `batches` batches and measure its stages."""
    config = replace(config, prefetch=Prefetch(buffer=0))
    times = StageTimes()
    opened = open_batches(config, batch_size=batch_size, seq_len=seq_len, split=split, times=times)
    tokens = places = made = 0
    began = time.perf_counter()
    for batch in itertools.islice(opened, batches):
        made += 1
        tokens += int((batch["segment_ids"] > 0).sum())
        places += batch["tokens"].size
    seconds = time.perf_counter() - began
    if not made:
        raise DataError(f"the {split} split gives no batch: every record was dropped")
    parts: dict[str, list[Stage]] = {}
    before_packing = 0.0
    for (part, name), measure in times.stages.items():
        if part:
            units = ("records", "records")
            stage = Stage(name, measure.seconds, measure.entered, measure.left, units)
            parts.setdefault(part, []).append(stage)
            before_packing += measure.seconds
    pack, fill = times.stages["", "pack"], times.stages["", "fill"]
    # Packing draws documents as it goes: what the stages before it took is not its own.
    pack_seconds = max(0.0, pack.seconds - before_packing)
    shared = (
        Stage(config.packing.type, pack_seconds, pack.entered, pack.left, ("pieces", "rows")),
        Stage("fill arrays", fill.seconds, fill.entered, fill.left, ("rows", "batches")),
    )
    named = tuple((name, tuple(stages)) for name, stages in parts.items())
    return Profile(named, shared, seconds, made, tokens, places)


def draw(found: Profile, title: str) -> str:
    """The picture as SVG: a row of boxes for each part, then the stages that all share."""
    columns = max(len(stages) for _, stages in found.parts)
    measured = [stage for _, stages in found.parts for stage in stages] + list(found.shared)
    total = sum(stage.seconds for stage in measured) or 1.0
    width = 2 * _MARGIN + (columns + 2) * (_BOX_WIDTH + _GAP) - _GAP
    row_height = _BOX_HEIGHT + 46
    height = _TOP + len(found.parts) * row_height + 70
    middle = _TOP + (len(found.parts) * row_height - 46) / 2 + 10
    body = [_heading(found, title)]
    shared_x = _MARGIN + columns * (_BOX_WIDTH + _GAP)
    for row, (name, stages) in enumerate(found.parts):
        y = _TOP + row * row_height + 10
        body.append(_text(_MARGIN, y - 8, name, 13, "#475569", bold=True))
        for column, stage in enumerate(stages):
            x = _MARGIN + column * (_BOX_WIDTH + _GAP)
            body.append(_box(stage, x, y, total))
            end_x = shared_x if column + 1 == len(stages) else x + _BOX_WIDTH + _GAP
            end_y = middle if column + 1 == len(stages) else y + _BOX_HEIGHT / 2
            body.append(_arrow(x + _BOX_WIDTH, y + _BOX_HEIGHT / 2, end_x, end_y))
    for column, stage in enumerate(found.shared):
        x = shared_x + column * (_BOX_WIDTH + _GAP)
        body.append(_box(stage, x, middle - _BOX_HEIGHT / 2, total))
        if column + 1 < len(found.shared):
            body.append(_arrow(x + _BOX_WIDTH, middle, x + _BOX_WIDTH + _GAP, middle))
    body.append(_bar(found, total, height - 52, width - 2 * _MARGIN))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" style="max-width:100%;height:auto" font-family="system-ui, sans-serif">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#94a3b8"/></marker></defs>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{"".join(body)}</svg>'
    )


def _heading(found: Profile, title: str) -> str:
    rate = f"{found.tokens_per_second / 1e6:,.2f} million tokens/s"
    full = f"{found.tokens / found.places:.1%} full"
    line = f"{found.batches:,} batches in {found.seconds:.2f} s: {rate}, rows {full}"
    return _text(_MARGIN, 40, f"Data pipeline: {title}", 20, "#0f172a", bold=True) + _text(
        _MARGIN, 66, f"{line} (one thread, no prefetch)", 14, "#475569"
    )


def _heat(share: float) -> str:
    """From pale to strong orange as a stage takes more of the time."""
    pale, strong = (255, 247, 237), (251, 146, 60)
    mixed = (round(a + (b - a) * min(1.0, share)) for a, b in zip(pale, strong, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _box(stage: Stage, x: float, y: float, total: float) -> str:
    share = stage.seconds / total
    flow = f"{stage.entered:,} {stage.units[0]} → {stage.left:,} {stage.units[1]}"
    if stage.units[0] == stage.units[1]:
        flow = f"{stage.entered:,} → {stage.left:,} {stage.units[0]}"
    lines = [
        _text(x + 14, y + 26, _short(stage.name), 15, "#0f172a", bold=True),
        _text(x + 14, y + 48, f"{stage.seconds * 1e3:,.1f} ms, {share:.0%}", 13, "#334155"),
        _text(x + 14, y + 67, flow, 12, "#475569"),
    ]
    if stage.dropped:
        lines.append(_text(x + 14, y + 84, f"{stage.dropped:,} dropped", 12, "#b91c1c", bold=True))
    return (
        f'<rect x="{x}" y="{y}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="8" '
        f'fill="{_heat(share)}" stroke="#cbd5e1"/>' + "".join(lines)
    )


def _short(name: str) -> str:
    return name if len(name) <= 26 else "…" + name[-25:]


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    turn = x2 - _GAP  # level past the empty columns, then over to the end
    bend = x2 - _GAP / 2
    return (
        f'<path d="M{x1} {y1}H{turn}C{bend} {y1} {bend} {y2} {x2 - 2} {y2}" fill="none" '
        'stroke="#94a3b8" stroke-width="1.6" marker-end="url(#tip)"/>'
    )


def _bar(found: Profile, total: float, y: float, width: float) -> str:
    """One bar over the whole time, a piece for each stage."""
    stages = [(f"{name}: ", s) for name, stages in found.parts for s in stages]
    stages += [("", s) for s in found.shared]
    colours = ("#0ea5e9", "#f59e0b", "#10b981", "#8b5cf6", "#ef4444", "#64748b", "#ec4899")
    x = float(_MARGIN)
    pieces = []
    for number, (part, stage) in enumerate(stages):
        length = width * stage.seconds / total
        label = f"{part if len(found.parts) > 1 else ''}{stage.name}"
        pieces.append(
            f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="16" '
            f'fill="{colours[number % len(colours)]}"><title>{html.escape(label)}</title></rect>'
        )
        if length > 8 * len(label):
            pieces.append(_text(x + 4, y + 34, label, 12, "#475569"))
        x += length
    return "".join(pieces)


def _text(x: float, y: float, text: str, size: int, colour: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}"{weight}>'
        f"{html.escape(text)}</text>"
    )
