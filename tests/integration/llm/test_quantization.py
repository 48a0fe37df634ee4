"""Engines with weights of few bits, beside the same weights in float32."""

import numpy as np
import pytest
from flax import nnx
from tests.integration.llm.helpers import SIZES, prompts_of
from tests.unit.models.conftest import decoder_of

from fornax import kernels
from fornax.llm import LLM, SamplingParams
from fornax.llm.build import build_engine
from fornax.llm.config import EngineConfig
from fornax.models import Decoder, create_decoder

OPTIONS = {**SIZES, "kv_cache_dtype": "float32", "step_sizes": "coarse"}


def _scores(llm: LLM) -> np.ndarray:
    """Log-probabilities of the tokens of two prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for output in llm.generate(prompts_of(30, 41), params):
        assert output.prompt_logprobs is not None
        found += [next(iter(place.values())).logprob for place in output.prompt_logprobs[1:]]
    return np.array(found)


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
