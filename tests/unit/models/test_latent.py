"""Latent attention: what a cache keeps gives what keys and values of all heads give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.unit.models.conftest import CONFIGS, decoder_of, tokens_of

from fornax.adapters import LoRA, LoRAParam, attach
from fornax.llm.limits import cache_heads
from fornax.models import CacheHeads, describe_pages, init_cache, page_bytes


def test_a_cache_of_latents_holds_one_narrow_head() -> None:
    config = CONFIGS["latent"]
    assert config.latent is not None
    cache = init_cache(config, 3, 5)
    assert cache.k_LBSKH.shape == (2, 3, 5, 1, config.latent.cached_dim) == (2, 3, 5, 1, 16)
    assert cache.v_LBSKH is None


def test_pages_of_latents_hold_one_vector_a_token() -> None:
    config = CONFIGS["latent"]
    assert page_bytes(config, 8, jnp.float32) == (2 * 8 * 16 * 4,)
    (pages,) = describe_pages(config, [5], 8, jnp.float32)
    assert pages.shape == (2, 5, 8, 1, 16)
    assert cache_heads(config, "tpu", 4, jnp.dtype(jnp.bfloat16)) == (CacheHeads(4, 128, parts=1),)
    (pages,) = describe_pages(config, [5], 8, jnp.float32, heads=[CacheHeads(4, 128, parts=1)])
    assert pages.shape == (2, 5, 8, 4, 128)


@pytest.mark.slow
def test_the_absorbed_form_counts_adapters_of_the_up_projection() -> None:
    model = nnx.clone(decoder_of("latent"))
    tokens = tokens_of(2, 7)
    plain = model(tokens)
    assert "layers/latent/kv_up" in attach(model, LoRA(targets=("latent/*",)), rngs=nnx.Rngs(0))
    graphdef, adapters, rest = nnx.split(model, LoRAParam, ...)
    drawn = jax.tree.map(
        lambda x: x + 0.2 * jax.random.normal(jax.random.key(1), x.shape), adapters
    )
    model = nnx.merge(graphdef, drawn, rest)
    expanded = model(tokens)
    absorbed, _ = model(tokens, cache=init_cache(CONFIGS["latent"], 2, 7))
    assert jnp.abs(expanded - plain).max() > 0.1
    np.testing.assert_allclose(absorbed, expanded, atol=1e-4)
