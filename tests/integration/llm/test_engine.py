"""The engine's tokens are those of the plain model, whatever happens to a sequence on the way."""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.integration.llm.helpers import Figures, completions, engine_of, prompts_of
from tests.unit.models.conftest import CONFIGS, decoder_of

from fornax.config.errors import ConfigError, EngineError
from fornax.llm import LLM, EngineConfig, SamplingParams, engine
from fornax.models import generate, keeps_states

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.2, top_p=0.9, seed=7, max_tokens=12)


# With parity's engines beside transformers, of every family, this is enough.
IN_CI = ("windowed",)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in IN_CI else pytest.mark.exhaustive)
        for name in CONFIGS
    ],
)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def figures() -> Figures:
    return Figures()


@pytest.fixture(scope="module")
def llm(name: str, figures: Figures) -> Iterator[LLM]:
    """Pages of 4 tokens, steps of 8, room for two or three sequences: everything happens."""
    llm = engine_of(name, observer=figures, num_gpu_blocks_override=17)
    yield llm
    assert not figures.compiled, "a program was compiled after the engine was ready"
    assert llm.num_free_pages == llm.num_pages, "pages were not given back"


@pytest.mark.slow
def test_greedy_tokens_are_the_models_through_chunks_preemption_and_batches(
    name: str, llm: LLM, figures: Figures
) -> None:
    prompts = prompts_of(3, 30, 17, 25, 1, 9)
    expected = generate(decoder_of(name), prompts, max_tokens=12, stop_tokens=())
    assert completions(llm.generate(prompts, GREEDY)) == expected
    assert figures.preemptions > 0, "the cache was large enough for all"


def test_shared_beginnings_are_reused_and_change_nothing(
    name: str, llm: LLM, figures: Figures
) -> None:
    first, other = prompts_of(21, 6)
    prompts = [first, first[:14] + other, first, first[:14] + other[::-1]]
    hits = figures.prefix_hits
    expected = generate(decoder_of(name), prompts, max_tokens=12, stop_tokens=())
    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert completions(outputs) == expected
    # States were kept where chunks ended, at 8 tokens, not at 12, until the second prompt had one.
    parted = 8 if keeps_states(CONFIGS[name]) else 12
    assert [output.num_cached_tokens for output in outputs] == [0, parted, 20, 12]
    assert figures.prefix_hits - hits == parted + 32


def test_a_seeded_request_returns_the_same_tokens_whatever_runs_beside_it(llm: LLM) -> None:
    [prompt] = prompts_of(11)
    alone = completions(llm.generate([prompt], SEEDED))[0]
    others = prompts_of(4, 19, 8, 2)
    beside = [SamplingParams(temperature=0.7, max_tokens=n) for n in (3, 12, 5, 9)]
    mixed = llm.generate([*others, prompt], [*beside, SEEDED])
    assert completions(mixed)[-1] == alone
    assert len(set(alone)) > 3, "the draws were all alike"


def test_decoding_in_one_program_returns_what_decoding_in_two_does(llm: LLM) -> None:
    """Log probabilities of one request keep the sampling of all beside it apart from the step."""
    prompts = prompts_of(6, 3, 8)
    ways = [
        SamplingParams(temperature=1.1, seed=5, max_tokens=14, frequency_penalty=0.7),
        SamplingParams(temperature=0, max_tokens=5, repetition_penalty=1.3),
        SamplingParams(temperature=0.8, seed=6, max_tokens=14, top_k=9, logit_bias={4: 2.0}),
    ]
    together = completions(llm.generate(prompts, ways))
    watched = SamplingParams(temperature=0, max_tokens=14, logprobs=1, ignore_eos=True)
    apart = completions(llm.generate([*prompts, [1, 2]], [*ways, watched]))
    assert apart[:3] == together
    # Rows that end are taken by those that wait, whose first tokens are not theirs.
    many = completions(llm.generate(prompts * 3, ways * 3))
    assert many == together * 3


