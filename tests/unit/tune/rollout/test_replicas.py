"""Engines over a mesh and side by side: the tokens of one engine on one device."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from flax import nnx

from fornax.config.errors import EngineError
from fornax.data import Tokenizer
from fornax.llm import EngineConfig
from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh, tree_shardings
from fornax.models import Decoder, token_logprobs
from fornax.tune.rollout import Completion, LLMSampler, ReplicatedSampler, SampleSettings

pytestmark = pytest.mark.slow  # three engines compile

PROMPTS = [[5 + i, 40, 7 * i + 3] for i in range(6)]
SEEDS = [100 + i for i in range(6)]
DRAW = SampleSettings(n=2, max_tokens=10, temperature=0.7)


@pytest.fixture(scope="module")
def laid_out(model: Decoder) -> Decoder:
    """The model as a trainer has it: over eight devices, layers divided by two."""
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    graphdef, state = nnx.split(model)
    where = tree_shardings(state, mesh, DEFAULT_RULES)
    return nnx.merge(graphdef, jax.tree.map(jax.device_put, state, where))


@pytest.fixture(scope="module")
def replicas(
    laid_out: Decoder, tokenizer: Tokenizer, engine: EngineConfig
) -> Iterator[ReplicatedSampler]:
    """Two engines of two devices each and one of one; none on the first device."""
    devices = jax.devices()
    made = ReplicatedSampler(
        [
            LLMSampler(
                laid_out,
                tokenizer=tokenizer,
                engine=dataclasses.replace(engine, tensor_parallel_size=len(part), max_num_seqs=4),
                devices=part,
            )
            for part in (devices[2:4], devices[6:8], devices[5:6])
        ]
    )
    yield made
    assert made.stats().compilations == 0
    made.close()


def check_same(found: list[list[Completion]], expected: list[list[Completion]]) -> None:
    for group, alone in zip(found, expected, strict=True):
        for one, other in zip(group, alone, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
            assert (one.text, one.finish_reason, one.seed) == (
                other.text,
                other.finish_reason,
                other.seed,
            )


@pytest.mark.exhaustive
def test_divided_engines_side_by_side_draw_what_one_device_does(
    replicas: ReplicatedSampler, sampler: LLMSampler
) -> None:
    before = replicas.stats()
    found = replicas.sample(PROMPTS, DRAW, SEEDS)
    check_same(found, sampler.sample(PROMPTS, DRAW, SEEDS))
    assert replicas.stats().minus(before).tokens == sum(len(c) for g in found for c in g)
    assert all(each.stats().tokens > 0 for each in replicas._samplers)


@pytest.mark.exhaustive
def test_new_weights_reach_every_engine(
    replicas: ReplicatedSampler, sampler: LLMSampler, laid_out: Decoder, model: Decoder
) -> None:
    other = jax.tree.map(lambda x: x * 1.3, nnx.state(laid_out, nnx.Param))
    replicas.update(other, 3)
    sampler.update(jax.tree.map(lambda x: x * 1.3, nnx.state(model, nnx.Param)), 3)
    found = replicas.sample(PROMPTS, DRAW, SEEDS)
    check_same(found, sampler.sample(PROMPTS, DRAW, SEEDS))
    assert {v for group in found for c in group for v in c.versions.tolist()} == {3}
    replicas.update(nnx.state(laid_out, nnx.Param), 0)


def test_log_probs_are_the_trainers(replicas: ReplicatedSampler, model: Decoder) -> None:
    """`mismatch_kl` is made of these differences."""
    for prompt, [one, _] in zip(PROMPTS, replicas.sample(PROMPTS, DRAW, SEEDS), strict=True):
        tokens = np.array([*prompt, *one.tokens.tolist()], np.int32)[None]
        scored = token_logprobs(model, tokens[:, :-1], tokens[:, 1:], temperature=0.7)
        logps = np.asarray(scored.logprobs)[0, len(prompt) - 1 :]
        np.testing.assert_allclose(one.logprobs, logps, atol=1e-5)


def test_requests_are_spread_cancelled_and_forgotten(replicas: ReplicatedSampler) -> None:
    names = [replicas.submit(prompt, DRAW, 1) for prompt in PROMPTS]
    assert [name[0] for name in names] == ["0", "1", "2"] * 2
    for name in names:
        replicas.cancel(name)
    assert replicas.poll() == []
    with pytest.raises(EngineError, match="1 seeds for 6 prompts"):
        replicas.sample(PROMPTS, DRAW, [1])
    with pytest.raises(EngineError):
        replicas.sample([*PROMPTS, [3] * 500], DRAW, [*SEEDS, 1])
    assert not any(each.busy for each in replicas._samplers)


def test_packed_integers_are_refused_on_another_device(
    model: Decoder, engine: EngineConfig
) -> None:
    integers = dataclasses.replace(engine, quantization="int8")
    with pytest.raises(EngineError, match="runs on JAX's first device"):
        LLMSampler(model, engine=integers, devices=jax.devices()[3:4])
