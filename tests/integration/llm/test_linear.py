"""Linear attention in the engine: over devices, counted to the byte, slots reused, or refused."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.integration.llm.helpers import SIZES, Figures, completions, prompts_of
from tests.integration.llm.test_memory import live_bytes
from tests.unit.models.conftest import CONFIGS, decoder_of

from fornax.config.errors import ConfigError
from fornax.llm import LLM, SamplingParams
from fornax.llm.build import build_engine
from fornax.llm.config import EngineConfig
from fornax.llm.devices import DeviceSpec
from fornax.llm.limits import limits_without_cache
from fornax.llm.memory import account_of
from fornax.llm.weights import local_bytes
from fornax.models import (
    Decoder,
    copy_states,
    create_decoder,
    generate,
    init_states,
    save_pretrained,
    state_bytes,
)

CONFIG = CONFIGS["linear"]
SAVED = dataclasses.replace(CONFIG, attention_output_bias=True)
"""As files of Qwen3.5 have it."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_tokens_over_devices_are_those_of_one() -> None:
    """Key heads are divided, and with them states; more prompts than slots, none with room."""
    figures = Figures()
    sizes = {**SIZES, "num_gpu_blocks_override": 17, "step_sizes": "coarse"}
    llm = LLM(decoder_of("linear"), **sizes, tensor_parallel_size=2, observer=figures)
    states = llm._engine.runner.executor.states
    assert states is not None
    assert states.memory_BKRHV.sharding.shard_shape(states.memory_BKRHV.shape)[2] == 1
    prompts = prompts_of(3, 21, 14, 9, 1, 30)
    expected = generate(decoder_of("linear"), prompts, max_tokens=30, stop_tokens=())
    longer = dataclasses.replace(GREEDY, max_tokens=30)
    assert completions(llm.generate(prompts, longer)) == expected
    assert figures.preemptions > 0
    assert not figures.compiled


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafts", ["ngram", "draft_model"])
def test_proposed_tokens_change_none(drafts: str, tmp_path: Path) -> None:
    """Few pages, and fewer slots for states than sequences: preempted, resumed and run out of."""
    figures, speculation = Figures(), {"type": drafts, "num_speculative_tokens": 3}
    if drafts == "ngram":
        speculation["prompt_lookup_min"] = 1
    else:
        save_pretrained(_noisy(), tmp_path)
        speculation["model"] = str(tmp_path)
    llm = LLM(
        create_decoder(SAVED, seed=3),
        **SIZES,
        step_sizes="coarse",
        num_gpu_blocks_override=17,
        num_state_checkpoints=3,
        speculative_config=speculation,
        observer=figures,
    )
    prompts = [prompt * 2 for prompt in prompts_of(4, 14, 6, 11, 3, 15)]
    expected = generate(create_decoder(SAVED, seed=3), prompts, max_tokens=30, stop_tokens=())
    for _ in range(2):
        outputs = llm.generate(prompts, dataclasses.replace(GREEDY, max_tokens=30))
        assert completions(outputs) == expected
    assert 0 < figures.accepted < figures.drafted
    assert figures.preemptions > 0
    assert not figures.compiled
    states = llm._engine.scheduler.manager.states
    assert states is not None
    assert states.num_blank + states.num_known == 3


def _noisy() -> Decoder:
    """A draft model that agrees with the model now and then."""
    near, rng = create_decoder(SAVED, seed=3), np.random.default_rng(0)

    def noisy(x: jax.Array) -> jax.Array:
        return x + 0.3 * np.std(x) * rng.normal(size=x.shape).astype(x.dtype)

    nnx.update(near, jax.tree.map(noisy, nnx.state(near)))
    return near


def test_slots_are_copied_in_place() -> None:
    parts = build_engine(
        create_decoder(CONFIG),
        EngineConfig(**{**SIZES, "max_num_seqs": 256, "max_num_batched_tokens": 256}),
    )
    program = parts.programs._makers["model", "copy states"]()
    states = local_bytes(parts.engine.runner.executor.states)
    assert program.memory_analysis().temp_size_in_bytes < states / 100


