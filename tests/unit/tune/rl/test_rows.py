"""Packing of completions into rows of few shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fornax.tune.rl.rollouts import Collected, Rollout, from_arrays, to_arrays
from fornax.tune.rl.rows import pack, row_counts


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
    before = Collected(number=4, version=3, position=17, rollouts=rollouts, numbers={"x": 0.1})
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
    empty = Collected(number=0, version=-1, position=4, rollouts=[])
    assert from_arrays(to_arrays(empty)) == empty
