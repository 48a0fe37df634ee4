"""Remat policies change what is stored, never the loss or its gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.unit.models.conftest import decoder_of, tokens_of

from fornax.config.errors import ConfigError
from fornax.models import REMAT_POLICIES

IDS = np.array([[1] * 5 + [2] * 7, [0] * 3 + [1] * 9], np.int32)


def _loss(name: str, remat: str) -> Any:
    graphdef, state = nnx.split(decoder_of(name))

    def loss(state: Any) -> jax.Array:
        model = nnx.merge(graphdef, state)
        x_BTD = model.hidden(jnp.asarray(tokens_of(2, 12)), None, jnp.asarray(IDS), remat=remat)
        return jnp.mean(jnp.square(model.logits(x_BTD)) * (IDS > 0)[..., None])

    return loss, state


@functools.cache
def _value_and_grad(name: str, remat: str) -> tuple[float, Any]:
    loss, state = _loss(name, remat)
    return jax.device_get(jax.jit(jax.value_and_grad(loss))(state))


@pytest.mark.parametrize("remat", [policy for policy in REMAT_POLICIES if policy != "none"])
def test_loss_and_gradients_are_those_without_remat(remat: str) -> None:
    expected_loss, expected = _value_and_grad("windowed", "none")
    loss, gradients = _value_and_grad("windowed", remat)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * max(1.0, np.abs(wanted).max()))


def test_policies_save_less_than_none() -> None:
    """Numbers stored for the backward pass, from all down to the layers' inputs."""

    def stored(remat: str) -> int:
        loss, state = _loss("biased", remat)
        _, vjp = jax.eval_shape(functools.partial(jax.vjp, loss), state)
        return sum(leaf.size for leaf in jax.tree.leaves(vjp))

    sizes = {policy: stored(policy) for policy in REMAT_POLICIES}
    assert sizes["full"] < sizes["save_attention"] < sizes["dots"] < sizes["none"]
    assert sizes["full"] < sizes["dots_no_batch"] < sizes["none"]


def test_an_unknown_policy_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"remat='most' is not known; use one of none, full"):
        decoder_of("biased").hidden(tokens_of(1, 4), remat="most")
