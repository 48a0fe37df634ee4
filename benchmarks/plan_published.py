"""Predicted step times beside published ones: the same model, slice, batch, remat and mesh.

    python benchmarks/plan_published.py [--write] [--fit]
    python benchmarks/plan_published.py --compile [ROW ...]      # needs libtpu, minutes a row

Every row is predicted by the closed forms of `fornax.plan.closed_form`; rows whose program was
compiled (`--compile` keeps the facts that matter in `published/facts`) from their schedule too. One
row of each kind of chip, its smallest slice, was used to fit the chip's calibration (see
`fornax.hlo.roofline`); errors are reported for the rows that were not.
"""

import argparse
import datetime
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import _published
from _published import Facts, Published, Row, generation
from fornax.hlo import Calibration, calibration_of
from fornax.plan.closed_form import grouped
from fornax.plan.cost import estimate as cost_estimate
from fornax.plan.cost import step as cost_step
from fornax.plan.cost.estimate import Estimate, estimate
from fornax.plan.cost.schedule import predict_schedule
from fornax.plan.facts import Prediction
from fornax.plan.topology import Topology

RESULTS = Path(__file__).parent / "results"

FITTED = ("8b-v6e-8", "32b-v5p-128", "16b-v5e-256", "70b-tpu7x-64")
"""The smallest slice in each kind of chip's table: closed forms have been fitted to these rows."""
PROGRAM_FITTED = ("8b-v6e-8", "70b-tpu7x-64")
"""Rows fitted to as programs: transfers to the host on v6e-8 gave their rate, and TPU7x, on which
products reach less of the published rate than on the chips before it, the share of its own."""
MISS = 0.15
"""A row whose program is predicted worse than this says why (`missed` in the file of rows)."""


@dataclass(frozen=True)
class Outcome:
    """One row's predictions."""

    row: Row
    published: float
    estimated: Estimate
    compiled: Prediction | None
    """None for a row that was not compiled."""
    facts: Facts | None
    retold: bool
    """Whether the facts are those of the two-slice program with another number of slices."""

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        model = self.estimated.config.model
        return model is not None and model.experts is not None

    @property
    def estimated_error(self) -> float:
        """Signed, relative."""
        return self.estimated.step_seconds / self.published - 1

    @property
    def compiled_error(self) -> float | None:
        """Signed, relative."""
        return None if self.compiled is None else self.compiled.step_seconds / self.published - 1


def facts_of(row: Row, published: Published) -> tuple[Facts | None, bool]:
    """A row's facts; for more than two slices those of two will do."""
    own = _published.kept(row)
    topology = _published.topology_of(row)
    if own is not None or topology.slices <= 2:
        return own, False
    for other in published.rows:
        there = _published.topology_of(other)
        alike = (other.model, other.remat, there.shape) == (row.model, row.remat, topology.shape)
        found = _published.kept(other) if alike and there.slices == 2 else None
        if found is not None:
            return _published.with_slices(found, topology.slices), True
    return None, False


def estimated(row: Row, published: Published) -> Estimate:
    """A row by closed forms, with the tiles or the masks of its own way with experts."""
    model, topology = published.models[row.model], _published.topology_of(row)
    config, facts = _published.config_of(row, model), cost_estimate.step_facts
    with ExitStack() as stack:
        if row.tiles is not None:
            tiles = published.tiles[row.tiles]
            own = mock.patch.object(
                grouped, "tiles_of", lambda which, rows, experts, sides, item: tiles[which, *sides]
            )
            stack.enter_context(own)
        if row.capacity is not None:
            masked = mock.patch.object(
                cost_estimate,
                "step_facts",
                lambda *given: _published.with_masks(facts(*given), row, model),
            )
            stack.enter_context(masked)
        return estimate(config, topology)


def outcome(row: Row, published: Published) -> Outcome:
    """A row, predicted."""
    model, topology = published.models[row.model], _published.topology_of(row)
    facts, retold = facts_of(row, published)
    return Outcome(
        row=row,
        published=_published.published_seconds(row, model),
        estimated=estimated(row, published),
        compiled=predict_schedule(facts.schedule, facts.spans, topology) if facts else None,
        facts=facts,
        retold=retold,
    )


def outcomes(published: Published) -> list[Outcome]:
    """Every row, predicted."""
    return [outcome(row, published) for row in published.rows]


def fit(published: Published, row: Row) -> dict[str, float]:
    """The shares of peak in products at which a row's predictions are what was published."""
    model, topology = published.models[row.model], _published.topology_of(row)
    goal = _published.published_seconds(row, model)
    config, (facts, _) = _published.config_of(row, model), facts_of(row, published)
    known = calibration_of(topology.chip)

    def estimated(share: float) -> float:
        tried = replace(known, matmul_estimated=share)
        with mock.patch.object(cost_step, "calibration_of", return_value=tried):
            return estimate(config, topology).step_seconds

    found = {"matmul_estimated": _solve(estimated, goal)}
    if facts is not None:
        found["matmul"] = _solve(lambda share: _scheduled(facts, topology, known, share), goal)
    return found


def _scheduled(facts: Facts, topology: Topology, known: Calibration, share: float) -> float:
    tried = replace(known, matmul=share)
    return predict_schedule(facts.schedule, facts.spans, topology, tried).step_seconds


def _solve(seconds: Callable[[float], float], goal: float) -> float:
    """The share at which falling `seconds` meet `goal`, within 0.1 and 2."""
    low, high = 0.1, 2.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) > goal else (low, middle)
    return round(middle, 3)


