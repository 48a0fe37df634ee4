"""Latent attention in the engine: over devices, with proposals, counted to the byte, or refused."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tests.integration.llm.helpers import Figures, completions, prompts_of
from tests.integration.llm.test_memory import live_bytes

from fornax.config.errors import ConfigError
from fornax.llm import LLM, SamplingParams
from fornax.llm.build import build_engine
from fornax.llm.config import DraftModel, EngineConfig
from fornax.llm.memory import account_of
from fornax.llm.speculation import DraftProposer
from fornax.models import (
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    RopeConfig,
    create_decoder,
    generate,
    save_pretrained,
)

CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    max_position_embeddings=64,
    initializer_range=0.3,
    rope=RopeConfig(interleaved=True),
    latent=LatentConfig(
        key_value_rank=12, query_rank=16, unrotated_dim=8, rotated_dim=4, value_dim=8
    ),
    mlp_pattern=("mlp", "experts", "experts"),
    experts=ExpertsConfig(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=16,
        score="sigmoid",
        normalize_eps=1e-20,
        scale=1.5,
        selection_bias=True,
        num_groups=4,
        groups_per_token=2,
        group_score="top2",
        shared_intermediate_size=16,
    ),
)
"""As DeepSeek V3: a dense layer before those of experts."""
SIZES: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=16)
NGRAM = {"type": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def model() -> Any:
    return create_decoder(CONFIG, seed=3)


@pytest.fixture(scope="module")
def draft(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with noise, which agrees with it now and then."""
    rng = np.random.default_rng(0)

    def noisy(x: Any) -> Any:
        return x + 0.1 * np.std(x) * rng.normal(size=x.shape).astype(x.dtype)

    near = nnx.clone(model)
    nnx.update(near, jax.tree.map(noisy, nnx.state(near)))
    folder = tmp_path_factory.mktemp("draft")
    save_pretrained(near, folder)
    return folder


@pytest.mark.exhaustive
@pytest.mark.slow
def test_tokens_over_devices_are_those_of_one(model: Any) -> None:
    """Heads are divided; each device has the latents whole."""
    figures = Figures()
    llm = LLM(model, **SIZES, tensor_parallel_size=4, observer=figures)
    prompts = prompts_of(3, 21, 14, 9, 1)
    expected = generate(model, prompts, max_tokens=16)
    assert completions(llm.generate(prompts, GREEDY)) == expected
    assert not figures.compiled


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
def test_proposals_change_no_greedy_token(model: Any, draft: Path, kind: str) -> None:
    """Rejected proposals leave latents behind, which later ones overwrite."""
    proposals = {"type": kind, "model": str(draft), "num_speculative_tokens": 3}
    figures = Figures()
    llm = LLM(
        model,
        **SIZES,
        num_gpu_blocks_override=20,
        speculative_config=NGRAM if kind == "ngram" else proposals,
        observer=figures,
    )
    prompts = [prompt + prompt[: len(prompt) // 2] for prompt in prompts_of(9, 20, 5, 13, 7)]
    expected = generate(model, prompts, max_tokens=16)
    assert completions(llm.generate(prompts, GREEDY)) == expected
    assert 0 < figures.accepted < figures.drafted
    assert figures.preemptions > 0
    assert llm.num_free_pages == llm.num_pages


@pytest.mark.slow
def test_the_account_is_what_an_engine_holds(draft: Path) -> None:
    """Of a token and layer one latent and one rotated key, on each device."""
    config = EngineConfig(
        **SIZES,
        tensor_parallel_size=2,
        num_gpu_blocks_override=20,
        speculative_config=DraftModel(model=draft),
    )
    before = live_bytes()
    parts = build_engine(draft, config)
    proposer = parts.engine._proposer
    assert isinstance(proposer, DraftProposer)
    runner = parts.engine.runner
    account = account_of(config, runner.weights, parts.limits, proposer._runner.weights)
    assert live_bytes() - before == account.held
    token = CONFIG.num_layers * (12 + 4) * 4
    assert account.cache == account.draft_cache == (20 + 1) * 4 * token


@pytest.mark.slow
def test_what_cannot_be_served_says_what_to_do_instead(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"latent attention.*merge the adapter into the model"):
        LLM(model, **SIZES, enable_lora=True)
