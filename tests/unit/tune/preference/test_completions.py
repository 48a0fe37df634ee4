"""Log-probs of completions are the sums they say they are, whichever positions are projected."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

from fornax.models import Decoder
from fornax.tune.tasks.pairs import completion_logprobs, keep_positions, kept_room


@pytest.fixture(scope="module")
def logps(decoder: Decoder) -> Any:
    """(batch) to the sums and their gradient for the embedding."""
    graphdef, state = nnx.split(decoder)

    def total(state: Any, batch: Any) -> Any:
        found = completion_logprobs(nnx.merge(graphdef, state), batch)
        return jnp.sum(found.averages), found

    def run(batch: Any) -> Any:
        gradient, found = jax.grad(total, has_aux=True)(state, batch)
        return gradient["embed"]["embedding"].get_value(), found

    return jax.jit(run)


def test_sums_over_the_completion_alone_and_gathering_changes_nothing(
    decoder: Decoder, rows: Any, logps: Any
):
    batch = rows((3, 2))
    gradient, found = logps(batch)
    logits = jax.jit(type(decoder).__call__)(
        decoder,
        batch["tokens"].reshape(6, -1),
        segment_ids_BT=batch["segment_ids"].reshape(6, -1),
    )
    every = scipy.special.log_softmax(np.asarray(logits, np.float64), axis=-1)
    picked = np.take_along_axis(every, batch["targets"].reshape(6, -1)[..., None], axis=-1)[..., 0]
    expected = (picked * batch["loss_weights"].reshape(6, -1)).sum(-1).reshape(3, 2)
    np.testing.assert_allclose(found.logps, expected, rtol=2e-5)
    np.testing.assert_array_equal(found.lengths, batch["loss_weights"].sum(-1))

    room = kept_room(int(batch["loss_weights"].sum(-1).max()), 16)
    assert room < 16
    keep = keep_positions(batch["loss_weights"], room)
    same_gradient, same = logps({**batch, "keep": keep})
    np.testing.assert_allclose(same.logps, found.logps, rtol=1e-6)
    np.testing.assert_array_equal(same.lengths, found.lengths)
    np.testing.assert_allclose(same_gradient, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("longest", "length", "room"), [(1, 64, 8), (8, 64, 8), (9, 64, 16), (64, 64, 64), (3, 5, 3)]
)
def test_room_grows_in_eighths_of_the_row(longest: int, length: int, room: int):
    assert kept_room(longest, length) == room


def test_kept_positions_are_the_trained_ones_first():
    weights = np.array([[0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0]], np.float32)
    keep = keep_positions(weights, 3)
    assert keep.tolist()[0] == [1, 3, 4]
    assert keep[1, 0] == 0
    assert keep.dtype == np.int32
