"""The account of an engine's memory against the bytes that are really allocated."""

import dataclasses
import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.integration.llm.helpers import SIZES, completions, prompts_of
from tests.unit.models.conftest import CONFIGS

from fornax.config.errors import EngineError
from fornax.llm import LLM, SamplingParams
from fornax.llm.build import build_engine
from fornax.llm.config import DraftModel, EngineConfig
from fornax.llm.devices import DeviceSpec
from fornax.llm.limits import limits_without_cache, resolve_limits
from fornax.llm.memory import account_of, fit_limits
from fornax.llm.speculation import DraftProposer
from fornax.llm.weights import describe_weights, local_bytes
from fornax.models import DecoderConfig, ExpertsConfig, create_decoder, save_pretrained

CONFIG = dataclasses.replace(CONFIGS["windowed"], attention_logit_softcap=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_pretrained(create_decoder(CONFIG, seed=3), folder)
    return folder


def live_bytes() -> int:
    """Bytes on one device."""
    gc.collect()
    return local_bytes(jax.live_arrays())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "options"),
    [
        (False, {}),
        (False, {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}),
        (True, {"quantization": "int4"}),
        (True, {"enable_lora": True, "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 18}),
    ],
    ids=["plain", "adapters", "draft and int4", "draft, adapters and bfloat16"],
)
def test_the_account_is_what_an_engine_holds(
    drafts: bool, options: dict[str, Any], folder: Path
) -> None:
    speculation = DraftModel(model=folder) if drafts else None
    config = EngineConfig(**SIZES, **options, speculative_config=speculation)
    before = live_bytes()
    parts = build_engine(folder, config)
    engine = parts.engine
    proposer = engine._proposer
    draft = proposer._runner.weights if isinstance(proposer, DraftProposer) else None
    account = account_of(config, engine.runner.weights, parts.limits, draft)
    assert live_bytes() - before == account.held
    caches = account.cache + account.draft_cache
    assert (account.cache > 0, account.draft_cache > 0) == (True, drafts)
    engine.sleep()
    assert live_bytes() - before == account.held - caches
    engine.wake()
    assert live_bytes() - before == account.held


@pytest.mark.slow
def test_adapters_of_experts_are_counted(tmp_path: Path) -> None:
    """Each expert's own, divided over devices as the experts' widths are."""
    experts = ExpertsConfig(num_experts=8, experts_per_token=2, intermediate_size=16)
    model = DecoderConfig(
        vocab_size=32,
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_position_embeddings=64,
        family="qwen3_moe",
        qk_norm="head",
        experts=experts,
    )
    save_pretrained(create_decoder(model, seed=3), tmp_path / "model")
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
    config = EngineConfig(**SIZES, **lora, tensor_parallel_size=2)
    before = live_bytes()
    parts = build_engine(tmp_path / "model", config)
    account = account_of(config, parts.engine.runner.weights, parts.limits)
    assert live_bytes() - before == account.held
    layers, width = model.num_layers, model.hidden_size
    assert account.adapters > 4 * layers * 8 * 3 * 8 * (width + 16 // 2) > 0


@pytest.mark.exhaustive
def test_a_draft_model_with_few_pages_proposes_the_same(folder: Path) -> None:
    """Four sequences of up to 64 tokens; room for one such, for the model and for its draft."""
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=20) for i in range(6)]
    prompts = prompts_of(9, 33, 5, 40, 7, 11)
    found = []
    for pages in (200, 17):
        llm = LLM(
            folder,
            **SIZES,
            num_gpu_blocks_override=pages,
            speculative_config={"type": "draft_model", "model": str(folder)},
        )
        found.append(completions(llm.generate(prompts, params)))
        proposer = llm._parts.engine._proposer
        assert sorted(proposer._free) == list(range(1, pages + 1)), "pages were not given back"
    assert found[0] == found[1]


def test_a_cache_that_cannot_fit_is_refused(folder: Path) -> None:
    config = EngineConfig(**SIZES, num_gpu_blocks_override=1 << 45)
    with pytest.raises(EngineError, match=r"does not fit.*free; lower.*num_gpu_blocks_override"):
        build_engine(folder, config)


LARGE = DecoderConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
)
SMALL = dataclasses.replace(
    LARGE, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64, tie_embeddings=True
)


def test_an_8b_model_with_a_1b_draft_fits_where_the_defaults_put_it() -> None:
    """80 GB: the draft model's cache alone was 1.1 TB."""
    target = DeviceSpec(platform="gpu", num_devices=1, memory=80 * 10**9)
    config = EngineConfig(
        enable_lora=True, speculative_config=DraftModel(model=Path("unused")), max_num_seqs=64
    )
    weights, draft = (
        describe_weights(model, config, jnp.dtype(jnp.bfloat16), target) for model in (LARGE, SMALL)
    )
    empty = limits_without_cache(config, LARGE, weights.dtype, target, SMALL)
    other = account_of(config, weights, empty, draft).without_cache
    limits = resolve_limits(config, LARGE, weights.dtype, other, target, SMALL)
    account = account_of(config, weights, limits, draft)
    total = account.held + account.temporaries
    assert 0.85 * target.memory < total <= 0.9 * target.memory + 2**22
    assert account.draft_cache == pytest.approx(account.cache / 4, rel=0.01)


@pytest.mark.parametrize(("model", "more"), [(LARGE, 256 / 132), (SMALL, 128 / 68)])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_cache_of_codes_holds_nearly_twice_the_tokens(
    model: DecoderConfig, more: float, platform: str
) -> None:
    """A float32 scale beside the 8-bit numbers of each key and value."""
    target = DeviceSpec(platform=platform, num_devices=1, memory=80 * 10**9)
    tokens = []
    for dtype in ("bfloat16", "int8", "fp8"):
        config = EngineConfig(
            kv_cache_memory_bytes=4 << 30, kv_cache_dtype=dtype, max_model_len=8192
        )
        weights = describe_weights(model, config, jnp.dtype(jnp.bfloat16), target)
        limits = fit_limits(config, weights, target)
        assert account_of(config, weights, limits).cache <= (4 << 30) + 2**22
        tokens.append(limits.cache_tokens)
    assert tokens[1] == tokens[2] == pytest.approx(tokens[0] * more, rel=1e-3)


def test_what_an_accelerator_cannot_hold_is_refused_with_what_to_lower() -> None:
    target = DeviceSpec(platform="gpu", num_devices=1, memory=24 * 10**9)
    config = EngineConfig()
    weights = describe_weights(LARGE, config, jnp.dtype(jnp.bfloat16), target)
    empty = limits_without_cache(config, LARGE, weights.dtype, target)
    other = account_of(config, weights, empty).without_cache
    with pytest.raises(EngineError, match=r"GiB of a device's 22\.35 GiB \(max_num_seqs.*lower"):
        resolve_limits(config, LARGE, weights.dtype, other, target)
    given = dataclasses.replace(config, kv_cache_memory_bytes=20 * 10**9)
    with pytest.raises(EngineError, match=r"does not fit.*after all else; lower kv_cache"):
        resolve_limits(given, LARGE, weights.dtype, other, target)
