"""What a model server says of itself, as lines for a person."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fornax.serving.client import not_served

__all__ = ["head_line", "shadow_lines", "status_lines"]

_HEAD = ("model", "version", "state", "requests", "failed", "rows/batch", "queue us", "us", "")
_OUTPUT_HEAD = ("output", "compared", "differing", "most off", "relatively", "")


def head_line(address: str, ready: bool, index: Sequence[Mapping[str, object]]) -> str:
    """Whether the server at an address is ready, and which models it lacks."""
    if ready:
        return f"{address} is live and ready"
    lacking = not_served(index)
    loading = {each["name"] for each in lacking if each["state"] == "LOADING"}
    failed = {each["name"] for each in lacking} - loading
    parts = [
        f"{', '.join(sorted(names))} {'is' if len(names) == 1 else 'are'} {what}"
        for names, what in ((loading, "loading"), (failed, "not served"))
        if names
    ]
    return f"{address} is live and not ready{': ' if parts else ''}{'; '.join(parts)}"


def status_lines(
    index: Sequence[Mapping[str, Any]], stats: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """A line per version: its state, what it has done, why it does not serve."""
    counts = {(each["name"], str(each["version"])): each for each in stats}
    rows: list[tuple[str, ...]] = [_HEAD]
    for each in index:
        name, version = each["name"], str(each.get("version", ""))
        figures = _figures(counts.get((name, version), {}))
        rows.append((name, version, str(each.get("state")), *figures, each.get("reason", "")))
    return _table(rows)


def _figures(stats: Mapping[str, Any]) -> tuple[str, ...]:
    if not stats:
        return ("", "", "", "", "")
    parts = stats["inference_stats"]
    count = int(parts["success"]["count"])
    rows, batches = int(stats["inference_count"]), int(stats["execution_count"])

    def mean(part: str) -> str:
        return f"{int(parts[part]['ns']) / count / 1e3:,.0f}" if count else "-"

    return (
        f"{count:,}",
        f"{int(parts['fail']['count']):,}",
        f"{rows / batches:.1f}" if batches else "-",
        mean("queue"),
        mean("success"),
    )


def shadow_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """How a shadow version's answers compare with those of the serving one."""
    requests = report["requests"]
    yield (
        f"{report['name']}: version {report['shadow_version']} gets {report['share']:.0%} of what "
        f"version {report['main_version']} answers{'' if report['running'] else ' (ended)'}"
    )
    yield ", ".join(f"{key} {value:,}" for key, value in requests.items())
    rows: list[tuple[str, ...]] = [_OUTPUT_HEAD]
    for name, seen in report["outputs"].items():
        figures = (f"{seen[key]:,}" for key in ("compared", "differing"))
        sizes = (f"{seen[key]:.3g}" for key in ("max_absolute", "max_relative"))
        rows.append((name, *figures, *sizes, "; ".join(map(str, seen["problems"]))))
    yield from _table(rows)
    for side, latency in report["latency"].items():
        yield f"{side}: {', '.join(f'{key} {value:,.0f}' for key, value in latency.items())}"
    for reason, count in report["errors"].items():
        yield f"{count} failed: {reason}"
    worst = [str(each["id"]) for each in report["worst"] if each["id"]]
    if worst:
        yield f"ids of the answers furthest off: {', '.join(worst)}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