def compile_rows(published: Published, names: Sequence[str]) -> None:
    """Compile rows without facts (or those named) and keep what predictions need."""
    from fornax.hlo import analyse, parse
    from fornax.plan.compile import compile_train
    from fornax.plan.cost.schedule import collective_layouts

    for row in published.rows:
        if row.id not in names if names else _published.kept(row) is not None:
            continue
        config = _published.config_of(row, published.models[row.model])
        topology = _published.topology_of(row)
        options = dict(published.flags[row.flags])
        (artifact,) = compile_train(config, topology, programs=("train_step",), options=options)
        facts = analyse(parse(artifact.hlo), dict(artifact.mesh))
        spans = collective_layouts(facts.schedule, artifact.devices, topology)
        details = {
            "versions": dict(artifact.versions),
            "gib_per_device": round(artifact.memory.total / 2**30, 2),
            "compile_seconds": round(artifact.compile_seconds, 1),
            "notes": list(facts.notes),
        }
        path = _published.keep(row, Facts(facts.schedule, spans, details))
        print(f"{row.id}: {path.stat().st_size} bytes kept", flush=True)


HEAD = (
    *("row", "published s", "estimated s", "error", "GiB"),
    *("compiled s", "error", "bound", "exposed", "all hidden … none"),
)


def table(found: Iterable[Outcome]) -> list[str]:
    """The rows as Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for one in found:
        marks = " (fitted)" * (one.row.id in FITTED)
        step = f"{one.published:.3f}" if one.row.step_seconds else f"{one.published:.2f}*"
        told = one.estimated
        first = (
            f"| {one.row.id}{marks} | {step} | {told.step_seconds:.2f} "
            f"| {one.estimated_error:+.1%} | {told.memory.total / 2**30:.1f} "
        )
        lines.append(first + _compiled(one))
    return lines


def _compiled(one: Outcome) -> str:
    told, error = one.compiled, one.compiled_error
    if told is None or error is None:
        return "| | | | | |"
    exposed = told.exposed_seconds / told.step_seconds
    marks = " (as 2 slices)" * one.retold + " (fitted)" * (one.row.id in PROGRAM_FITTED)
    return (
        f"| {told.step_seconds:.2f}{marks} | {error:+.1%} | {told.bound} "
        f"| {exposed:.0%} | {told.optimistic_seconds:.2f} … {told.pessimistic_seconds:.2f} |"
    )


def summary(found: Sequence[Outcome]) -> list[str]:
    """Median and worst, apart for rows that the calibration has not seen."""
    all_held = [(one, one.estimated_error) for one in found if one.row.id not in FITTED]
    experts = [(one.row, error) for one, error in all_held if one.has_experts]
    held = [(one.row, error) for one, error in all_held if not one.has_experts]
    compiled = [
        (one.row, one.compiled_error)
        for one in found
        if one.compiled_error is not None and one.row.id not in PROGRAM_FITTED
    ]
    known = {(one.row.model, generation(one.row)) for one in found if one.row.id in FITTED}
    others = [pair for pair in held if (pair[0].model, generation(pair[0])) not in known]
    groups = [("estimated, all dense held out", held), ("estimated, other dense models", others)]
    groups += [("estimated, experts", experts)]
    groups += [
        (f"estimated, dense, {name}", [pair for pair in held if generation(pair[0]) == name])
        for name in sorted({generation(row) for row, _ in held})
    ]
    groups += [("compiled, all held out", compiled)]
    lines = ["| rows | count | median error | worst |", "|---|---|---|---|"]
    for name, some in groups:
        if some:
            middle = _published.median([error for _, error in some])
            row, worst = max(some, key=lambda pair: abs(pair[1]))
            lines.append(f"| {name} | {len(some)} | {middle:.1%} | {worst:+.1%} ({row.id}) |")
    return lines


def report(published: Published, found: Sequence[Outcome]) -> str:
    """The whole results file."""
    sources = {one.row.source: one.row.id for one in reversed(found)}
    differs = [f"- {one.row.id}: {one.row.differs}." for one in found if one.row.differs]
    missed = [
        f"- {one.row.id}, {one.compiled_error:+.1%}: {one.row.missed}."
        for one in found
        if one.compiled_error is not None and abs(one.compiled_error) > MISS
    ]
    lines = [
        "# Predicted step times beside published ones",
        "",
        f"{datetime.date.today().isoformat()}. Published: MaxText's results (addresses below). "
        "Estimated: `fornax.plan.closed_form`, nothing compiled. Compiled: Fornax's own "
        "train step, made by libtpu for the same slice, batch, sequence, remat, mesh and compiler "
        "options, predicted from its schedule. Nothing ran here. * follows from published TFLOP/s.",
        "",
        *summary(found),
        "",
        *table(found),
        "",
        "GiB: a chip's memory by the estimate. Exposed: share of the step in which the core waits "
        "for a transfer. Last column: every transfer hidden as far as links allow, and none.",
        "",
        *(["## Compiled, and more than 15 % off", "", *missed, ""] if missed else []),
        "## Experts",
        "",
        "Nothing is fitted to rows with experts. Their products are predicted by the tiles of the "
        "published run's kernel (`use_tokamax_gmm`, its tables of tuned tiles), a tile that two "
        "experts share being computed for each; Mixtral's by the slots that its run computes, and "
        "the products with masks that move tokens. Sorting is taken at the memory's bandwidth.",
        "",
        "## Not the same run",
        "",
        "- all: Fornax's own blocks of the attention kernel, its loss in chunks, today's compiler.",
        *differs,
        "",
        "## Left out",
        "",
        *(f"- {what}: {why}." for what, why in published.excluded),
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
        print(json.dumps({name: fit(published, rows[name]) for name in FITTED}, indent=1))
    text = report(published, outcomes(published))
    print(text)
    if args.write:
        name = f"{datetime.date.today().isoformat()}-cpu-plan_published.md"
        (RESULTS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
