"""Modulations that are made for all blocks at once are those of the loop over blocks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.diffusion_folders import DIT, FLUX, SD3

from fornax import kernels
from fornax.diffusion.models import COMPONENTS, Condition, files
from fornax.diffusion.models.transformer import embedder


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("DiTTransformer2DModel", DIT),
        ("SD3Transformer2DModel", SD3),
        ("FluxTransformer2DModel", FLUX),
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_transformer_is_the_same_as_with_modulations_in_its_loop(
    name: str, config: dict[str, Any], remat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels.runs_few_rows(1, "float32", jnp.zeros((1, 1, 1))):
        pytest.skip("needs a C++ compiler, on one CPU")
    component = COMPONENTS[name]
    module = component.make(component.read(files.Fields(config, "a config")), rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(module)
    keys = iter(jax.random.split(jax.random.key(1), 1000))
    state = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(next(keys), p.shape), state)
    normal = np.random.default_rng(0).normal
    condition = Condition(classes_B=jnp.asarray([3, 10]))
    if name != "DiTTransformer2DModel":
        text, pooled = config["joint_attention_dim"], config["pooled_projection_dim"]
        condition = Condition(
            text_BSD=jnp.asarray(normal(size=(2, 5, text)), "float32"),
            pooled_BD=jnp.asarray(normal(size=(2, pooled)), "float32"),
            guidance_B=jnp.ones(2) if name.startswith("Flux") else None,
        )
    x = jnp.asarray(normal(size=(2, 8, 8, 4)), "float32")

    def run() -> tuple[str, Any]:
        def loss(state: Any) -> jax.Array:
            y = nnx.merge(graphdef, state)(x, jnp.asarray([0.3, 0.7]), condition, remat=remat)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

        step = jax.jit(jax.value_and_grad(loss))
        return step.lower(state).as_text(), step(state)

    text, ahead = run()
    assert text.count("@fornax_few_rows") >= 3  # the result, and both gradients
    monkeypatch.setattr(embedder.kernels, "runs_few_rows", lambda *_: False)
    text, inside = run()
    assert "@fornax_few_rows" not in text
    for one, other in zip(*map(jax.tree.leaves, (ahead, inside)), strict=True):
        scale = np.abs(np.asarray(other)).max() + 1e-6
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-5 * scale)
