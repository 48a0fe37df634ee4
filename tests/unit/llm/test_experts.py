"""What the engine's step does with the experts of a model on CPU."""

import re

import pytest

from fornax.kernels import _native
from fornax.llm.config import EngineConfig
from fornax.llm.devices import attached_devices
from fornax.llm.memory import fit_limits
from fornax.llm.programs import Sizes, describe_arrays, make_programs
from fornax.llm.weights import load_weights
from fornax.models import DecoderConfig, ExpertsConfig, create_decoder

LAYERS, EXPERTS, WIDTH, HIDDEN = 3, 6, 24, 40
CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=WIDTH,
    num_layers=LAYERS,
    num_heads=2,
    max_position_embeddings=32,
    experts=ExpertsConfig(num_experts=EXPERTS, experts_per_token=2, intermediate_size=HIDDEN),
)


@pytest.mark.skipif(_native.unavailable("experts") is not None, reason="needs a C++ compiler")
def test_a_step_neither_copies_nor_widens_the_experts_of_a_layer():
    """All of them, for the few that its tokens choose: most of a step's time, if it did."""
    config = EngineConfig(dtype="bfloat16", max_num_seqs=2, max_num_batched_tokens=4)
    weights = load_weights(create_decoder(CONFIG), config)
    limits = fit_limits(config, weights, attached_devices())
    sizes = Sizes.of(config, weights, limits)
    arrays = describe_arrays(weights, limits, sizes)
    programs = make_programs(config, weights, limits, sizes, arrays)
    text = programs["step", sizes.steps[-1]].compile().as_text()
    assert f"bf16[{LAYERS},{EXPERTS},{WIDTH},{HIDDEN}]" in text
    pairs = rf"({WIDTH},{HIDDEN}|{HIDDEN},{WIDTH})\]"
    assert not re.search(rf"\w+\[(1,)?{EXPERTS},{pairs}", text)
    assert not re.search(rf"f32\[{LAYERS},{EXPERTS},{pairs}", text)
