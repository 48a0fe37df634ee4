"""The engine as a sampler: tokens, log-probs, seeds, versions, occupancy, weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.config.errors import ConfigError, EngineError
from fornax.models import generate, token_logprobs
from fornax.tune.rollout import SampleSettings, sample_seed

PROMPTS = [[9, 20, 31], [7] * 11, list(range(40, 57)), [3]]
SEEDS = [sample_seed(0, 0, prompt) for prompt in range(4)]


def tokens_of(groups):
    return [[each.tokens.tolist() for each in group] for group in groups]


@pytest.fixture(scope="module")
def expected_logprobs(model):
    """By the model's full forward pass, softmax in float64."""
    graphdef = nnx.graphdef(model)
    forward = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))

    def compute(model, prompt, completion, temperature):
        row = np.array([*prompt, *completion.tokens])
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(row)] = row
        logits = np.asarray(forward(nnx.state(model), padded))[0, : len(row) - 1]
        x = logits.astype(np.float64) / temperature
        x -= x.max(axis=-1, keepdims=True)
        x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
        return x[np.arange(len(x)), row[1:]][len(prompt) - 1 :]

    return compute


def test_greedy_tokens_are_those_of_generate_and_keep_the_end_token(model, sampler):
    expected = generate(model, PROMPTS, max_tokens=16)
    found = sampler.sample(PROMPTS, SampleSettings(temperature=0, max_tokens=16), SEEDS)
    eos = model.config.eos_token_ids[0]
    for (one,), words in zip(found, expected, strict=True):
        ends = one.finish_reason == "stop"
        assert one.tokens.tolist() == words + [eos] * ends
        assert one.truncated == (not ends)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_the_model_at_the_temperature(
    model, sampler, expected_logprobs, temperature
):
    settings = SampleSettings(n=3, temperature=temperature, max_tokens=40)
    groups = sampler.sample(PROMPTS, settings, SEEDS)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for one in group:
            expected = expected_logprobs(model, prompt, one, temperature)
            np.testing.assert_allclose(one.logprobs, expected, atol=1e-5, rtol=0)
            assert one.logprobs.dtype == np.float32


def test_logprobs_are_those_of_the_trainers_function(model, sampler):
    settings = SampleSettings(n=4, temperature=1.7, max_tokens=30, ignore_eos=True)
    (group,) = sampler.sample(PROMPTS[:1], settings, SEEDS[:1])
    rows = np.array([[*PROMPTS[0], *one.tokens] for one in group], np.int32)
    found = jax.jit(
        lambda state, inputs, targets: (
            token_logprobs(
                nnx.merge(nnx.graphdef(model), state), inputs, targets, temperature=1.7
            ).logprobs
        )
    )(nnx.state(model), rows[:, :-1], rows[:, 1:])
    drawn = np.stack([one.logprobs for one in group])
    np.testing.assert_allclose(drawn, found[:, len(PROMPTS[0]) - 1 :], atol=1e-5, rtol=0)


def test_filtered_logprobs_count_the_tokens_that_stay(model, sampler, expected_logprobs):
    settings = SampleSettings(n=2, top_k=3, max_tokens=20)
    (group,) = sampler.sample(PROMPTS[:1], settings, SEEDS[:1])
    for one in group:
        whole = expected_logprobs(model, PROMPTS[0], one, 1.0)
        assert (one.logprobs >= whole - 1e-5).all()
        assert (one.logprobs > whole + 1e-3).any()


def test_seeds_repeat_and_differ_and_nothing_else_in_the_batch_matters(sampler):
    settings = SampleSettings(n=3, max_tokens=24)
    together = sampler.sample(PROMPTS, settings, SEEDS)
    assert tokens_of(sampler.sample(PROMPTS, settings, SEEDS)) == tokens_of(together)
    alone = sampler.sample(PROMPTS[2:3], settings, SEEDS[2:3])
    assert tokens_of(alone) == tokens_of(together[2:3])
    assert (alone[0][1].logprobs == together[2][1].logprobs).all()
    texts = {tuple(one.tokens.tolist()) for group in together for one in group}
    assert len(texts) == 12
    later = [sample_seed(0, 1, prompt) for prompt in range(4)]
    assert all(
        a != b
        for a, b in zip(
            tokens_of(sampler.sample(PROMPTS, settings, later)), tokens_of(together), strict=True
        )
    )
    single = SampleSettings(max_tokens=24)
    second = sampler.sample(PROMPTS[:1], single, [SEEDS[0] + 1])
    assert second[0][0].tokens.tolist() == together[0][1].tokens.tolist()
    assert second[0][0].seed == together[0][1].seed


