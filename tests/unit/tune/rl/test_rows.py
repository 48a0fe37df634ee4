"""Packing of completions into rows of few shapes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fornax.tune.config import Aggregation
from fornax.tune.rl.credit import Credit
from fornax.tune.rl.packing import Layout, make_round, pack, row_counts
from fornax.tune.rl.rollouts import Rollout, RolloutBatch, from_arrays, to_arrays


def rollout(prompt: int, mask: list[int], number: int = 0) -> Rollout:
    """A rollout whose tokens tell where they are from."""
    count = len(mask)
    return Rollout(
        prompt=np.arange(prompt, dtype=np.int32) + 1000 * number,
        tokens=np.arange(count, dtype=np.int32) + 1000 * number + 500,
        logprobs=np.where(mask, -0.5 - np.arange(count), 0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        mask=np.array(mask, np.int8),
        finish_reason="stop",
        status="ok",
        text="text",
        where="prompts.jsonl:1",
        group=number,
        reward=0.25 * number,
        parts={"a": 0.5, "b": float("nan")},
    )


SHAPES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 1), min_size=1, max_size=7)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60)
@given(SHAPES)
def test_every_token_is_predicted_once_from_its_own_sequence(shapes: list) -> None:
    rollouts = [rollout(prompt, mask, number) for number, (prompt, mask) in enumerate(shapes)]
    packed = pack(rollouts, length=12, counts=row_counts(8, 2))
    rows = packed.rows
    assert rows["tokens"].shape in {(2, 12), (4, 12), (8, 12)}
    for number, each in enumerate(rollouts):
        place = packed.places[number]
        slots = slice(place.start, place.start + each.length - 1)
        np.testing.assert_array_equal(rows["tokens"][place.row, slots], each.sequence[:-1])
        np.testing.assert_array_equal(rows["targets"][place.row, slots], each.sequence[1:])
        np.testing.assert_array_equal(rows["positions"][place.row, slots], range(each.length - 1))
        assert len(set(rows["segment_ids"][place.row, slots].tolist())) == min(1, each.length - 1)
        np.testing.assert_array_equal(packed.read(rows["loss_mask"], number), each.mask)
        np.testing.assert_array_equal(packed.read(rows["sampler_logps"], number), each.logprobs)
        np.testing.assert_array_equal(packed.read(rows["targets"], number), each.tokens)
    assert rows["loss_mask"].sum() == sum(each.drawn for each in rollouts)
    assert (rows["segment_ids"] > 0).sum() == sum(each.length - 1 for each in rollouts)
    pairs = {
        (row, segment)
        for row, line in enumerate(rows["segment_ids"])
        for segment in set(line.tolist()) - {0}
    }
    assert len(pairs) == sum(each.length > 1 for each in rollouts)
    values = [np.arange(len(each.tokens)) + number for number, each in enumerate(rollouts)]
    filled = packed.fill(values)
    for number, value in enumerate(values):
        np.testing.assert_array_equal(packed.read(filled, number), value)


def test_short_sequences_share_rows() -> None:
    packed = pack([rollout(2, [1, 1], n) for n in range(8)], length=12, counts=row_counts(8, 1))
    assert packed.rows["tokens"].shape == (2, 12)
    assert {place.row for place in packed.places} == {0, 1}


@pytest.mark.parametrize(
    ("most", "unit", "counts"),
    [
        (64, 1, (16, 32, 64)),
        (64, 8, (16, 32, 64)),
        (8, 8, (8,)),
        (24, 8, (8, 16, 24)),
        (1, 1, (1,)),
    ],
)
def test_row_counts_are_few_and_divide(most: int, unit: int, counts: tuple[int, ...]) -> None:
    assert row_counts(most, unit) == counts


def test_a_round_comes_back_from_arrays_exactly() -> None:
    rollouts = [rollout(2, [1, 0, 1], 1), rollout(1, [1], 2), rollout(3, [0, 0], 3)]
    before = RolloutBatch(number=4, version=3, position=17, rollouts=rollouts, numbers={"x": 0.1})
    after = from_arrays(to_arrays(before))
    assert (after.number, after.version, after.position) == (4, 3, 17)
    assert after.numbers == before.numbers
    for one, other in zip(before.rollouts, after.rollouts, strict=True):
        for name in ("prompt", "tokens", "logprobs", "versions", "mask"):
            mine, its = getattr(one, name), getattr(other, name)
            assert mine.dtype == its.dtype
            np.testing.assert_array_equal(mine, its)
        assert (one.text, one.group, one.reward) == (other.text, other.group, other.reward)
        assert other.parts["a"] == 0.5
        assert np.isnan(other.parts["b"])


def test_an_empty_round_comes_back() -> None:
    empty = RolloutBatch(number=0, version=-1, position=4, rollouts=[])
    assert from_arrays(to_arrays(empty)) == empty


ROWS = Layout(
    length=6,
    counts=row_counts(8, 1),
    mini_batches=1,
    epochs=1,
    aggregation="token_mean",
    max_tokens=8,
    seed=0,
)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
def test_what_has_no_advantage_is_in_no_row_and_still_divides(aggregation: Aggregation) -> None:
    rollouts = [rollout(2, [1] * (1 + number % 3), number) for number in range(8)]
    advantages = [
        0.5 * r.learned.astype(np.float32) * (n in (1, 6)) for n, r in enumerate(rollouts)
    ]
    batch = RolloutBatch(number=0, version=0, position=0, rollouts=rollouts)
    layout = replace(ROWS, aggregation=aggregation)

    def sums(layout: Layout) -> tuple[dict[str, np.ndarray], list[float], float]:
        given = Credit(rewards=[0.0] * 8, advantages=advantages)
        [rows] = make_round(batch, layout, None, lambda *_: given).steps
        each = (rows["advantages"] * rows["token_weights"])[rows["advantages"] != 0]
        return rows, sorted(each.tolist()), float(rows["sequence_weights"].sum())

    whole, weighed, divisor = sums(layout)
    fewer, weighed_fewer, divisor_fewer = sums(replace(layout, skip_zero_advantage=True))
    assert weighed_fewer == weighed
    assert divisor_fewer == pytest.approx(divisor)
    assert whole["loss_mask"].sum() == sum(r.drawn for r in rollouts)
    assert fewer["loss_mask"].sum() == rollouts[1].drawn + rollouts[6].drawn
    assert fewer["tokens"].shape[0] < whole["tokens"].shape[0]


def test_a_round_without_any_advantage_is_laid_out_whole() -> None:
    rollouts = [rollout(2, [1, 1], number) for number in range(4)]
    batch = RolloutBatch(number=0, version=0, position=0, rollouts=rollouts)
    given = Credit(rewards=[0.0] * 4, advantages=[np.zeros(2, np.float32)] * 4)
    [rows] = make_round(
        batch, replace(ROWS, skip_zero_advantage=True), None, lambda *_: given
    ).steps
    assert rows["loss_mask"].sum() == 8
    assert rows["sequence_weights"].sum() == 8
