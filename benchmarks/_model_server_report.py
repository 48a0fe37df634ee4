"""The tables of the model-server benchmark."""

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import _harness
from _model_server_contestants import XLA_FLAGS, Contestant

MINE = "fornax"


@dataclass(frozen=True)
class Cell:
    """One measurement of one contestant: a model at a concurrency, in one round."""

    answers: int
    seconds: float
    latencies_us: Sequence[float]
    busy: float
    """Cores that the server's processes kept busy."""

    def rate(self) -> float:
        return self.answers / self.seconds


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def rate(cells: Sequence[Cell]) -> float:
    """Return the median over rounds of requests per second."""
    return statistics.median(cell.rate() for cell in cells)


def pooled(cells: Sequence[Cell], share: float) -> float:
    """Return a quantile of the latencies of all rounds, in microseconds."""
    return quantile((us for cell in cells for us in cell.latencies_us), share)


def ratio(mine: Sequence[Cell], theirs: Sequence[Cell]) -> float:
    """Return the median over rounds of my rate over theirs in the same round."""
    pairs = zip(mine, theirs, strict=False)
    return statistics.median(m.rate() / max(t.rate(), 1e-9) for m, t in pairs)


def text(
    standings: Mapping[str, Any],
    taking_part: Sequence[Contestant],
    names: Sequence[str],
    concurrencies: Sequence[int],
    bare: Mapping[str, Any],
    stages: Mapping[str, Any],
    args: argparse.Namespace,
) -> str:
    """Return the results file."""
    cells = [(name, concurrency) for name in names for concurrency in concurrencies]
    parts = [
        "# Model server",
        _harness.machine() + "; " + _harness.versions("fornax-ai", "jax", "uvicorn", "uvloop"),
        f"{args.rounds} rounds of {args.seconds} s a cell after 0.3 s of warm-up; contestants in "
        "turn, the order rotating; servers and clients share the machine. Rates are the median "
        "over rounds, latencies those of all rounds together, ratios medians of ratios within a "
        "round.",
        "## Fornax beside the fastest peer",
        _summary(standings, cells),
        "## Every contestant",
        _everyone(standings, cells),
        "## Start to first answers, and memory",
        _starts(standings),
        "## The floor",
        _floor(standings, names, bare),
    ]
    if stages:
        parts += ["## Where a small request's time goes", _stages(stages)]
    parts += ["## Who takes part", _who(standings, taking_part)]
    return "\n\n".join(parts)


def _summary(standings: Mapping[str, Any], cells: Sequence[tuple[str, int]]) -> str:
    rows = []
    for name, concurrency in cells:
        key = name, concurrency
        at = {who: s.cells[key] for who, s in standings.items() if key in s.cells}
        peers = {who: found for who, found in at.items() if not who.startswith(MINE)}
        if MINE not in at or not peers:
            continue
        best = max(peers, key=lambda who: rate(peers[who]))
        quickest = min(peers, key=lambda who: pooled(peers[who], 0.99))
        rows.append(
            (
                name,
                concurrency,
                f"{rate(at[MINE]):,.0f}",
                best,
                f"{rate(at[best]):,.0f}",
                f"{ratio(at[MINE], at[best]):.2f}",
                f"{pooled(at[MINE], 0.99):,.0f}",
                f"{pooled(at[quickest], 0.99):,.0f} ({quickest})",
            )
        )
    header = (
        "model",
        "concurrency",
        "Fornax requests/s",
        "fastest peer",
        "its requests/s",
        "ratio",
    )
    return _harness.table((*header, "Fornax p99, us", "lowest p99 of a peer, us"), rows)


def _everyone(standings: Mapping[str, Any], cells: Sequence[tuple[str, int]]) -> str:
    rows = []
    for name, concurrency in cells:
        mine = standings[MINE].cells.get((name, concurrency)) if MINE in standings else None
        for who, standing in standings.items():
            found = standing.cells.get((name, concurrency))
            if not found:
                continue
            busy = statistics.median(cell.busy for cell in found)
            rows.append(
                (
                    name,
                    concurrency,
                    who,
                    f"{rate(found):,.0f}",
                    f"{ratio(mine, found):.2f}" if mine and who != MINE else "",
                    f"{pooled(found, 0.5):,.0f}",
                    f"{pooled(found, 0.99):,.0f}",
                    f"{1e6 * busy / max(rate(found), 1e-9):,.0f}",
                )
            )
    header = ("model", "concurrency", "contestant", "requests/s", "Fornax is faster by")
    return _harness.table((*header, "p50, us", "p99, us", "server's processor us a request"), rows)


def _starts(standings: Mapping[str, Any]) -> str:
    rows = []
    for who, standing in standings.items():
        if not standing.starts:
            continue
        again = standing.starts[1:]
        rows.append(
            (
                who,
                f"{standing.starts[0]:.1f}",
                f"{statistics.median(again):.1f}" if again else "",
                f"{standing.memory / 2**20:,.0f}",
            )
        )
    header = ("contestant", "nothing cached, s", "restart, s", "memory of all its processes, MiB")
    return "From starting the process to a right answer of every model.\n\n" + _harness.table(
        header, rows
    )


def _floor(standings: Mapping[str, Any], names: Sequence[str], bare: Mapping[str, Any]) -> str:
    rows = []
    for name in names:
        times = bare[name]["us"]
        found = standings[MINE].cells.get((name, 1)) if MINE in standings else None
        rows.append(
            (
                name,
                f"{quantile(times, 0.5):,.0f}",
                f"{quantile(times, 0.99):,.0f}",
                f"{pooled(found, 0.5):,.0f}" if found else "",
                f"{pooled(found, 0.99):,.0f}" if found else "",
                f"{pooled(found, 0.99) / quantile(times, 0.99):.2f}" if found else "",
            )
        )
    header = ("model", "bare p50, us", "bare p99, us", "Fornax p50, us", "Fornax p99, us")
    return (
        "One request at a time: the compiled program alone, arrays in and arrays out, on the same "
        "requests in a quiet process; and the whole way through the server.\n\n"
        + _harness.table((*header, "p99 over bare p99"), rows)
    )


def _stages(stages: Mapping[str, Any]) -> str:
    rows = [(stage, f"{us:.1f}") for stage, us in stages["us"].items()]
    return stages["about"] + "\n\n" + _harness.table(("stage", "us"), rows)


def _who(standings: Mapping[str, Any], taking_part: Sequence[Contestant]) -> str:
    lines = []
    for contestant in taking_part:
        absent = standings[contestant.name].absent
        said = f"takes no part: {absent}" if absent else contestant.settings
        lines.append(f"- {contestant.name}: {said}")
    lines.append(f"- all that run JAX: `XLA_FLAGS={XLA_FLAGS}`")
    return "\n".join(lines)
