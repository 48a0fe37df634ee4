"""Remat policies change what is stored, never the loss or its gradients."""

import functools
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.cases import one_in
from tests.unit.models.conftest import decoder_of, tokens_of

from fornax import kernels
from fornax.config.errors import ConfigError, KernelError
from fornax.mesh import MeshConfig, make_mesh, tree_shardings, use_mesh
from fornax.models import REMAT_NAMES, REMAT_POLICIES, Remat
from fornax.models.remat import rematerialise

IDS = np.array([[1] * 5 + [2] * 7, [0] * 3 + [1] * 9], np.int32)


POLICIES = tuple(policy for policy in REMAT_POLICIES if policy != "names")
NAMED = Remat(policy="names", save=("query", "attention", "mlp_up"))
OFFLOADED = Remat(policy="names", save=("mlp_up",), offload=("layer_input", "key", "attention"))


def _loss(name: str, remat: str | Remat, dtype: str | None = None) -> Any:
    graphdef, state = nnx.split(decoder_of(name, dtype))

    def loss(state: Any) -> jax.Array:
        model = nnx.merge(graphdef, state)
        x_BTD = model.hidden(jnp.asarray(tokens_of(2, 12)), None, jnp.asarray(IDS), remat=remat)
        return jnp.mean(jnp.square(model.logits(x_BTD)) * (IDS > 0)[..., None])

    return loss, state


@functools.cache
def _value_and_grad(name: str, remat: str | Remat) -> tuple[float, Any]:
    loss, state = _loss(name, remat)
    return jax.device_get(jax.jit(jax.value_and_grad(loss))(state))


@pytest.mark.slow
@pytest.mark.parametrize("remat", [*POLICIES[1:], NAMED, OFFLOADED], ids=str)
def test_loss_and_gradients_are_those_without_remat(remat: str | Remat) -> None:
    expected_loss, expected = _value_and_grad("windowed", "none")
    loss, gradients = _value_and_grad("windowed", remat)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * max(1.0, np.abs(wanted).max()))


def _stored(name: str, remat: str | Remat) -> int:
    """Numbers kept for the backward pass."""
    loss, state = _loss(name, remat)
    _, vjp = jax.eval_shape(functools.partial(jax.vjp, loss), state)
    return sum(leaf.size for leaf in jax.tree.leaves(vjp))


@pytest.mark.parametrize("name", one_in(3, REMAT_NAMES))
def test_a_named_activation_is_kept(name: str) -> None:
    """Beside what is kept anyway: the layers' parameters, shared arrays, and each layer's input."""
    model = "experts" if name == "expert_down" else "biased"
    least = _stored(model, "full")
    kept = _stored(model, Remat(policy="names", save=(name,)))
    assert (kept > least) == (name not in ("layer_input", "mlp_down")), kept


def test_a_name_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="expert_down and the model has no experts; name mlp"):
        decoder_of("biased").hidden(
            tokens_of(1, 4), remat=Remat(policy="names", save=("expert_down",))
        )


def test_names_for_attention_are_save_attention() -> None:
    names = Remat(policy="names", save=("query", "key", "value", "attention"))
    assert _stored("biased", names) == _stored("biased", "save_attention")


def test_policies_save_less_than_none() -> None:
    """Numbers stored for the backward pass, from all down to the layers' inputs."""

    sizes = {policy: _stored("biased", policy) for policy in POLICIES}
    assert sizes["full"] < sizes["save_attention"] < sizes["dots"] < sizes["none"]
    assert sizes["full"] < sizes["dots_no_batch"] < sizes["none"]


def test_an_unknown_policy_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"remat='most' is not known; use one of none, full"):
        decoder_of("biased").hidden(tokens_of(1, 4), remat="most")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "names", "save": ("keys",)}, r"'keys' is none; use layer_input, query, key"),
        ({"policy": "names", "save": ("key",), "offload": ("key",)}, "'key' is in both or twice"),
        ({"policy": "full", "save": ("key",)}, "set remat to 'names'"),
        ({"policy": "names"}, "keeps nothing without"),
    ],
)
def test_names_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Remat(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", NAMED, OFFLOADED], ids=str)
def test_gradients_on_a_mesh_are_those_of_one_device(remat: str | Remat) -> None:
    _, expected = _value_and_grad("windowed", "none")
    loss, state = _loss("windowed", remat)
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    placed = jax.device_put(state, tree_shardings(state, mesh, MeshConfig().resolved_rules()))
    with use_mesh(mesh):
        found = jax.jit(jax.grad(loss))(placed)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * max(1.0, np.abs(other).max()))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", NAMED], ids=str)
def test_bfloat16_is_kept_as_bits_on_cpu(remat: str | Remat) -> None:
    """Which changes no bit of a gradient."""

    def kept() -> set[str]:
        loss, state = _loss("biased", remat, "bfloat16")
        _, vjp = jax.eval_shape(functools.partial(jax.vjp, loss), state)
        return {leaf.dtype.name for leaf in jax.tree.leaves(vjp) if leaf.ndim > 3}

    def gradients() -> Any:
        loss, state = _loss("biased", remat, "bfloat16")
        return jax.tree.leaves(jax.jit(jax.grad(loss))(state))

    assert "uint16" in kept()
    with kernels.target_platform("tpu"):
        assert "uint16" not in kept()
    found = gradients()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fornax.models.remat.keeping_bits", nullcontext)
        assert "uint16" not in kept()
        expected = gradients()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_second_derivatives_of_kept_bits_are_refused() -> None:
    w = jnp.ones((16, 16), jnp.bfloat16)

    def curvature(remat: str) -> jax.Array:
        layer = rematerialise(lambda w: jnp.sin(kernels.linear(w, w)).sum(), remat)
        return jax.grad(lambda w: jax.grad(layer)(w).astype(jnp.float32).sum())(w)

    assert jnp.isfinite(curvature("none")).all()
    with pytest.raises(KernelError, match="set remat to none, or compute in float32"):
        curvature("dots")


def test_offloaded_activations_wait_in_the_host_memory() -> None:
    loss, state = _loss("biased", OFFLOADED)
    text = str(jax.make_jaxpr(jax.grad(loss))(state))
    assert "<host>" in text or "pinned_host" in text
    loss, state = _loss("biased", NAMED)
    text = str(jax.make_jaxpr(jax.grad(loss))(state))
    assert "<host>" not in text
    assert "pinned_host" not in text
