"""The measurements, as a table for a person and as JSON for scripts."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fornax.bench.load import latency_statistics
from fornax.bench.v2.config import HostBenchConfig
from fornax.bench.v2.run import Measured

__all__ = ["error_lines", "figures", "table_lines", "write_json"]

Figures = dict[str, Any]
"""One measurement by the names in the JSON."""
_PERCENTILES = (50, 90, 99)
_LATENCIES = ("mean", "max", *(f"p{percentile}" for percentile in _PERCENTILES))
_HEAD = ("clients", "requests/s", "rows/s", "p50 ms", "p90 ms", "p99 ms", "failed")
_SERVER = ("queue us", "input us", "compute us", "output us", "outside us", "rows/batch")
_PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


def figures(measured: Measured) -> Figures:
    """Every figure of one measurement; latencies in milliseconds, the server's in microseconds."""
    count = len(measured.counts.latencies)
    latencies = latency_statistics(measured.counts.latencies, _PERCENTILES)
    return {
        "concurrency": measured.concurrency,
        "processes": measured.processes,
        "seconds": measured.seconds,
        "requests": count,
        "failed": sum(measured.counts.errors.values()),
        "errors": dict(measured.counts.errors),
        "requests_per_second": count / measured.seconds,
        "rows_per_second": count * measured.rows / measured.seconds,
        **{f"{name}_ms": latencies[name] if count else None for name in _LATENCIES},
        "server": _server(measured),
    }


def _server(measured: Measured) -> dict[str, float] | None:
    """Microseconds of a request in each part of the server, on average."""
    server = measured.server
    if server is None or not server.requests:
        return None
    found = {f"{part}_us": getattr(server, part) / server.requests / 1e3 for part in _PARTS}
    inside = sum(found.values())
    if len(measured.counts.latencies):
        found["outside_us"] = max(0.0, 1e6 * statistics.fmean(measured.counts.latencies) - inside)
    found["rows_per_batch"] = server.rows / server.batches if server.batches else 0.0
    return found


def table_lines(results: Sequence[Figures]) -> Iterator[str]:
    """The table, with the server's own split of the time where it keeps statistics."""
    split = any(result["server"] for result in results)
    head = (*_HEAD, *(_SERVER if split else ()))
    rows = [head, *(_row(result, split) for result in results)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    if split:
        yield ""
        yield (
            "queue to output: the mean of a request inside the server; outside: protocol, network "
            "and client"
        )


def _row(result: Figures, split: bool) -> tuple[str, ...]:
    cells = [
        str(result["concurrency"]),
        f"{result['requests_per_second']:,.1f}",
        f"{result['rows_per_second']:,.1f}",
        *(_number(result[f"p{percentile}_ms"], 3) for percentile in _PERCENTILES),
        str(result["failed"]),
    ]
    if split:
        server = result["server"] or {}
        names = [*(f"{part}_us" for part in _PARTS), "outside_us"]
        cells += [_number(server.get(name), 0) for name in names]
        cells.append(_number(server.get("rows_per_batch"), 1))
    return tuple(cells)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def error_lines(results: Sequence[Measured]) -> Iterator[str]:
    """What failed, by reason, with one message each."""
    for measured in results:
        for reason, count in measured.counts.errors.most_common():
            example = measured.counts.examples.get(reason, "")
            yield f"{measured.concurrency} clients: {count} failed, {reason}: {example}"


def write_json(path: Path, config: HostBenchConfig, results: Sequence[Figures]) -> Path:
    """Write every figure; return the path."""
    written = {
        "model": config.model,
        "version": config.version,
        "protocol": config.protocol,
        "url": "{}:{}".format(*config.address),
        "rows": config.rows,
        "input": str(config.input) if config.input else None,
        "results": list(results),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return path
