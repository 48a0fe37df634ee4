"""Training in 8 bits: every kind of model that takes it differentiates through its codes."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tests.unit.models.conftest import CONFIGS

from fornax.models import abstract_decoder, takes
from fornax.quant import QuantConfig, quantize_products
from fornax.quant.training import quantized_kernels

_KINDS = ("latent", "linear", "mamba")
"""Those whose layers have other weights than attention's."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in _KINDS else pytest.mark.exhaustive)
        for name, config in CONFIGS.items()
        if takes(config, "train in 8 bits")
    ],
)
def test_a_model_multiplies_the_codes_of_all_its_weights(name: str) -> None:
    graphdef, state = nnx.split(abstract_decoder(CONFIGS[name], compute_dtype=jnp.bfloat16))
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)

    def loss(state: nnx.State, tokens: jax.Array) -> jax.Array:
        decoder = nnx.merge(graphdef, state)
        decoder = quantize_products(decoder, QuantConfig(scheme="int8"), jax.random.key(0))
        return jnp.sum(decoder.hidden(tokens, remat="dots").astype(jnp.float32))

    traced = jax.make_jaxpr(jax.grad(loss))(state, tokens)
    products = re.findall(r"i32\[[\d,]*\] = dot_general\[", str(traced))
    weights = len(quantized_kernels(nnx.merge(graphdef, state), ()))
    assert len(products) >= 3 * weights
