"""Predicted step times beside published ones: the same model, slice, batch, remat and mesh.

    python benchmarks/plan_published.py [--write] [--fit]
    python benchmarks/plan_published.py --compile [ROW ...]      # needs libtpu, minutes a row

Predictions come from the facts kept in `published/facts`; `--compile` makes those of rows that have
none. One row of each kind of chip, its smallest slice, was used to fit the chip's calibration (see
`fornax.plan.cost.calibration`); errors are reported apart for the rows that were not.
"""

import argparse
import datetime
import json
from dataclasses import dataclass, replace
from pathlib import Path

import _published
from _published import Facts, Published, Row
from fornax.plan.cost import Prediction, calibration_of, predict_schedule

RESULTS = Path(__file__).parent / "results"

FITTED = ("8b-v6e-8", "32b-v5p-128", "16b-v5e-256", "70b-tpu7x-64")
"""The smallest slice in each kind of chip's table: the calibration has seen these rows."""


@dataclass(frozen=True)
class Outcome:
    """One row's prediction."""

    row: Row
    published: float
    prediction: Prediction
    facts: Facts
    retold: bool
    """Whether the facts are those of the two-slice program with another number of slices."""

    @property
    def error(self) -> float:
        return self.prediction.step_seconds / self.published - 1


def facts_of(row: Row, published: Published) -> tuple[Facts, bool] | None:
    """A row's facts; for more than two slices those of two will do."""
    own = _published.kept(row)
    if own is not None:
        return own, False
    slices = _published.topology_of(row).slices
    for other in published.rows:
        same = other.model == row.model and other.remat == row.remat and slices > 2
        if same and _published.topology_of(other).slices == 2:
            alike = _published.topology_of(other).shape == _published.topology_of(row).shape
            found = _published.kept(other) if alike else None
            if found is not None:
                return _published.with_slices(found, slices), True
    return None


def outcomes(published: Published) -> list[Outcome]:
    """Every row that has facts, predicted."""
    found = []
    for row in published.rows:
        facts = facts_of(row, published)
        if facts is not None:
            topology = _published.topology_of(row)
            prediction = predict_schedule(facts[0].schedule, facts[0].spans, topology)
            seconds = _published.published_seconds(row, published.models[row.model])
            found.append(Outcome(row, seconds, prediction, *facts))
    return found


def fitted_matmul(published: Published, row: Row) -> float | None:
    """The share of peak in products at which the row's prediction is what was published."""
    facts = facts_of(row, published)
    if facts is None:
        return None
    topology = _published.topology_of(row)
    goal = _published.published_seconds(row, published.models[row.model])
    low, high = 0.1, 1.5
    for _ in range(40):
        middle = (low + high) / 2
        tried = replace(calibration_of(topology.chip), matmul=middle)
        seconds = predict_schedule(facts[0].schedule, facts[0].spans, topology, tried).step_seconds
        low, high = (middle, high) if seconds > goal else (low, middle)
    return middle


def compile_rows(published: Published, names: list[str]) -> None:
    """Compile rows without facts (or those named) and keep what predictions need."""
    from fornax.plan.compile import compile_train
    from fornax.plan.cost.schedule import collective_spans
    from fornax.plan.hlo import analyse, parse

    for row in published.rows:
        if row.id not in names if names else _published.kept(row) is not None:
            continue
        config = _published.config_of(row, published.models[row.model])
        topology = _published.topology_of(row)
        options = dict(published.flags[row.flags])
        (artifact,) = compile_train(config, topology, programs=("train_step",), options=options)
        facts = analyse(parse(artifact.hlo), dict(artifact.mesh))
        spans = collective_spans(facts.schedule, artifact.devices, topology)
        details = {
            "versions": dict(artifact.versions),
            "gib_per_device": round(artifact.memory.total / 2**30, 2),
            "compile_seconds": round(artifact.compile_seconds, 1),
            "notes": list(facts.notes),
        }
        path = _published.keep(row, Facts(facts.schedule, spans, details))
        print(f"{row.id}: {path.stat().st_size} bytes kept", flush=True)


HEAD = ("row", "published s", "predicted s", "error", "bound", "exposed", "hidden … none hidden")


def table(found: list[Outcome]) -> list[str]:
    """The rows as Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for one in found:
        told = one.prediction
        marks = " (fitted)" * (one.row.id in FITTED) + " (as 2 slices)" * one.retold
        step = f"{one.published:.3f}" if one.row.step_seconds else f"{one.published:.2f}*"
        exposed = told.exposed_communication_seconds / told.step_seconds
        span = f"{told.optimistic_seconds:.2f} … {told.pessimistic_seconds:.2f}"
        lines.append(
            f"| {one.row.id}{marks} | {step} | {told.step_seconds:.3f} | {one.error:+.1%} "
            f"| {told.bound} | {exposed:.0%} | {span} |"
        )
    return lines


def summary(found: list[Outcome]) -> list[str]:
    """Median and worst, apart for rows that the calibration has not seen."""
    held = [one for one in found if one.row.id not in FITTED]
    groups = [("held out, all", held), ("held out and compiled", [o for o in held if not o.retold])]
    groups += [
        (f"held out, {name}", [one for one in held if _published.generation(one.row) == name])
        for name in sorted({_published.generation(one.row) for one in held})
    ]
    lines = ["| rows | count | median error | worst |", "|---|---|---|---|"]
    for name, some in groups:
        if some:
            middle = _published.median([one.error for one in some])
            worst = max(some, key=lambda one: abs(one.error))
            lines.append(
                f"| {name} | {len(some)} | {middle:.1%} | {worst.error:+.1%} ({worst.row.id}) |"
            )
    return lines


def report(published: Published, found: list[Outcome]) -> str:
    """The whole results file."""
    missing = [row.id for row in published.rows if row.id not in {o.row.id for o in found}]
    sources = {one.row.source: one.row.id for one in reversed(found)}
    differs = [f"- {one.row.id}: {one.row.differs}" for one in found if one.row.differs]
    lines = [
        "# Predicted step times beside published ones",
        "",
        f"{datetime.date.today().isoformat()}. Published: MaxText's results (addresses below); "
        "predicted: `fornax.plan` on Fornax's own train step, compiled by libtpu for the same "
        "slice, batch, sequence, remat and mesh. Nothing ran. * follows from published TFLOP/s.",
        "",
        *summary(found),
        "",
        *table(found),
        "",
        "Exposed: share of the predicted step in which the core waits for a transfer. Last column: "
        "the step with every transfer hidden as far as links allow, and with none hidden.",
        "",
        "## Not the same run",
        "",
        "- all: Fornax's own blocks of the attention kernel, loss in chunks, today's compiler.",
        *differs,
        "",
        "## Left out",
        "",
        *(f"- {what}: {why}." for what, why in published.excluded),
        *(f"- {name}: not compiled." for name in missing),
        "",
        "## Sources",
        "",
        *(f"- {name}: {address}" for address, name in reversed(sources.items())),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/…")
    parser.add_argument("--fit", action="store_true", help="print what fits the fitted rows")
    parser.add_argument("--compile", nargs="*", metavar="ROW", help="compile rows without facts")
    args = parser.parse_args()
    published = _published.load()
    if args.compile is not None:
        compile_rows(published, args.compile)
    if args.fit:
        rows = {row.id: row for row in published.rows}
        print(json.dumps({name: fitted_matmul(published, rows[name]) for name in FITTED}))
    text = report(published, outcomes(published))
    print(text)
    if args.write:
        name = f"{datetime.date.today().isoformat()}-cpu-plan_published.md"
        (RESULTS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
