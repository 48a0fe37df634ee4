"""The engine: greedy tokens are those of the processor, and a model of 8B's shape runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.device.machine import ON_GPU, as_on_gpu, cpu, exact_products, lowers, on_cpu

from fornax.llm import LLM, SamplingParams
from fornax.llm.config import EngineConfig
from fornax.llm.devices import attached_devices
from fornax.llm.memory import fit_limits
from fornax.llm.programs import Sizes, describe_arrays, make_programs
from fornax.llm.weights import load_weights
from fornax.models import Decoder, DecoderConfig, create_decoder, generate

SHAPE: dict[str, Any] = (
    {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_heads": 32,
        "num_kv_heads": 8,
        "max_position_embeddings": 2048,
    }
    if ON_GPU
    else {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 8,
        "num_kv_heads": 2,
        "max_position_embeddings": 256,
    }
)
"""Llama 3.1 8B's, or a little one's."""
LAYERS = 32 if ON_GPU else 2
OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, SHAPE["vocab_size"], n).tolist() for n in (1, 17, 90, 33, 5)]


def _tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(_prompts(), GREEDY)]


def _moved(model: Decoder, device: jax.Device) -> Decoder:
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.device_put(state, device))


def test_greedy_tokens_are_those_of_the_processor(
    device: jax.Device, caplog: pytest.LogCaptureFixture
) -> None:
    config = DecoderConfig(**SHAPE, num_layers=2, initializer_range=0.1)
    with on_cpu():
        model = create_decoder(config, seed=1)
        expected = generate(model, _prompts(), max_tokens=12)
    with as_on_gpu(), exact_products(), caplog.at_level("INFO", logger="fornax.llm"):
        llm = LLM(_moved(model, device), dtype="float32", **OPTIONS)
        assert _tokens(llm) == expected
    assert "kernel paged_attention: xla" in caplog.text


def test_a_model_of_full_shape_generates_the_same_twice() -> None:
    config = DecoderConfig(**SHAPE, num_layers=LAYERS)
    with as_on_gpu():
        model = create_decoder(config, seed=2, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
        llm = LLM(model, dtype="bfloat16", **OPTIONS)
        first = _tokens(llm)
        assert first == _tokens(llm)
    assert all(0 <= token < SHAPE["vocab_size"] for row in first for token in row)
    assert len({tuple(row) for row in first}) > 1


def test_every_program_of_an_engine_lowers_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**SHAPE, "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
    with jax.default_device(cpu()):
        model = create_decoder(DecoderConfig(**small, head_dim=16, num_layers=2), seed=0)
        config = EngineConfig(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=16)
        weights = load_weights(model, config)
    limits = fit_limits(config, weights, attached_devices())
    sizes = Sizes.of(config, weights, limits)
    arrays = describe_arrays(weights, limits, sizes)
    for program in make_programs(config, weights, limits, sizes, arrays).values():
        lowers(monkeypatch, program.function, *program.arguments)
