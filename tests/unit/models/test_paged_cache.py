"""A paged step through a model: what pages hold of a head does not change what comes out."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.unit.models.conftest import CONFIGS, decoder_of, tokens_of

from fornax import kernels
from fornax.kernels._paged_attention import tpu
from fornax.models import (
    CacheHeads,
    Decoder,
    DecoderConfig,
    PagedCache,
    PageTables,
    RopeConfig,
    cache_windows,
    create_decoder,
    init_pages,
)

S = 8


def _logits(
    model: Decoder,
    tokens_T: jax.Array,
    heads: tuple[CacheHeads, ...],
    cuts: tuple[int, ...],
    dtype: Any = jnp.float32,
) -> np.ndarray:
    """Logits of one sequence, given in pieces, whose keys and values go to pages of `heads`."""
    config = model.config
    kv = init_pages(config, [9] * len(heads), S, dtype, heads=heads)
    table_RW = jnp.asarray([[3, 1, 2, 4, 5, 6, 8, 7]], jnp.int32)
    found = []

    # What is interpreted takes longer to optimise than to run.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(kv: tuple[kernels.Pages, ...], tokens_T: jax.Array, first: jax.Array) -> tuple:
        positions_T = first + jnp.arange(tokens_T.shape[0], dtype=jnp.int32)
        slots_T = table_RW[0, positions_T // S] * S + positions_T % S
        cache = PagedCache(
            kv=kv,
            tables=(PageTables(table_RW, slots_T),) * len(heads),
            query_start_R1=jnp.asarray([0, tokens_T.shape[0]], jnp.int32),
            context_lens_R=(first + tokens_T.shape[0])[None],
            windows=cache_windows(config),
            heads=heads,
        )
        x_TD, cache = model.paged(tokens_T, positions_T, cache, longest=64)
        return cache.kv, model.logits(x_TD[None])[0]

    for begin, end in zip((0, *cuts), (*cuts, len(tokens_T)), strict=True):
        kv, logits_TV = step(kv, tokens_T[begin:end], jnp.int32(begin))
        found.append(np.asarray(logits_TV))
    return np.concatenate(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "repeats", "changes", "platform"),
    [
        ("windowed", 1, {"width": 128}, "cpu"),
        ("windowed", 2, {"width": 64, "joined": True}, "cpu"),
        ("windowed", 1, {"width": 64, "joined": True}, "tpu"),
        pytest.param(
            "clipped", 1, {"width": 64, "joined": True}, "tpu", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_pages_of_wider_and_joined_heads_give_the_same_logits(
    name: str,
    repeats: int,
    changes: dict[str, Any],
    platform: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tpu, "_BUFFER_KEYS", 128)
    tokens_T = tokens_of(1, 38)[0]
    expected = decoder_of(name)(tokens_T[None])[0]
    heads = tuple(
        own._replace(count=own.count * repeats, **changes) for own in CacheHeads.of(CONFIGS[name])
    )
    with kernels.target_platform(platform, interpret=platform == "tpu"):
        found = _logits(decoder_of(name), tokens_T, heads, cuts=(37,))
    np.testing.assert_allclose(found, expected, atol=1e-4)


MOST_KL = 1e-3
"""Nats per token, mean."""


@pytest.mark.parametrize("codes", [jnp.int8, jnp.float8_e4m3fn])
def test_distributions_stay_near_those_of_a_bfloat16_cache(codes: Any) -> None:
    """A random model with heads of 64 and logits that say something."""
    config = DecoderConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        initializer_range=0.07,
        scale_residual_init=False,
        rope=RopeConfig(),
    )
    model = create_decoder(config, seed=3)
    tokens_T = jnp.asarray(np.random.default_rng(0).integers(0, 256, 64))
    expected, found = (
        jax.nn.log_softmax(_logits(model, tokens_T, CacheHeads.of(config), (63,), dtype))
        for dtype in (jnp.bfloat16, codes)
    )
    assert expected.std() > 0.7
    kl_T = jnp.sum(jnp.exp(expected) * (expected - found), axis=-1)
    assert 0 < jnp.mean(kl_T) < MOST_KL
