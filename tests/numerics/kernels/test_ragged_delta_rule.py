"""The gated delta rule of a ragged batch against the recurrence in float64, sequence by sequence.

Legend: T tokens, L layers, A slots, K key heads, R value heads of a key head, H key width,
V value width.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.numerics.kernels.test_gated_delta_rule import Inputs, make, recurrence

from fornax import kernels

L, A, LAYER = 2, 5, 1
run = functools.partial(jax.jit, kernels.ragged_gated_delta_rule)()


def ragged(counts: tuple[int, ...], tokens: int, *, corrects: bool = True) -> Inputs:
    """A batch of `tokens` tokens; the sequences stand in slots 3, 0, 4, …, the second begins."""
    found = {name.replace("BT", "T"): x[0] for name, x in make(tokens).items() if "BT" in name}
    del found["starts_T"]
    if not corrects:
        found["beta_TKR"] = None
    rng = np.random.default_rng(1)
    states = rng.normal(size=(L, A, *make(1)["state_BKRHV"].shape[1:])).astype(np.float32)
    rows = len(counts)
    return found | {
        "states_LAKRHV": states,
        "layer": jnp.int32(LAYER),
        "query_start_U1": np.cumsum([0, *counts]).astype(np.int32),
        "slots_U": np.array([3, 0, 4, 2, 1], np.int32)[:rows],
        "kept_UJ": np.array([[3], [0], [4], [2], [1]], np.int32)[:rows],
        "fresh_U": np.arange(rows) == 1,
    }


def alone(batch: Inputs, row: int) -> tuple[np.ndarray, np.ndarray]:
    """o [T, K, R, V] and the state after it of one sequence, by itself."""
    own = slice(*batch["query_start_U1"][row : row + 2])
    names = ("q_TKH", "k_TKH", "v_TKRV", "log_decay_TKR", "beta_TKR")
    inputs = {
        name.replace("T", "BT", 1): None if batch[name] is None else batch[name][None, own]
        for name in names
    }
    inputs["starts_BT"] = np.zeros((1, inputs["q_BTKH"].shape[1]), bool)
    state = batch["states_LAKRHV"][LAYER, batch["slots_U"][row]][None]
    inputs["state_BKRHV"] = np.where(batch["fresh_U"][row], 0, state)
    o_BTKRV, state_BKRHV = recurrence(inputs)
    return o_BTKRV[0], state_BKRHV[0]


@pytest.mark.parametrize(
    ("counts", "tokens", "corrects"),
    [
        ((1,), 1, True),
        ((1, 1, 1, 1, 1), 8, True),
        ((2, 3, 0), 5, True),
        ((1, 70, 1, 128, 5), 210, True),
        ((1, 70, 1, 5), 80, False),
    ],
    ids=str,
)
def test_each_sequence_is_as_by_itself(
    counts: tuple[int, ...], tokens: int, corrects: bool
) -> None:
    """Single tokens beside several chunks; other slots, layers and rows without tokens stay."""
    batch = ragged(counts, tokens, corrects=corrects)
    o_TKRV, states_LAKRHV = run(**batch)
    expected = batch["states_LAKRHV"].astype(np.float64)
    for row, count in enumerate(counts):
        if not count:
            continue
        start = batch["query_start_U1"][row]
        o, state = alone(batch, row)
        np.testing.assert_allclose(o_TKRV[start : start + count], o, atol=5e-6)
        expected[LAYER, batch["slots_U"][row]] = state
    np.testing.assert_allclose(states_LAKRHV, expected, atol=5e-6)


def test_short_sequences_keep_the_state_after_each_token() -> None:
    """Beside a long one, which keeps its last; the states gone on from are those before the step,
    and slots that nobody names stay."""
    counts, kept = (3, 1, 9, 2, 0), ((0, 3, 5), (6, 99, 99), (1, 99, 99), (99, 2, 99), (4, 7, 8))
    batch = ragged(counts, 16)
    rng = np.random.default_rng(2)
    shape = (L, 9, *batch["states_LAKRHV"].shape[2:])
    batch["states_LAKRHV"] = rng.normal(size=shape).astype(np.float32)
    batch["kept_UJ"] = np.array(kept, np.int32)
    o_TKRV, states_LAKRHV = run(**batch)
    expected = batch["states_LAKRHV"].astype(np.float64)
    for row, (count, slots) in enumerate(zip(counts, kept, strict=True)):
        start = batch["query_start_U1"][row]
        ends = range(1, count + 1) if count <= 3 else (count,)
        for end, slot in zip(ends, slots, strict=False):
            starts = batch["query_start_U1"].copy()
            starts[row + 1] = start + end
            o, state = alone({**batch, "query_start_U1": starts}, row)
            np.testing.assert_allclose(o_TKRV[start : start + end], o, atol=5e-6)
            if slot < 9:
                expected[LAYER, slot] = state
    np.testing.assert_allclose(states_LAKRHV, expected, atol=5e-6)


@pytest.mark.slow
def test_what_is_no_number_stays_where_it_is() -> None:
    """A sequence's neighbours, and who has its slot next, do not see it."""
    batch = ragged((5, 6, 1), 12)
    clean, _ = run(**batch)
    k_TKH = batch["k_TKH"].copy()
    k_TKH[5:11] = np.nan
    states = batch["states_LAKRHV"].copy()
    states[LAYER, 0] = np.nan  # of the second, which begins
    o_TKRV, after = run(**{**batch, "k_TKH": k_TKH, "states_LAKRHV": states})
    assert np.isnan(o_TKRV[5:11]).any()
    np.testing.assert_array_equal(o_TKRV[:5], clean[:5])
    np.testing.assert_array_equal(o_TKRV[11:], clean[11:])
    assert np.isfinite(after[LAYER, 1:]).all()
    o_TKRV, _ = run(**{**batch, "states_LAKRHV": states})
    np.testing.assert_array_equal(o_TKRV, clean)
