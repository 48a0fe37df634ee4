"""Proposing tokens changes how fast they come, never their distribution: lookups not even which."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tests.integration.llm.helpers import SIZES, Figures, completions, prompts_of
from tests.unit.models.conftest import CONFIGS

from fornax.config.errors import ConfigError
from fornax.llm import LLM, SamplingParams
from fornax.models import Decoder, create_decoder, generate, save_pretrained

CONFIG = dataclasses.replace(CONFIGS["windowed"], attention_logit_softcap=None)


@functools.cache
def _model() -> Decoder:
    return create_decoder(CONFIG, seed=3)


REQUESTS = (
    SamplingParams(temperature=0, max_tokens=16),
    SamplingParams(temperature=1.0, seed=2, max_tokens=16),
    SamplingParams(temperature=0.8, top_k=10, top_p=0.9, min_p=0.01, seed=3, max_tokens=16),
    SamplingParams(temperature=1.0, seed=4, max_tokens=16, presence_penalty=0.5),
    SamplingParams(temperature=1.0, seed=5, max_tokens=16, n=2),
    SamplingParams(temperature=0, max_tokens=16, logprobs=1, min_tokens=3),
)


@pytest.fixture(scope="module")
def plain() -> list[list[list[int]]]:
    """Every request's completions without proposals."""
    return _tokens(_engine())


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that agrees with the model now and then: it is the model with noise."""
    near, rng = create_decoder(CONFIG, seed=3), np.random.default_rng(0)

    def noisy(x: Any) -> Any:
        return x + 0.3 * np.std(x) * rng.normal(size=x.shape).astype(x.dtype)

    nnx.update(near, jax.tree.map(noisy, nnx.state(near)))
    folder = tmp_path_factory.mktemp("draft")
    save_pretrained(near, folder)
    return folder


def _engine(**options: Any) -> LLM:
    return LLM(_model(), **SIZES, **options)


def _tokens(llm: LLM) -> list[list[list[int]]]:
    prompts = prompts_of(9, 20, 5, 13, 7, 11)
    # Something that stood before, for lookups to find.
    prompts = [prompt + prompt[: len(prompt) // 2] for prompt in prompts]
    outputs = llm.generate(prompts, REQUESTS)
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.mark.slow
def test_lookups_in_the_sequence_change_no_token(plain: list) -> None:
    figures = Figures()
    speculative = {"type": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    llm = _engine(speculative_config=speculative, observer=figures)
    assert _tokens(llm) == plain
    assert 0 < figures.accepted <= figures.drafted
    assert llm.num_free_pages == llm.num_pages


@pytest.mark.slow
def test_a_draft_model_changes_no_greedy_token(plain: list, draft: Path) -> None:
    figures = Figures()
    tokens = _tokens(_engine(speculative_config=_draft(draft), observer=figures))
    # The fourth has a penalty and gets no proposals.
    assert [tokens[0], tokens[3], tokens[5]] == [plain[0], plain[3], plain[5]]
    assert figures.drafted > 0
    assert not figures.compiled


@pytest.mark.exhaustive
def test_with_a_draft_model_a_seeded_request_is_the_same_whatever_runs_beside_it(
    draft: Path,
) -> None:
    """Beside others there is no room to try all drafts, and sequences are preempted."""
    count = 8
    prompts = [prompt + prompt for prompt in prompts_of(*(5 + i % 4 for i in range(count)))]
    requests = [SamplingParams(temperature=1.0, seed=i, max_tokens=30) for i in range(count)]
    figures, crowded = Figures(), Figures()
    llm = _engine(speculative_config=_draft(draft), observer=figures)
    alone = [
        completions(llm.generate([p], one))[0] for p, one in zip(prompts, requests, strict=True)
    ]
    llm = _engine(speculative_config=_draft(draft), observer=crowded, num_gpu_blocks_override=17)
    assert completions(llm.generate(prompts, requests)) == alone
    assert crowded.preemptions > 0
    assert 0 < crowded.drafted < figures.drafted


@pytest.mark.exhaustive
def test_with_a_draft_model_tokens_follow_the_models_distribution(draft: Path) -> None:
    """A token's place in the cumulative distribution that it was drawn from is uniform."""
    size = CONFIG.vocab_size
    llm = _engine(speculative_config=_draft(draft), max_logprobs=size)
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=12, logprobs=size)
        for seed in range(200)
    ]
    outputs = llm.generate(prompts_of(6) * len(params), params)
    rng, places = np.random.default_rng(0), []
    for output in outputs:
        one = output.outputs[0]
        assert one.logprobs is not None
        for token, entries in zip(one.token_ids, one.logprobs, strict=True):
            p = np.exp([entries[other].logprob for other in range(size)], dtype=np.float64)
            places.append((p[:token].sum() + rng.random() * p[token]) / p.sum())
    found, _ = np.histogram(places, bins=20, range=(0, 1))
    expected = len(places) / 20
    statistic = ((found - expected) ** 2 / expected).sum()
    assert statistic < 19 + 4 * np.sqrt(2 * 19)


@pytest.mark.slow
def test_a_draft_model_equal_to_the_model_is_always_right(tmp_path: Path) -> None:
    save_pretrained(_model(), tmp_path / "same")
    figures = Figures()
    llm = _engine(speculative_config=_draft(tmp_path / "same"), observer=figures)
    prompts = prompts_of(9, 20, 5)
    drawn = SamplingParams(temperature=1.0, seed=2, max_tokens=16)
    llm.generate(prompts, drawn)
    assert figures.accepted == figures.drafted > 0
    greedy = SamplingParams(temperature=0, max_tokens=16)
    expected = generate(_model(), prompts, max_tokens=16)
    assert completions(llm.generate(prompts, greedy)) == expected


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, vocab_size=7)
    save_pretrained(create_decoder(config, seed=9), tmp_path / "other")
    with pytest.raises(ConfigError, match="same vocabulary"):
        _engine(speculative_config=_draft(tmp_path / "other"))


def _draft(path: Path) -> dict[str, object]:
    return {"type": "draft_model", "model": str(path), "num_speculative_tokens": 3}
