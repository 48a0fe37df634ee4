"""The table of published training speeds: rows that agree with themselves, and predictions, from
kept facts, that stay as close to them as the results file says."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"


def _load(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_published = _load("_published")
plan_published = _load("plan_published")
PUBLISHED = _published.load()


@pytest.mark.parametrize("row", PUBLISHED.rows, ids=lambda row: row.id)
def test_a_row_agrees_with_itself_and_is_a_fornax_run(row):
    """Published seconds times published TFLOP/s are the model FLOPs of the row's config."""
    model = PUBLISHED.models[row.model]
    config = _published.config_of(row, model)
    devices = _published.topology_of(row).num_devices
    assert config.mesh.resolved_sizes(devices)["slice"] == _published.topology_of(row).slices
    flops = _published.published_flops(row, model)
    if row.step_seconds is not None:
        assert flops / row.step_seconds == pytest.approx(row.tflops * 1e12, rel=2e-3)


def test_every_row_names_where_it_was_published():
    assert all(row.source.startswith("https://github.com/") for row in PUBLISHED.rows)
    assert len({row.id for row in PUBLISHED.rows}) == len(PUBLISHED.rows)


COMPILED = [row for row in PUBLISHED.rows if _published.kept(row) is not None]


@pytest.mark.parametrize("row", COMPILED, ids=lambda row: row.id)
def test_facts_come_back_as_they_were_kept(row, tmp_path, monkeypatch):
    facts = _published.kept(row)
    monkeypatch.setattr(_published, "FACTS", tmp_path)
    _published.keep(row, facts)
    again = _published.kept(row)
    topology = _published.topology_of(row)
    first, second = (
        plan_published.predict_schedule(one.schedule, one.spans, topology) for one in (facts, again)
    )
    assert first.step_seconds == second.step_seconds
    assert first.work == second.work


DENSE = [row for row in PUBLISHED.rows if PUBLISHED.models[row.model].experts is None]


def test_rows_with_experts_miss_no_more_than_the_guide_says():
    """Nothing is fitted to them."""
    rows = [row for row in PUBLISHED.rows if row not in DENSE]
    found = [plan_published.outcome(row, PUBLISHED).estimated_error for row in rows]
    assert len(found) == 6
    assert _published.median(found) < 0.13
    assert all(-0.21 < error < 0.07 for error in found)


@pytest.mark.slow
def test_rows_that_were_not_fitted_are_predicted_within_the_aim():
    """The median of all of them, and of each kind of chip."""
    held = [row for row in DENSE if row.id not in plan_published.FITTED]
    found = {row.id: plan_published.outcome(row, PUBLISHED).estimated_error for row in held}
    assert len(found) == 51
    assert _published.median(list(found.values())) < 0.08
    for rows in _published.by_generation(held).values():
        assert _published.median([found[row.id] for row in rows]) < 0.15


def test_compiled_programs_are_predicted_within_the_aim():
    """From the kept schedules of every row that was compiled and not fitted to."""
    held = [row for row in COMPILED if row.id not in plan_published.PROGRAM_FITTED]
    found = [plan_published.outcome(row, PUBLISHED).compiled_error for row in held]
    assert len(found) >= 3
    assert _published.median(found) < 0.15


@pytest.mark.parametrize("row", COMPILED, ids=lambda row: row.id)
def test_a_compiled_row_that_misses_says_why(row):
    error = plan_published.outcome(row, PUBLISHED).compiled_error
    assert (row.missed is not None) == (abs(error) > plan_published.MISS)


def test_the_fitted_rows_meet_what_was_published():
    for name in plan_published.FITTED:
        row = next(row for row in PUBLISHED.rows if row.id == name)
        assert abs(plan_published.outcome(row, PUBLISHED).estimated_error) < 0.02


def test_a_program_of_two_slices_tells_of_more():
    """Only what crosses slices takes longer."""
    (row,) = [row for row in PUBLISHED.rows if row.id == "16b-4x-v5e-256"]
    topology = _published.topology_of(row)
    layout = plan_published.Facts((), {"a": (_published.GroupLayout(slices=2),)}, {})
    more = _published.with_slices(layout, topology.slices)
    assert more.spans["a"][0].slices == 4
    inside = _published.GroupLayout(cores=2)
    assert _published.with_slices(plan_published.Facts((), {"a": (inside,)}, {}), 4).spans == {
        "a": (inside,)
    }