@pytest.mark.slow
def test_the_account_is_what_an_engine_holds() -> None:
    """Of each of the 4 sequences a state in both linear layers, of a token keys in the others."""
    config = EngineConfig(**SIZES, num_gpu_blocks_override=20)
    before = live_bytes()
    parts = build_engine(create_decoder(CONFIG), config)
    runner = parts.engine.runner
    account = account_of(config, runner.weights, parts.limits)
    assert live_bytes() - before == account.held
    inputs = 3 * 2 * (8 + 8 + 2 * 6)
    assert account.states == (4 + 8) * 2 * (2 * 2 * 8 * 6 + inputs) * 4
    assert account.cache == (20 + 1) * 4 * 2 * (2 * 2 * 8) * 4
    parts.engine.sleep()
    assert live_bytes() - before == account.held - account.cache - account.states
    parts.engine.wake()
    assert live_bytes() - before == account.held


@pytest.mark.exhaustive
def test_a_step_copies_no_slots_but_its_sequences_own() -> None:
    """A small step of an engine with many slots: chunks, single tokens and convolutions."""
    sizes = {**SIZES, "max_num_seqs": 256, "max_num_batched_tokens": 256}
    config = EngineConfig(**sizes, num_gpu_blocks_override=20)
    parts = build_engine(create_decoder(CONFIG), config)
    account = account_of(config, parts.engine.runner.weights, parts.limits)
    program = parts.programs._makers["model", "step", 4]()
    inputs = 256 * 2 * 3 * 2 * (8 + 8 + 2 * 6) * 4
    assert program.memory_analysis().temp_size_in_bytes < min(account.states - inputs, inputs) / 2


def test_states_are_copied_one_after_the_other() -> None:
    stacks = jax.tree.map(
        lambda x: x + np.arange(4).reshape(1, 4, *(1,) * (x.ndim - 2)),
        init_states(CONFIG, 4, np.float32),
    )
    pairs = jnp.array([[0, 1, 3], [1, 2, 99]])
    for stack in jax.tree.leaves(copy_states(stacks, pairs)):
        np.testing.assert_array_equal(stack.reshape(*stack.shape[:2], -1)[0, :, 0], [0, 0, 0, 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, r"serve quantized\); serve it in bfloat16"),
    ],
)
def test_what_cannot_be_served_says_what_to_do_instead(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"linear attention.*{message}"):
        LLM(decoder_of("linear"), **SIZES, **options)


@pytest.mark.slow
def test_a_model_without_pages_is_served() -> None:
    """States alone are kept, for running sequences and for beginnings."""
    linear = dataclasses.replace(CONFIG, attention_pattern=("linear",), num_layers=1)
    figures, model = Figures(), create_decoder(linear, seed=3)
    ngram = {"type": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    sizes = {**SIZES, "step_sizes": "coarse"}
    llm = LLM(model, **sizes, speculative_config=ngram, observer=figures)
    [shared, *others] = prompts_of(17, 5, 9, 3, 11)
    prompts = [shared + other for other in others]
    expected = generate(model, prompts, max_tokens=12, stop_tokens=())
    assert completions(llm.generate(prompts, GREEDY)) == expected
    outputs = llm.generate(prompts, GREEDY)
    assert completions(outputs) == expected
    assert figures.prefix_hits > 0
    assert figures.drafted > 0
    assert not figures.compiled
    for option in ({"num_gpu_blocks_override": 20}, {"kv_cache_dtype": "bfloat16"}):
        with pytest.raises(ConfigError, match="no layer of the model keeps any"):
            LLM(model, **SIZES, **option)


@pytest.mark.exhaustive
def test_states_are_kept_in_a_share_of_memory_unless_their_number_is_given() -> None:
    size = state_bytes(CONFIG, np.float32)

    def kept(config: EngineConfig, memory: int) -> int:
        target = DeviceSpec(platform="gpu", num_devices=1, memory=memory)
        return limits_without_cache(config, CONFIG, np.dtype("float32"), target).state_checkpoints

    four = EngineConfig(max_num_seqs=4)
    assert [kept(four, 10 * count * size) for count in (100, 8, 5, 0)] == [8, 8, 5, 1]
    given = dataclasses.replace(four, num_state_checkpoints=30)
    assert kept(given, 10 * size) == 30
    assert kept(dataclasses.replace(four, enable_prefix_caching=False), 100 * size) == 0
    with pytest.raises(ConfigError, match=r"=30 is for prefix caching, .* leave one of them out"):
        dataclasses.replace(given, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"=30 is for models with linear layers"):
        LLM(decoder_of("biased"), **SIZES, num_state_checkpoints=30)


def test_heads_that_do_not_divide_are_refused() -> None:
    wide = dataclasses.replace(CONFIG, num_kv_heads=4)
    with pytest.raises(ConfigError, match=r"=4 does not divide .* heads of linear layers, 2"):
        LLM(create_decoder(wide), **SIZES, tensor_parallel_size=4)
