"""The gated delta rule, and Mamba-2's without the correction, against their recurrences in float64:
values, states, gradients, documents.

Legend: B batch, T tokens, K key heads, R value heads of a key head, H key width, V value width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from tests.cases import one_in

from fornax import kernels

K, R, H, V = 2, 3, 16, 10
FORMS = ("chunked", "recurrent")
Inputs = dict[str, Any]


def make(
    length: int,
    *,
    decay: float = 1.0,
    starts: float = 0.0,
    seed: int = 0,
    corrects: bool = True,
) -> Inputs:
    """Random inputs of two rows; one decay in three is `decay` times stronger."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    k_BTKH = draw(2, length, K, H)
    strength = rng.choice([0.01, 1.0, decay], size=(2, length, K, R))
    return {
        "q_BTKH": draw(2, length, K, H),
        "k_BTKH": k_BTKH / np.linalg.norm(k_BTKH, axis=-1, keepdims=True),
        "v_BTKRV": draw(2, length, K, R, V),
        "log_decay_BTKR": (-np.abs(draw(2, length, K, R)) * strength).astype(np.float32),
        "beta_BTKR": rng.uniform(size=(2, length, K, R)).astype(np.float32) if corrects else None,
        "starts_BT": rng.uniform(size=(2, length)) < starts,
        "state_BKRHV": draw(2, K, R, H, V),
    }


def recurrence(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The rule as it is written, one token after the other, in float64."""
    beta = inputs["beta_BTKR"]
    x = {key: np.asarray(value, np.float64) for key, value in inputs.items() if value is not None}
    state, found = x["state_BKRHV"], []
    for t in range(x["q_BTKH"].shape[1]):
        q, k, v = x["q_BTKH"][:, t], x["k_BTKH"][:, t], x["v_BTKRV"][:, t]
        state = np.where(x["starts_BT"][:, t, None, None, None, None] > 0, 0.0, state)
        state = state * np.exp(x["log_decay_BTKR"][:, t])[..., None, None]
        if beta is not None:
            error = v - np.einsum("bkh,bkrhv->bkrv", k, state)
            v = x["beta_BTKR"][:, t, ..., None] * error
        state = state + np.einsum("bkh,bkrv->bkrhv", k, v)
        found.append(np.einsum("bkh,bkrhv->bkrv", q, state))
    return np.stack(found, axis=1), state


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("length", "options"),
    one_in(
        2,
        [
            (1, {}),
            (3, {"starts": 0.3}),
            (130, {"decay": 30.0, "starts": 0.05}),
            (64, {"decay": 30.0}),
            (150, {"decay": 200.0}),
            (1, {"corrects": False}),
            (150, {"decay": 30.0, "starts": 0.05, "corrects": False}),
        ],
    ),
    ids=str,
)
def test_values_and_states_are_those_of_the_recurrence(
    form: Any, length: int, options: dict[str, float]
) -> None:
    """Through chunks, documents, the last chunk's filling, and decays that leave nothing."""
    inputs = make(length, **options)
    o_BTKRV, state_BKRHV = kernels.gated_delta_rule(**inputs, implementation=form)
    expected, last = recurrence(inputs)
    assert o_BTKRV.dtype == state_BKRHV.dtype == jnp.float32
    np.testing.assert_allclose(o_BTKRV, expected, atol=5e-6)
    np.testing.assert_allclose(state_BKRHV, last, atol=5e-6)


@pytest.mark.parametrize("form", FORMS)
def test_like_keys_do_not_cancel(form: Any) -> None:
    """Every token overwrites the one before: powers of the system reach 1e18."""
    inputs = make(64) | {"starts_BT": None}
    inputs["k_BTKH"] = np.broadcast_to(inputs["k_BTKH"][:, :1], inputs["k_BTKH"].shape)
    inputs["beta_BTKR"] = np.ones_like(inputs["beta_BTKR"])
    inputs["log_decay_BTKR"] = np.zeros_like(inputs["log_decay_BTKR"])
    expected, _ = recurrence(inputs | {"starts_BT": np.zeros((2, 64))})
    o_BTKRV, _ = kernels.gated_delta_rule(**inputs, implementation=form)
    np.testing.assert_allclose(o_BTKRV, expected, atol=2e-5)


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_finite_differences(form: Any, corrects: bool) -> None:
    inputs = make(9, decay=5.0, starts=0.2, seed=1, corrects=corrects)
    fixed = {"starts_BT": inputs.pop("starts_BT"), "implementation": form}
    run = jax.jit(lambda inputs: kernels.gated_delta_rule(**inputs, **fixed))
    check_grads(run, (inputs,), order=1, modes=("rev",), atol=0.02, rtol=0.02, eps=1e-2)


@pytest.mark.parametrize("corrects", [True, False])
def test_gradients_of_both_forms_agree(corrects: bool) -> None:
    """Over chunks and documents; a strong decay must not make NaN of a masked exponent."""
    inputs = make(100, decay=200.0, starts=0.05, seed=2, corrects=corrects)
    starts = inputs.pop("starts_BT")

    def loss(form: Any, inputs: Inputs) -> jax.Array:
        o, state = kernels.gated_delta_rule(**inputs, starts_BT=starts, implementation=form)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))

    chunked, recurrent = (jax.jit(jax.grad(functools.partial(loss, f)))(inputs) for f in FORMS)
    for name, expected in recurrent.items():
        if expected is None:
            continue
        np.testing.assert_allclose(chunked[name], expected, atol=1e-4, err_msg=name)


def test_another_document_changes_no_bit() -> None:
    inputs = make(40)
    inputs["starts_BT"][:, 17] = True
    changed = {
        key: value.copy()
        if key == "starts_BT"
        else np.concatenate([value[:, :17] * 0.9, value[:, 17:]], 1)
        for key, value in inputs.items()
        if key != "state_BKRHV"
    }
    before, _ = kernels.gated_delta_rule(**inputs)
    after, _ = kernels.gated_delta_rule(**changed)
    np.testing.assert_array_equal(after[:, 17:], before[:, 17:])
    assert np.abs(after[:, :17] - before[:, :17]).max() > 0.1


def test_what_does_not_go_together_is_refused() -> None:
    inputs = make(3)
    with pytest.raises(kernels.KernelError, match=r"beta\(2, 3, 2\) must be \(2, 3, 2, 3\)"):
        kernels.gated_delta_rule(**inputs | {"beta_BTKR": inputs["beta_BTKR"][..., 0]})
    with pytest.raises(kernels.KernelError, match="implementation='quick' is not known"):
        kernels.gated_delta_rule(**inputs, implementation="quick")
