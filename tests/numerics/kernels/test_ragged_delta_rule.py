"""The gated delta rule of a ragged batch against the recurrence in float64, sequence by sequence;
of the native kernel also that no bit depends on what is beside a sequence, or on how it is cut.

Legend: T tokens, L layers, A slots, K key heads, R value heads of a key head, H key width,
V value width.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.numerics.kernels.test_gated_delta_rule import Inputs, make, recurrence

from fornax import kernels

L, A, LAYER = 2, 5, 1
run = jax.jit(kernels.ragged_gated_delta_rule, static_argnames="implementation")


@pytest.fixture(params=["native", "xla"])
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each implementation."""
    return {"implementation": request.param}


def ragged(counts: tuple[int, ...], tokens: int, *, corrects: bool = True) -> Inputs:
    """A batch of `tokens` tokens; the sequences are in slots 3, 0, 4, …, the second begins."""
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
    counts: tuple[int, ...], tokens: int, corrects: bool, how: dict[str, Any]
) -> None:
    """Single tokens beside several chunks; other slots, layers and rows without tokens stay."""
    batch = ragged(counts, tokens, corrects=corrects)
    o_TKRV, states_LAKRHV = run(**batch, **how)
    expected = batch["states_LAKRHV"].astype(np.float64)
    for row, count in enumerate(counts):
        if not count:
            continue
        start = batch["query_start_U1"][row]
        o, state = alone(batch, row)
        np.testing.assert_allclose(o_TKRV[start : start + count], o, atol=5e-6)
        expected[LAYER, batch["slots_U"][row]] = state
    np.testing.assert_allclose(states_LAKRHV, expected, atol=5e-6)


def test_short_sequences_keep_the_state_after_each_token(how: dict[str, Any]) -> None:
    """Beside a long one, which keeps its last; the states continued from are those before the step,
    and slots that nobody names stay."""
    counts, kept = (3, 1, 9, 2, 0), ((0, 3, 5), (6, 99, 99), (1, 99, 99), (99, 2, 99), (4, 7, 8))
    batch = ragged(counts, 16)
    rng = np.random.default_rng(2)
    shape = (L, 9, *batch["states_LAKRHV"].shape[2:])
    batch["states_LAKRHV"] = rng.normal(size=shape).astype(np.float32)
    batch["kept_UJ"] = np.array(kept, np.int32)
    o_TKRV, states_LAKRHV = run(**batch, **how)
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
def test_what_is_no_number_stays_where_it_is(how: dict[str, Any]) -> None:
    """A sequence's neighbours, and who has its slot next, do not see it."""
    batch = ragged((5, 6, 1), 12)
    clean, _ = run(**batch, **how)
    k_TKH = batch["k_TKH"].copy()
    k_TKH[5:11] = np.nan
    states = batch["states_LAKRHV"].copy()
    states[LAYER, 0] = np.nan  # of the second, which begins
    o_TKRV, after = run(**{**batch, "k_TKH": k_TKH, "states_LAKRHV": states}, **how)
    assert np.isnan(o_TKRV[5:11]).any()
    np.testing.assert_array_equal(o_TKRV[:5], clean[:5])
    np.testing.assert_array_equal(o_TKRV[11:], clean[11:])
    assert np.isfinite(after[LAYER, 1:]).all()
    o_TKRV, _ = run(**{**batch, "states_LAKRHV": states}, **how)
    np.testing.assert_array_equal(o_TKRV, clean)


def wide(counts: tuple[int, ...], H: int, V: int, *, corrects: bool = True) -> Inputs:
    """A batch of other widths, whose sequences continue from slots 0, 1, …; some decays leave
    nothing, some all, and a state begins at the least numbers that float32 has."""
    T, U, K, R = sum(counts), len(counts), 2, 2
    rng = np.random.default_rng(5)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    k_TKH = draw(T, K, H)
    states = draw(L, U, K, R, H, V)
    states[LAYER, 0] *= 1e-38
    decay_TKR = -np.abs(draw(T, K, R)) * rng.choice([0.0, 0.3, 300.0], (T, K, R), p=[0.3, 0.6, 0.1])
    slots_U = np.arange(U, dtype=np.int32)
    return {
        "q_TKH": draw(T, K, H) * H**-0.5,
        "k_TKH": k_TKH / np.linalg.norm(k_TKH, axis=-1, keepdims=True),
        "v_TKRV": draw(T, K, R, V),
        "log_decay_TKR": decay_TKR.astype(np.float32),
        "beta_TKR": rng.uniform(size=(T, K, R)).astype(np.float32) if corrects else None,
        "states_LAKRHV": states,
        "layer": jnp.int32(LAYER),
        "query_start_U1": np.cumsum([0, *counts]).astype(np.int32),
        "slots_U": slots_U,
        "kept_UJ": slots_U[:, None],
        "fresh_U": np.zeros(U, bool),
    }


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize(
    ("H", "V"), [(128, 128), (64, 100), (33, 47), (7, 1), (300, 24), (256, 256)]
)
def test_native_is_right_at_any_width(H: int, V: int, corrects: bool) -> None:
    """Of whole vectors, of parts of one, and of more rows than the first cache holds."""
    counts = (1, 40, 1)
    batch = wide(counts, H, V, corrects=corrects)
    o_TKRV, states_LAKRHV = run(**batch, implementation="native")
    for row in range(len(counts)):
        o, state = alone(batch, row)
        own = slice(*batch["query_start_U1"][row : row + 2])
        np.testing.assert_allclose(o_TKRV[own], o, atol=5e-6)
        np.testing.assert_allclose(states_LAKRHV[LAYER, row], state, atol=5e-6)
    np.testing.assert_array_equal(states_LAKRHV[0], batch["states_LAKRHV"][0])


