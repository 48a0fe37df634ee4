"""Tensor parallel over virtual devices gives the tokens of one device."""

from pathlib import Path

import jax
import pytest
from tests.integration.llm.helpers import Figures, completions, prompts_of
from tests.unit.llm.test_lora import RANK, merged, model_of, write_adapter

from fornax.config.errors import ConfigError, EngineError
from fornax.llm import LLM, SamplingParams
from fornax.models import DecoderConfig, create_decoder, generate

CONFIG = DecoderConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    sliding_window=6,
    attention_pattern=("sliding", "full"),
    max_position_embeddings=64,
)
SIZES = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_tokens_are_those_of_one_device(devices: int) -> None:
    """With 8 devices the 4 key/value heads are whole on each, with 2 they are divided."""
    model = create_decoder(CONFIG, seed=5)
    figures = Figures()
    llm = LLM(model, **SIZES, tensor_parallel_size=devices, observer=figures)
    prompts = prompts_of(3, 21, 14, 9, 1)
    greedy = SamplingParams(temperature=0, max_tokens=10)
    expected = generate(model, prompts, max_tokens=10)
    assert completions(llm.generate(prompts, greedy)) == expected
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=10, top_k=20)
    together = completions(llm.generate(prompts, seeded))
    assert completions(llm.generate(prompts[1:2], seeded))[0] == together[1]
    assert not figures.compiled


@pytest.mark.exhaustive
def test_adapters_of_experts_are_divided_as_the_experts_are(tmp_path: Path) -> None:
    """Each device holds a part of an expert's width, and that part of the adapters around it."""
    tensors = write_adapter(tmp_path / "a", "qwen3_moe", seed=1, alpha=24)
    base = model_of("qwen3_moe")
    adapters = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    llm = LLM(base, **SIZES, **adapters, max_model_len=64, tensor_parallel_size=2)
    llm.load_lora("a", tmp_path / "a")
    prompts, names = prompts_of(3, 21, 14), [None, "a", "a"]
    plain, adapted = (
        generate(model, prompts, max_tokens=10, stop_tokens=())
        for model in (base, merged("qwen3_moe", tensors, 24 / RANK))
    )
    assert adapted[1:] != plain[1:], "the adapter changes nothing"
    greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    assert completions(llm.generate(prompts, greedy, lora=names)) == [plain[0], *adapted[1:]]


@pytest.mark.slow
def test_weights_whose_sharding_agrees_are_not_copied() -> None:
    model = create_decoder(CONFIG, seed=5)
    llm = LLM(model, **SIZES, tensor_parallel_size=2)
    weights = llm.weights
    again = weights.adopt(weights.state)
    before, after = jax.tree.leaves(weights.state), jax.tree.leaves(again.state)
    for old, new in zip(before, after, strict=True):
        places = [shard.data.unsafe_buffer_pointer() for shard in old.addressable_shards]
        assert places == [shard.data.unsafe_buffer_pointer() for shard in new.addressable_shards]


def test_sizes_that_do_not_divide_are_named() -> None:
    model = create_decoder(CONFIG, seed=5)
    with pytest.raises(ConfigError, match="heads, 8"):
        LLM(model, **SIZES, tensor_parallel_size=3)
    with pytest.raises(EngineError, match="has 8 devices"):
        LLM(model, **SIZES, tensor_parallel_size=16)
