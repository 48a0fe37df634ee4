"""Engines with weights of few bits, beside the same weights in float32."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from tests.integration.llm.helpers import SIZES, prompts_of
from tests.integration.llm.test_latent import CONFIG as LATENT_CONFIG
from tests.unit.llm.test_weights import with_experts
from tests.unit.models.conftest import decoder_of
from tests.unit.models.quantized_models import quantize_folder

from fornax import kernels
from fornax.llm import LLM, SamplingParams
from fornax.llm.build import build_engine
from fornax.llm.config import EngineConfig
from fornax.models import (
    Decoder,
    DecoderConfig,
    ExpertsConfig,
    create_decoder,
    load_pretrained,
    save_pretrained,
)

OPTIONS = {**SIZES, "kv_cache_dtype": "float32", "step_sizes": "coarse"}


def _scores(llm: LLM) -> np.ndarray:
    """Log-probabilities of the tokens of two prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for output in llm.generate(prompts_of(30, 41), params):
        assert output.prompt_logprobs is not None
        found += [next(iter(place.values())).logprob for place in output.prompt_logprobs[1:]]
    return np.array(found)


MIXTURE = DecoderConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    initializer_range=0.1,
    experts=ExpertsConfig(num_experts=6, experts_per_token=2, intermediate_size=96),
)


LATENT = dataclasses.replace(LATENT_CONFIG, initializer_range=0.1)


def _stored(model: Decoder, config: EngineConfig) -> Decoder:
    """A decoder in float32 with the weights that an engine made of a model."""
    weights = build_engine(model, config).engine.runner.weights
    flat = []
    for path, variable in nnx.to_flat_state(weights.state):
        value = variable.get_value()
        wide = value.unpack() if isinstance(value, kernels.PackedWeight) else value
        flat.append((path, variable.replace(wide)))
    return nnx.merge(weights.graphdef, nnx.from_flat_state(flat))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "allowed"),
    [
        pytest.param("int8", 0.25, marks=pytest.mark.exhaustive),
        ("int4", 0.25),  # rows are rounded to 8 bits; the weights' own rounding changes 1.5
        pytest.param("fp8", 0.05, marks=pytest.mark.exhaustive),
        ("mxfp4", 0.05),  # rows are rounded to bfloat16; the weights' own changes 2
    ],
)
def test_an_engine_computes_with_the_weights_it_stores(quantization, allowed) -> None:
    """Also when they are not those that it began with."""
    model = decoder_of("windowed")
    llm = LLM(create_decoder(model.config, seed=8), **OPTIONS, quantization=quantization)
    llm.update_weights(model, version=1)
    stored = _stored(model, EngineConfig(**OPTIONS, quantization=quantization))
    np.testing.assert_allclose(_scores(llm), _scores(LLM(stored, **OPTIONS)), atol=allowed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "quantization", "allowed"),
    [
        pytest.param(MIXTURE, "int8", 0.05, marks=pytest.mark.exhaustive),
        (MIXTURE, "int4", 0.05),
        pytest.param(MIXTURE, "fp8", 0.02, marks=pytest.mark.exhaustive),
        pytest.param(MIXTURE, "mxfp4", 0.02, marks=pytest.mark.exhaustive),
        pytest.param(LATENT, "int8", 0.05, marks=pytest.mark.exhaustive),
    ],
)
def test_an_engine_computes_with_the_experts_it_stores(config, quantization, allowed) -> None:
    """Rows are rounded in each of their products; the weights' own rounding changes more."""
    model = create_decoder(config, seed=3)
    llm = LLM(model, **OPTIONS, quantization=quantization)
    stored = _stored(model, EngineConfig(**OPTIONS, quantization=quantization))
    gate = stored.layers.experts.gate.kernel[...]
    assert 0 < np.abs(gate - model.layers.experts.gate.kernel[...]).max() < 0.1
    np.testing.assert_allclose(_scores(llm), _scores(LLM(stored, **OPTIONS)), atol=allowed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "allowed"),
    [
        ("gptq", 0.06),  # rows are rounded to 8 bits; the weights' own rounding changes 0.5
        pytest.param("gptq-order", 0.06, marks=pytest.mark.exhaustive),
        pytest.param("awq", 0.06, marks=pytest.mark.exhaustive),
        pytest.param("pack", 0.06, marks=pytest.mark.exhaustive),
        pytest.param("fp8", 0.02, marks=pytest.mark.exhaustive),
        pytest.param("mxfp4", 0.02, marks=pytest.mark.exhaustive),  # rows are rounded to bfloat16
    ],
)
def test_an_engine_computes_with_the_codes_of_its_files(
    scheme: str, allowed: float, tmp_path: Path
) -> None:
    """The same directory dequantized differs by the rounding of rows."""
    config = DecoderConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        initializer_range=0.1,
        qkv_bias=True,
    )
    save_pretrained(create_decoder(config, seed=5), tmp_path / "floats")
    folder = quantize_folder(tmp_path / "floats", tmp_path / scheme, scheme)
    llm = LLM(folder, **OPTIONS, dtype="float32")
    wide = LLM(load_pretrained(folder, "float32"), **OPTIONS)
    assert llm.weights.nbytes < 0.5 * wide.weights.nbytes
    np.testing.assert_allclose(_scores(llm), _scores(wide), atol=allowed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("scheme", "allowed"), [("gpt-oss", 0.02), ("fp8-blocks", 0.02), ("awq", 0.06)]
)
def test_an_engine_computes_with_the_codes_of_its_files_experts(
    scheme: str, allowed: float, tmp_path: Path
) -> None:
    folder = with_experts(tmp_path, scheme, std=0.1)
    llm = LLM(folder, **OPTIONS, dtype="float32")
    wide = LLM(load_pretrained(folder, "float32"), **OPTIONS)
    assert llm.weights.nbytes < 0.5 * wide.weights.nbytes
    np.testing.assert_allclose(_scores(llm), _scores(wide), atol=allowed)