def test_several_steps_in_a_call_return_what_single_steps_do(
    llm: LLM, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences end within a call, by a stop token, and at its end, by their length."""
    prompts = prompts_of(5, 9, 3, 7)
    [free] = completions(llm.generate([prompts[0]], GREEDY))
    ways = [
        SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[free[5]], ignore_eos=True),
        SamplingParams(temperature=1.2, seed=3, max_tokens=11, presence_penalty=0.4),
        SamplingParams(temperature=0, max_tokens=2),
        SamplingParams(temperature=0.9, seed=4, max_tokens=13, min_p=0.02),
    ]
    found = []
    for seconds in (1e6, 0.0):
        monkeypatch.setattr(engine, "CALL_SECONDS", seconds)
        figures.most_steps = 0
        outputs = llm.generate(prompts * 2, ways * 2)
        found.append(
            ([output.outputs[0].finish_reason for output in outputs], completions(outputs))
        )
        alone = [llm.generate([prompt], way)[0] for prompt, way in zip(prompts, ways, strict=True)]
        assert completions(alone) * 2 == found[-1][1]
        assert figures.most_steps == (4 if seconds else 1)
    assert found[0] == found[1]
    assert len(found[0][1][0]) == free.index(free[5]) + 1


def test_several_completions_equal_requests_with_their_seeds(llm: LLM) -> None:
    [prompt] = prompts_of(10)
    several = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8)
    [output] = llm.generate([prompt], several)
    singles = [SamplingParams(temperature=1.0, seed=3 + i, max_tokens=8) for i in range(3)]
    expected = completions(llm.generate([prompt] * 3, singles))
    assert [one.token_ids for one in output.outputs] == expected


def test_log_probabilities_are_the_models(name: str, llm: LLM) -> None:
    [prompt] = prompts_of(13)
    wanted = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    [output] = llm.generate([prompt], wanted)
    tokens = prompt + output.outputs[0].token_ids
    logits = np.asarray(decoder_of(name)(jnp.asarray([tokens]))[0], np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    assert len(found) == len(tokens) - 1
    for place, entries in enumerate(found):
        row = expected[place]
        assert tokens[place + 1] in entries
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(row[token], abs=2e-5)
            assert entry.rank == 1 + int((row > row[token]).sum())
    sampled = [entries[t].logprob for entries, t in zip(found[12:], tokens[13:], strict=True)]
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(sampled))


def test_embeddings_are_the_final_norms_output(name: str, llm: LLM) -> None:
    prompts = prompts_of(5, 18)
    for prompt, output in zip(prompts, llm.embed(prompts), strict=True):
        hidden = np.asarray(decoder_of(name).hidden(jnp.asarray([prompt]))[0, -1])
        expected = hidden / np.linalg.norm(hidden)
        np.testing.assert_allclose(output.embedding, expected, atol=2e-5)


def test_stop_tokens_and_limits_end_a_completion(llm: LLM) -> None:
    [prompt] = prompts_of(7)
    [free] = completions(llm.generate([prompt], GREEDY))
    stop = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[free[4]])
    [output] = llm.generate([prompt], stop)
    until = free[: free.index(free[4]) + 1]
    assert output.outputs[0].token_ids == until
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", free[4])
    later = SamplingParams(
        temperature=0, max_tokens=12, stop_token_ids=[free[4]], min_tokens=len(until) + 1
    )
    [output] = llm.generate([prompt], later)
    assert len(output.outputs[0].token_ids) > len(until)
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=None))
    assert output.outputs[0].finish_reason == "length"
    assert len(prompt) + len(output.outputs[0].token_ids) == llm.max_model_len


def test_sleep_gives_the_cache_back_and_wake_goes_on(name: str, llm: LLM) -> None:
    [prompt] = prompts_of(15)
    expected = generate(decoder_of(name), [prompt], max_tokens=12, stop_tokens=())
    before = len(jax.live_arrays())
    llm.sleep()
    assert len(jax.live_arrays()) < before
    llm.wake()
    assert completions(llm.generate([prompt], GREEDY)) == expected


def test_new_weights_make_the_new_models_tokens(name: str, llm: LLM) -> None:
    [prompt] = prompts_of(15)
    old = completions(llm.generate([prompt], GREEDY))
    graphdef, state = nnx.split(decoder_of(name))
    changed = jax.tree.map(lambda leaf: leaf * 1.5, state)
    llm.update_weights(changed, version=4)
    [output] = llm.generate([prompt], GREEDY)
    expected = generate(nnx.merge(graphdef, changed), [prompt], max_tokens=12, stop_tokens=())
    assert completions([output]) == expected != old
    assert output.outputs[0].versions == [4] * 12
    assert output.num_cached_tokens == 0, "keys of the old weights were reused"
    llm.update_weights(decoder_of(name), version=0)
    assert completions(llm.generate([prompt], GREEDY)) == old


def test_weights_that_are_not_numbers_fail_the_request_only(name: str, llm: LLM) -> None:
    _, state = nnx.split(decoder_of(name))
    llm.update_weights(jax.tree.map(lambda leaf: leaf * jnp.nan, state), version=1)
    with pytest.raises(EngineError, match="not a number"):
        llm.generate(prompts_of(5), GREEDY)
    llm.update_weights(decoder_of(name), version=2)
    assert len(completions(llm.generate(prompts_of(5), GREEDY))[0]) == 12


def test_requests_that_cannot_be_honoured_say_why(llm: LLM) -> None:
    bad = {
        "maximum context length": [[1] * 65],
        "empty": [[]],
        "outside the vocabulary": [[10_000]],
    }
    for reason, prompts in bad.items():
        with pytest.raises(EngineError, match=reason):
            llm.generate(prompts, GREEDY)
    with pytest.raises(EngineError, match="tokenizer"):
        llm.generate(["text"], GREEDY)


@pytest.mark.slow
def test_sizes_that_are_coarse_decode_too() -> None:
    """Three rows in steps of four tokens, and of sixteen where none is as small."""
    prompts = prompts_of(3, 5, 2)
    expected = generate(decoder_of("windowed"), prompts, max_tokens=6, stop_tokens=())
    ways = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    figures = Figures()
    for options in ({"max_num_seqs": 3}, {"max_num_seqs": 5, "max_num_batched_tokens": 16}):
        llm = engine_of("windowed", observer=figures, step_sizes="coarse", **options)
        assert completions(llm.generate(prompts, ways)) == expected
    assert not figures.compiled


@pytest.mark.slow
def test_a_latency_target_changes_no_token() -> None:
    """It cuts prompts by the clock, and no cut shows."""
    prompts = prompts_of(3, 17, 40, 9, 33)
    ways = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    sizes = {"max_num_batched_tokens": 64, "step_sizes": "coarse"}
    expected = completions(engine_of("windowed", **sizes).generate(prompts, ways))
    llm = engine_of("windowed", **sizes, inter_token_latency_target=1e-6)
    assert completions(llm.generate(prompts, ways)) == expected


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_a_latency_target_is_a_time(target: float) -> None:
    with pytest.raises(ConfigError, match="must be a number of seconds above 0"):
        EngineConfig(inter_token_latency_target=target)
