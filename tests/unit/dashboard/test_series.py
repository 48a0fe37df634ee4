"""Columns and curves, against NumPy over the records themselves."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.dashboard.series import Table


def table_of(records: list[dict[str, Any]], pieces: int = 1) -> Table:
    table = Table()
    for part in np.array_split(np.arange(len(records)), pieces):
        table.append([records[n] for n in part])
    return table


def noisy(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {"step": n + 1, "loss": float(rng.normal()), "tokens": 100 * n, "time": 1e9 + 2 * n}
        for n in range(count)
    ]


def test_the_extremes_of_each_bucket_are_kept() -> None:
    records = noisy(10_007)
    records[5000]["loss"] = 1e6  # one step of ten thousand
    curve = table_of(records, pieces=7).curve("loss", "step", 100)
    losses = np.array([record["loss"] for record in records])
    assert len(curve.x) == 100
    assert not curve.raw
    assert curve.high.max() == 1e6
    assert curve.low.min() == losses.min()
    assert np.average(curve.y, weights=np.diff(np.linspace(0, 10_007, 101).astype(int))) == (
        pytest.approx(losses.mean())
    )
    assert (np.diff(curve.x) > 0).all()
    assert curve.n == 10_007


@given(st.lists(st.none() | st.floats(), min_size=1, max_size=200), st.integers(10, 50))
def test_curves_of_any_values(values: list[float | None], points: int) -> None:
    table = Table()
    table.append([{"step": n, "loss": value} for n, value in enumerate(values)])
    curve = table.curve("loss", "step", points)
    numbers = [v for v in values if v is not None and math.isfinite(v)]
    assert len(curve.x) == min(points, len(values))
    assert curve.n == len(values)
    if numbers:
        assert np.nanmax(curve.high) == max(numbers)
        assert np.nanmin(curve.low) == min(numbers)
    missing = [n for n, v in enumerate(values) if v is None or not math.isfinite(v)]
    assert curve.nan.tolist() == missing[:100]


def test_a_metric_of_some_steps_lies_at_those_steps() -> None:
    records = noisy(30)
    for record in records[9::10]:
        record["eval/loss"] = -record["loss"]
    table = table_of(records, pieces=3)
    curve = table.curve("eval/loss", "step", 1000)
    assert curve.x.tolist() == [10, 20, 30]
    assert curve.y.tolist() == [-records[n]["loss"] for n in (9, 19, 29)]
    assert curve.raw


def test_axes() -> None:
    table = table_of([{**record, "tokens_per_second": 1.0} for record in noisy(5)])
    assert table.axes() == ["step", "tokens", "time"]
    assert table.curve("loss", "tokens", 10).x.tolist() == [0, 100, 200, 300, 400]
    assert table.curve("loss", "time", 10).x.tolist() == [0, 2, 4, 6, 8]
    assert table.names() == ["loss", "tokens_per_second"]


def test_the_second_axis_is_what_a_run_counts() -> None:
    table = table_of([{"step": 1, "loss": 1.0, "pairs": 8, "pairs_per_second": 4.0, "time": 1.0}])
    assert table.counter() == "pairs"


def test_a_range_is_cut_out() -> None:
    table = table_of(noisy(1000))
    curve = table.curve("loss", "step", 1000, 100, 199)
    assert (curve.x.min(), curve.x.max(), curve.n) == (100, 199, 100)


def test_steps_that_go_back_are_put_in_order() -> None:
    table = table_of([{"step": n, "loss": float(n)} for n in (1, 2, 3, 2, 3, 4)])
    curve = table.curve("loss", "step", 10)
    assert curve.x.tolist() == [1, 2, 2, 3, 3, 4]
    assert curve.y.tolist() == [1, 2, 2, 3, 3, 4]


def test_what_is_no_number_makes_no_column() -> None:
    records = [
        {
            "step": 1,
            "loss": 1.0,
            "note": "text",
            "array": [1, 2],
            "deep": {"a": 1},
            "skipped": True,
        },
        {"step": 2, "loss": "1.5", "note": None, "array": None, "deep": 3, "skipped": False},
        {"step": 3, "loss": 10**400, "skipped": False},
    ]
    table = table_of(records)
    assert table.names() == ["loss", "deep", "skipped"]
    assert table.curve("skipped", "step", 10).y.tolist() == [1, 0, 0]
    assert table.curve("deep", "step", 10).x.tolist() == [2]
    assert math.isnan(table.values("loss")[-1])


def test_memory_of_a_long_run_is_eight_bytes_a_value() -> None:
    names = [f"m{n}" for n in range(30)]
    table = Table()
    for begin in range(0, 50_000, 2500):
        table.append([{"step": n, **dict.fromkeys(names, 1.0)} for n in range(begin, begin + 2500)])
    assert 50_000 * 31 * 8 <= table.nbytes < 1.3 * 50_000 * 31 * 8