def test_seeds_of_requests_do_not_meet():
    seeds = {
        sample_seed(run, step, prompt, sample)
        for run in range(3)
        for step in range(6)
        for prompt in range(6)
        for sample in range(6)
    }
    assert len(seeds) == 3 * 6**3
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3, 0) != sample_seed(1, 3, 2)


def test_updated_weights_make_the_tokens_and_outlive_the_trainers_arrays(
    model, sampler, expected_logprobs
):
    changed = jax.tree.map(
        lambda x: x + 0.05 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), nnx.state(model)
    )
    settings = SampleSettings(n=2, max_tokens=12)
    before = sampler.sample(PROMPTS, settings, SEEDS)
    sampler.update(changed, version=3)
    other = nnx.merge(nnx.graphdef(model), jax.tree.map(jnp.copy, changed))
    for leaf in jax.tree.leaves(changed):
        leaf.delete()  # as a trainer's donation does
    after = sampler.sample(PROMPTS, settings, SEEDS)
    assert tokens_of(before) != tokens_of(after)
    for prompt, (one, _) in zip(PROMPTS, after, strict=True):
        assert one.versions.tolist() == [3] * len(one)
        expected = expected_logprobs(other, prompt, one, 1.0)
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-5, rtol=0)


def test_an_update_in_the_middle_of_a_completion_tags_its_tokens(model, sampler):
    settings = SampleSettings(max_tokens=20, ignore_eos=True)
    name = sampler.submit(PROMPTS[0], settings, 4)
    for _ in range(8):
        assert not sampler.poll()
    sampler.update(model, version=1)
    done = []
    while not done:
        done = sampler.poll()
    ((found, (one,)),) = done
    assert found == name
    assert set(one.versions.tolist()) == {0, 1}
    assert (np.diff(one.versions) >= 0).all()
    (whole,) = sampler.sample(PROMPTS[:1], settings, [4])
    assert whole[0].tokens.tolist() == one.tokens.tolist()


def test_sharded_weights_are_taken_over(model, sampler):
    mesh = jax.make_mesh((8,), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    sampler.update(jax.device_put(nnx.state(model), spread), version=2)
    (one,) = sampler.sample(PROMPTS[:1], SampleSettings(max_tokens=3), SEEDS[:1])[0]
    assert one.versions.tolist() == [2] * len(one)


def test_the_batch_is_full_while_there_is_work(sampler):
    before = sampler.stats()
    settings = SampleSettings(n=8, max_tokens=32, ignore_eos=True)
    groups = sampler.sample(PROMPTS, settings, SEEDS)
    used = sampler.stats().minus(before)
    assert used.tokens == sum(len(one) for group in groups for one in group) == 4 * 8 * 32
    assert used.occupancy > 0.9
    # Prompts are computed once and shared; completions that wait for room find full pages.
    assert used.prompt_tokens < 2 * sum(map(len, PROMPTS))
    assert used.tokens_per_second > 0
    assert used.compilations == 0


def test_texts_and_stop_texts(sampler, tokenizer):
    prompt = tokenizer.encode("the number").tolist()
    settings = SampleSettings(max_tokens=30, temperature=1.5, stop=("e", "1"), ignore_eos=True)
    (one,) = sampler.sample([prompt], settings, [3])[0]
    assert one.finish_reason == "stop"
    assert "e" not in one.text
    assert any(text in tokenizer.decode(one.tokens.tolist()) for text in ("e", "1"))


def test_a_sampler_that_sleeps_wakes_by_itself(sampler):
    settings = SampleSettings(max_tokens=4)
    before = sampler.sample(PROMPTS, settings, SEEDS)
    sampler.sleep()
    assert tokens_of(sampler.sample(PROMPTS, settings, SEEDS)) == tokens_of(before)


def test_what_cannot_be_honoured_is_refused_and_leaves_nothing_behind(sampler, model):
    with pytest.raises(EngineError, match="maximum context length"):
        sampler.sample([PROMPTS[0], [5] * 192], SampleSettings(), [0, 1])
    with pytest.raises(EngineError, match="1 seeds for 2 prompts"):
        sampler.sample(PROMPTS[:2], SampleSettings(), [0])
    with pytest.raises(ConfigError, match="n=2 at temperature=0"):
        SampleSettings(n=2, temperature=0)
    with pytest.raises(EngineError, match="not this model's"):
        sampler.update({"embed": {"embedding": jnp.zeros((2, 2))}}, 1)
    broken = jax.tree.map(lambda x: x * jnp.nan, nnx.state(model))
    sampler.update(broken, 1)
    with pytest.raises(EngineError, match="not a number"):
        sampler.sample(PROMPTS, SampleSettings(), SEEDS)
