"""Small decoders that between them use every option, and one way to run them compiled."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.models import (
    Decoder,
    DecoderConfig,
    ExpertsConfig,
    GatedDeltaConfig,
    LatentConfig,
    Mamba2Config,
    QueryScaling,
    RopeConfig,
    YarnScaling,
    create_decoder,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "scale_residual_init": False,
}

CONFIGS = {
    # pre-norm, untied, biases, norms of whole queries and keys, every other layer unrotated,
    # multipliers of embeddings, branches and logits
    "biased": DecoderConfig(
        **_SIZES,
        num_layers=4,
        num_kv_heads=4,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        qk_norm="full",
        rope=RopeConfig(fraction=0.5),
        rope_pattern=(True, False),
        embedding_multiplier=1.5,
        residual_multiplier=0.7,
        logits_scaling=0.8,
    ),
    # sandwich norms, tied, soft caps, windows in every other layer with their own rope
    "windowed": DecoderConfig(
        **_SIZES,
        num_layers=4,
        num_kv_heads=2,
        qk_norm="head",
        norm_placement="sandwich",
        norm_unit_offset=True,
        scale_embeddings=True,
        tie_embeddings=True,
        activation="gelu_tanh",
        attention_logit_softcap=3.0,
        final_logit_softcap=5.0,
        query_pre_attn_scalar=5.0,
        sliding_window=4,
        attention_pattern=("sliding", "full"),
        local_rope=RopeConfig(theta=100.0),
    ),
    # a dense layer between layers of experts: groups, a bias for the choice, an expert for all
    "experts": DecoderConfig(
        **_SIZES,
        num_layers=4,
        num_kv_heads=2,
        qkv_clip=1.5,
        mlp_bias=True,
        mlp_pattern=("experts", "experts", "mlp", "experts"),
        experts=ExpertsConfig(
            num_experts=8,
            experts_per_token=3,
            intermediate_size=8,
            score="sigmoid",
            normalize_eps=1e-20,
            scale=1.7,
            selection_bias=True,
            num_groups=4,
            groups_per_token=2,
            group_score="top2",
            shared_intermediate_size=16,
            shared_gate=True,
        ),
    ),
    # latent attention: latents of queries, keys and values, biases, YaRN on the scores,
    # queries that grow with their position
    "latent": DecoderConfig(
        **{**_SIZES, "head_dim": None},
        num_layers=2,
        attention_output_bias=True,
        query_scaling=QueryScaling(beta=0.4, length=3),
        rope=RopeConfig(
            interleaved=True,
            scaling=YarnScaling(
                factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.7
            ),
        ),
        latent=LatentConfig(
            key_value_rank=12,
            query_rank=8,
            unrotated_dim=6,
            rotated_dim=4,
            value_dim=8,
            bias=True,
        ),
    ),
    # gated DeltaNet in every other layer, two value heads a key head; gated attention in the rest
    "linear": DecoderConfig(
        **_SIZES,
        num_layers=4,
        num_kv_heads=2,
        attention_pattern=("linear", "full"),
        gated_delta=GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6),
        attention_gate=True,
        qkv_bias=True,
        qk_norm="head",
        norm_unit_offset=True,
        rope=RopeConfig(fraction=0.5),
    ),
    # Mamba-2 with biases and limited steps in layers without an MLP; attention with one
    "mamba": DecoderConfig(
        **_SIZES,
        num_layers=4,
        num_kv_heads=2,
        attention_pattern=("linear", "full"),
        mlp_pattern=("none", "mlp"),
        mamba2=Mamba2Config(
            num_heads=4,
            head_dim=6,
            state_dim=8,
            conv_width=3,
            bias=True,
            dt_limit=(0.05, 1.5),
        ),
    ),
    # experts in every layer: biases, the clipped activation, weighted inputs; sinks, interleaved
    # pairs, norms without weights, chunks; without rotation queries that grow with their position
    "clipped": DecoderConfig(
        **_SIZES,
        num_layers=2,
        num_kv_heads=4,
        attention_sinks=True,
        attention_pattern=("chunked", "full"),
        attention_chunk=8,
        qk_norm="unweighted",
        query_scaling=QueryScaling(beta=0.4, length=3, shift=1, layers="unrotated"),
        rope=RopeConfig(interleaved=True),
        rope_pattern=(True, False),
        experts=ExpertsConfig(
            num_experts=4,
            experts_per_token=2,
            intermediate_size=24,
            router_bias=True,
            bias=True,
            clip=0.5,
            clip_gain=1.4,
            weigh="input",
        ),
    ),
}


EACH = [
    pytest.param(name, marks=pytest.mark.exhaustive) if name == "mamba" else name
    for name in CONFIGS
]
"""Their names. Mamba-2 shares its caches and packing with gated DeltaNet: `test_mamba.py` has a few
of its tests, and all are run where there is time."""


@functools.cache
def decoder_of(name: str, compute_dtype: str | None = None) -> Decoder:
    """The model called `name` with every parameter drawn, biases and norms included."""
    model = create_decoder(CONFIGS[name], seed=3, compute_dtype=compute_dtype)
    graphdef, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(4), len(leaves))
    drawn = [
        leaf + 0.1 * jax.random.normal(k, leaf.shape) for leaf, k in zip(leaves, keys, strict=True)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, drawn))


@functools.cache
def compiled(name: str) -> functools.partial[jax.Array]:
    """Tokens and segment ids to the model's logits, compiled once for each shape."""
    graphdef, state = nnx.split(decoder_of(name))
    run = jax.jit(lambda s, tokens, ids: nnx.merge(graphdef, s)(tokens, None, ids))
    return functools.partial(run, state)


def logits_of(name: str, tokens_BT: np.ndarray, segment_ids_BT: np.ndarray) -> np.ndarray:
    """The model's logits, compiled once for each shape."""
    return np.asarray(compiled(name)(jnp.asarray(tokens_BT), jnp.asarray(segment_ids_BT)))


def tokens_of(batch: int, length: int, seed: int = 0) -> np.ndarray:
    """Random tokens int32 [batch, length]."""
    return np.random.default_rng(seed).integers(0, 32, (batch, length), dtype=np.int32)


@pytest.fixture(params=EACH)
def name(request: pytest.FixtureRequest) -> str:
    """Each of the models."""
    return request.param