@pytest.mark.parametrize(("V", "corrects"), [(128, True), (100, False)])
def test_bits_do_not_depend_on_company_or_on_how_a_sequence_is_cut(V: int, corrects: bool) -> None:
    """A prompt in one call, beside others on several threads, and in three."""
    batch = wide((37, 1, 29, 64), 128, V, corrects=corrects)
    o_TKRV, states_LAKRHV = run(**batch, implementation="native")
    names = ("q_TKH", "k_TKH", "v_TKRV", "log_decay_TKR", "beta_TKR")
    for row in range(4):
        begin, end = batch["query_start_U1"][row : row + 2]
        cuts = sorted({begin, min(begin + 1, end), min(begin + 20, end), end})
        states = batch["states_LAKRHV"]
        for first, last in itertools.pairwise(cuts):
            piece = {name: x if (x := batch[name]) is None else x[first:last] for name in names}
            piece |= {
                name: batch[name][row : row + 1] for name in ("slots_U", "kept_UJ", "fresh_U")
            }
            piece |= {
                "layer": batch["layer"],
                "query_start_U1": np.array([0, last - first], np.int32),
            }
            o, states = run(**piece, states_LAKRHV=states, implementation="native")
            np.testing.assert_array_equal(o, o_TKRV[first:last])
        np.testing.assert_array_equal(states[LAYER, row], states_LAKRHV[LAYER, row])


def test_numbers_too_large_are_those_of_the_formula() -> None:
    """Infinities in a state, in decays and in values come out where the recurrence has them."""
    batch = wide((3, 3, 3), 16, 20)
    batch["states_LAKRHV"][LAYER, 0, 0, 0, 3, 5] = np.inf
    batch["log_decay_TKR"][4] = -np.inf
    batch["v_TKRV"][7, 0, 0, 2] = -np.inf
    o_TKRV, states_LAKRHV = run(**batch, implementation="native")
    with np.errstate(invalid="ignore"):
        for row in range(3):
            o, state = alone(batch, row)
            own = slice(*batch["query_start_U1"][row : row + 2])
            np.testing.assert_allclose(o_TKRV[own], o, atol=5e-6)
            np.testing.assert_allclose(states_LAKRHV[LAYER, row], state, atol=5e-6)


def test_who_runs_it_and_what_is_refused() -> None:
    batch = jax.tree.map(jnp.asarray, ragged((2, 3), 5))
    call = kernels.RaggedDeltaCall(
        platform="cpu", tokens=5, rows=2, kept=1, key_heads=2, heads_per_key=3, key_dim=16,
        value_dim=10, corrects=True, devices=1,
    )  # fmt: skip
    with kernels.recording_calls() as made:
        jax.eval_shape(lambda: kernels.ragged_gated_delta_rule(**batch))
    [(_, seen)] = made
    assert seen == call
    assert kernels.ragged_delta_operation.choice(call).implementation == "native"
    with kernels.target_platform("tpu"), kernels.recording_calls() as made:
        jax.eval_shape(lambda: kernels.ragged_gated_delta_rule(**batch))
    assert next(iter(made.values())).implementation == "xla"
    for wrong, said in (
        ({"beta_TKR": batch["beta_TKR"][..., 0]}, r"beta\(5, 2\) must be \(5, 2, 3\)"),
        ({"slots_U": np.zeros(3, np.int32)}, r"slots\(3,\) must be \(2,\)"),
        ({"states_LAKRHV": batch["states_LAKRHV"][0]}, r"states\(5, 2, 3, 16, 10\)"),
        (
            {"states_LAKRHV": batch["states_LAKRHV"].astype(jnp.bfloat16)},
            "keep them in float32",
        ),
        ({"implementation": "quick"}, "implementation='quick' is unknown"),
    ):
        with pytest.raises(kernels.KernelError, match=said):
            kernels.ragged_gated_delta_rule(**{**batch, **wrong})
