"""Linear attention in the engine: over devices, counted to the byte, slots reused, or refused."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from tests.integration.llm.helpers import SIZES, Figures, completions, prompts_of
from tests.integration.llm.test_memory import live_bytes
from tests.unit.models.conftest import CONFIGS, decoder_of

from fornax.config.errors import ConfigError
from fornax.llm import LLM, SamplingParams
from fornax.llm.build import build_engine
from fornax.llm.config import EngineConfig
from fornax.llm.memory import account_of
from fornax.models import copy_states, create_decoder, generate, init_states

CONFIG = CONFIGS["linear"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.slow
def test_tokens_over_devices_are_those_of_one() -> None:
    """Key heads are divided, and with them states; more prompts than slots, none with room."""
    figures = Figures()
    sizes = {**SIZES, "num_gpu_blocks_override": 20, "step_sizes": "coarse"}
    llm = LLM(decoder_of("linear"), **sizes, tensor_parallel_size=2, observer=figures)
    states = llm._engine.runner.executor.states
    assert states is not None
    assert states.memory_BKRHV.sharding.shard_shape(states.memory_BKRHV.shape)[2] == 1
    prompts = prompts_of(3, 21, 14, 9, 1, 30)
    expected = generate(decoder_of("linear"), prompts, max_tokens=12, stop_tokens=())
    assert completions(llm.generate(prompts, GREEDY)) == expected
    assert figures.preemptions > 0
    assert not figures.compiled


def test_the_account_is_what_an_engine_holds() -> None:
    """Of each of the 4 sequences a state in both linear layers, of a token keys in the others."""
    config = EngineConfig(**SIZES, num_gpu_blocks_override=20)
    before = live_bytes()
    parts = build_engine(create_decoder(CONFIG), config)
    runner = parts.engine.runner
    account = account_of(config, runner.weights, parts.limits)
    assert live_bytes() - before == account.held
    inputs = 3 * 2 * (8 + 8 + 2 * 6)
    assert account.states == 4 * 2 * (2 * 2 * 8 * 6 + inputs) * 4
    assert account.cache == (20 + 1) * 4 * 2 * (2 * 2 * 8) * 4
    parts.engine.sleep()
    assert live_bytes() - before == account.held - account.cache - account.states
    parts.engine.wake()
    assert live_bytes() - before == account.held


@pytest.mark.slow
def test_a_step_copies_no_slots_but_its_sequences_own() -> None:
    """A small step of an engine with many slots: chunks, single tokens and convolutions."""
    sizes = {**SIZES, "max_num_seqs": 256, "max_num_batched_tokens": 256}
    config = EngineConfig(**sizes, num_gpu_blocks_override=20)
    parts = build_engine(create_decoder(CONFIG), config)
    account = account_of(config, parts.engine.runner.weights, parts.limits)
    program = parts.programs._makers["model", "step", 4]()
    inputs = 256 * 2 * 3 * 2 * (8 + 8 + 2 * 6) * 4
    assert program.memory_analysis().temp_size_in_bytes < min(account.states - inputs, inputs) / 2


def test_copies_of_states_read_before_they_write() -> None:
    stacks = jax.tree.map(
        lambda x: x + np.arange(4).reshape(1, 4, *(1,) * (x.ndim - 2)),
        init_states(CONFIG, 4, np.float32),
    )
    pairs = np.array([[0, 1, 0], [1, 2, 99]])
    for stack in jax.tree.leaves(copy_states(stacks, pairs)):
        np.testing.assert_array_equal(stack.reshape(*stack.shape[:2], -1)[0, :, 0], [0, 0, 1, 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {"type": "ngram"}}, r"speculation\); leave out speculative_config"),
        ({"quantization": "int8"}, r"serve in int8\); serve it in bfloat16"),
    ],
)
def test_what_cannot_be_served_says_what_to_do_instead(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"linear attention.*{message}"):
        LLM(decoder_of("linear"), **SIZES, **options)


def test_a_model_without_pages_is_refused() -> None:
    linear = dataclasses.replace(CONFIG, attention_pattern=("linear",), num_layers=1)
    with pytest.raises(ConfigError, match=r"every layer.*\(serve\); complete prompts with"):
        LLM(create_decoder(linear), **SIZES)


def test_heads_that_do_not_divide_are_refused() -> None:
    wide = dataclasses.replace(CONFIG, num_kv_heads=4)
    with pytest.raises(ConfigError, match=r"=4 does not divide .* heads of linear layers, 2"):
        LLM(create_decoder(wide), **SIZES, tensor_parallel_size=4)
