"""Completions: greedy ones follow the logits, drawn ones their distribution, rows stay apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.unit.models.conftest import decoder_of, logits_of

from fornax.config.errors import ConfigError
from fornax.models import Sampling, generate, stream
from fornax.models.generation import _draw

PROMPTS = [[5, 9, 3], [7, 1, 30, 12, 4, 4, 19, 2, 25]]
NEW = 7


@functools.cache
def _greedy(name: str) -> list[list[int]]:
    return generate(decoder_of(name), PROMPTS, max_tokens=NEW)


def _by_whole_passes(name: str, prompt: list[int]) -> list[int]:
    """The most likely token after each prefix, without a cache."""
    tokens = list(prompt)
    for _ in range(NEW):
        padded = np.zeros((2, 16), np.int32)
        padded[:, : len(tokens)] = tokens
        ids = np.broadcast_to((np.arange(16) < len(tokens)).astype(np.int32), (2, 16))
        tokens.append(int(logits_of(name, padded, ids)[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_greedy_takes_the_most_likely_token_each_time(name: str) -> None:
    assert _greedy(name) == [_by_whole_passes(name, prompt) for prompt in PROMPTS]


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    alone = [generate(decoder_of(name), [prompt], max_tokens=NEW)[0] for prompt in PROMPTS]
    assert alone == _greedy(name)


def test_stream_gives_the_same_step_by_step() -> None:
    steps = list(stream(decoder_of("biased"), PROMPTS, max_tokens=NEW))
    assert [list(row) for row in zip(*steps, strict=True)] == _greedy("biased")


def test_a_stop_token_ends_its_row_and_is_left_out() -> None:
    first, second = _greedy("biased")
    stop = first[2]
    assert stop not in first[:2]
    found = generate(decoder_of("biased"), PROMPTS, max_tokens=NEW, stop_tokens=[stop])
    cut = second[: second.index(stop)] if stop in second else second
    assert found == [first[:2], cut]


def test_all_rows_ended_ends_the_stream() -> None:
    first = _greedy("biased")[0]
    steps = list(stream(decoder_of("biased"), PROMPTS[:1], max_tokens=NEW, stop_tokens=first[1:]))
    assert len(steps) < NEW


@pytest.mark.slow
def test_draws_repeat_with_the_seed_and_differ_between_seeds_and_steps() -> None:
    model = decoder_of("biased")
    hot = [
        generate(model, PROMPTS, max_tokens=20, sampling=Sampling(temperature=50.0, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert hot[0] == hot[1]
    assert hot[0] != hot[2]
    assert len(set(hot[0][0])) > 8, "one key for all steps would draw one token over and over"


@pytest.mark.parametrize("only_one", [{"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_the_narrowest_choice_is_the_greedy_one(only_one: dict[str, float]) -> None:
    found = generate(
        decoder_of("biased"),
        PROMPTS,
        max_tokens=NEW,
        sampling=Sampling(temperature=1.0, **only_one),
    )
    assert found == _greedy("biased")


def _frequencies(top_k: int | None, top_p: float, temperature: float = 1.0) -> np.ndarray:
    """How often each of five tokens is drawn, of 20,000 draws."""
    logits = jnp.log(jnp.array([0.1, 0.4, 0.05, 0.3, 0.15])) / temperature
    rows = jnp.broadcast_to(logits, (20_000, 5))
    drawn = jax.jit(_draw, static_argnums=2)(rows, jax.random.key(0), top_k, jnp.float32(top_p))
    return np.bincount(np.asarray(drawn), minlength=5) / 20_000


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature", "expected"),
    [
        (None, 1.0, 1.0, [0.1, 0.4, 0.05, 0.3, 0.15]),
        (2, 1.0, 1.0, [0, 4 / 7, 0, 3 / 7, 0]),
        (None, 0.7, 1.0, [0, 4 / 7, 0, 3 / 7, 0]),
        (None, 0.71, 1.0, [0, 40 / 85, 0, 30 / 85, 15 / 85]),
        (3, 0.6, 1.0, [0, 4 / 7, 0, 3 / 7, 0]),
        (None, 1.0, 0.5, np.array([1, 16, 0.25, 9, 2.25]) / 28.5),
    ],
)
def test_draws_follow_the_distribution(
    top_k: int | None, top_p: float, temperature: float, expected: list[float]
) -> None:
    """Within four standard deviations of 20,000 draws; what is cut off never comes."""
    found = _frequencies(top_k, top_p, temperature)
    np.testing.assert_allclose(found, expected, atol=4 * np.sqrt(0.25 / 20_000))
    assert (found[np.asarray(expected) == 0] == 0).all()


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "message"),
    [
        ([[1], []], 4, "prompt 1 is empty"),
        ([[1, 32]], 4, "prompt 0 has token 32, outside the vocabulary of 32"),
        ([[1, -1]], 4, "token -1, outside"),
        ([[1] * 61], 4, "passes the model's 64 positions; .* at most 3 tokens"),
        ([[1]], 0, "max_tokens=0 must be 1 or more"),
    ],
)
def test_requests_that_cannot_be_met(
    prompts: list[list[int]], max_tokens: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        stream(decoder_of("biased"), prompts, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p=1\.5"),
        ({"seed": -1}, "seed=-1"),
        ({"top_k": 5}, "change nothing at temperature 0"),
    ],
    ids=str,
)
def test_sampling_options_are_checked(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


def test_no_prompts_give_no_completions() -> None:
    assert generate(decoder_of("biased"), [], max_tokens=3) == []
