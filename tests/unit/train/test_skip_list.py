"""Batches by number: which are passed over, which are next to one, and what is spoiled."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fornax.config import ConfigError
from fornax.train import DrillConfig
from fornax.train.skip_list import NumberedBatches, Rewind, SkipList

REWIND = Rewind(
    step=9, batch=8, metric="loss", value=7.0, median=2.0, limit=3.0, skipped=[7, 8], back_to=5,
    source="memory", time=1.5,
)  # fmt: skip


class Numbers(Iterator):
    """Batches that hold the number they have in a pipeline which leaves some out by itself."""

    def __init__(self, left_out: tuple[int, ...] = (), limit: int = 40):
        self.numbers = [n for n in range(limit) if n not in left_out]
        self.read = 0

    def __next__(self) -> dict[str, np.ndarray]:
        if self.read == len(self.numbers):
            raise StopIteration
        self.read += 1
        return {"number": np.array([self.numbers[self.read - 1]])}

    def state(self) -> dict[int, dict]:
        return {0: {"read": self.read}}

    def restore(self, state: dict[int, dict], *, allow_changes: bool = False) -> None:
        self.read = state[0]["read"]

    def close(self) -> None:
        pass


def numbers(batches: NumberedBatches) -> list[int]:
    return [int(rows["number"][0]) for rows in batches]


def test_batches_keep_the_numbers_of_the_pipeline_whatever_it_leaves_out():
    skip = SkipList(batches=[3, 9, 39])
    batches = NumberedBatches(Numbers((4, 5, 6, 10)), skip, [(4, 7), (10, 11)])
    assert [int(next(batches)["number"][0]) for _ in range(4)] == [0, 1, 2, 7]
    assert batches.position == 8
    state = batches.state()
    rest = numbers(batches)
    assert rest == [8, *range(11, 39)]
    again = NumberedBatches(Numbers((4, 5, 6, 10)), skip, [(4, 7), (10, 11)])
    again.restore(state, 8)
    assert numbers(again) == rest


def test_neighbours_are_batches_that_are_trained_on():
    batches = NumberedBatches(Numbers((4, 5)), SkipList(batches=[7]), [(4, 6)])
    assert batches.neighbours(8, before=2, after=1) == [3, 6, 8, 9]
    assert batches.neighbours(1, before=5, after=0) == [0, 1]


def test_the_list_survives_its_file(tmp_path: Path):
    skip = SkipList()
    skip.add(REWIND)
    skip.add(dataclasses.replace(REWIND, skipped=[30], value=None))
    skip.write(tmp_path / "spikes.jsonl")
    found = SkipList.read(tmp_path / "spikes.jsonl")
    assert found.rewinds == skip.rewinds
    assert found.batches == {7, 8, 30}
    assert SkipList.read(tmp_path / "none.jsonl").batches == set()
    (tmp_path / "spikes.jsonl").write_text('{"step": 3}\n')
    with pytest.raises(ConfigError, match="not a list of rewinds"):
        SkipList.read(tmp_path / "spikes.jsonl")


def test_a_checkpoint_that_was_trained_on_a_listed_batch_contradicts():
    skip = SkipList([REWIND])
    assert not skip.contradicts({"batches": 7})
    assert skip.contradicts({"batches": 8})
    assert not skip.contradicts({"batches": 12, "skipped_batches": [7, 8]})


def test_a_drill_spoils_the_batches_it_names():
    rows = {
        "tokens": np.arange(24).reshape(4, 6),
        "targets": np.arange(24).reshape(4, 6),
        "loss_weights": np.ones((4, 6), np.float32),
    }

    class Same(Numbers):
        def __next__(self) -> dict[str, np.ndarray]:
            super().__next__()
            return rows

    batches = NumberedBatches(Same(), SkipList(), drill=DrillConfig(nan=(1,), noise=(2,)))
    plain, nan, noise = (next(batches) for _ in range(3))
    assert plain is rows
    assert np.isnan(nan["loss_weights"]).all()
    assert np.isfinite(rows["loss_weights"]).all()
    assert set(noise["targets"].reshape(-1)) <= set(range(24))
    assert (noise["targets"] != rows["targets"]).mean() > 0.5
    assert (noise["tokens"] == rows["tokens"]).all()


def test_a_drill_that_batches_cannot_have_is_refused():
    for drill, message in (
        (DrillConfig(noise=(0,)), "have no `targets`"),
        (DrillConfig(nan=(0,)), "no array of floating-point"),
    ):
        with pytest.raises(ConfigError, match=message):
            next(NumberedBatches(Numbers(), SkipList(), drill=drill))
