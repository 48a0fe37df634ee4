"""Proposing tokens changes how fast they come, never which."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.integration.llm.helpers import SIZES, Figures, completions, prompts_of
from tests.unit.models.conftest import CONFIGS

from fornax.config.errors import ConfigError
from fornax.llm import LLM, SamplingParams
from fornax.models import create_decoder, generate, save_pretrained

CONFIG = dataclasses.replace(CONFIGS["windowed"], attention_logit_softcap=None)
MODEL = create_decoder(CONFIG, seed=3)

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


def _engine(**options: Any) -> LLM:
    return LLM(MODEL, **SIZES, **options)


def _tokens(llm: LLM) -> list[list[list[int]]]:
    prompts = prompts_of(9, 20, 5, 13, 7, 11)
    # Something that stood before, for lookups to find.
    prompts = [prompt + prompt[: len(prompt) // 2] for prompt in prompts]
    outputs = llm.generate(prompts, REQUESTS)
    return [[one.token_ids for one in output.outputs] for output in outputs]


def test_lookups_in_the_sequence_change_no_token(plain: list) -> None:
    figures = Figures()
    speculative = {"type": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    llm = _engine(speculative_config=speculative, observer=figures)
    assert _tokens(llm) == plain
    assert 0 < figures.accepted <= figures.drafted
    assert llm.num_free_pages == llm.num_pages


def test_a_draft_model_changes_no_token(plain: list, tmp_path: Path) -> None:
    save_pretrained(create_decoder(CONFIG, seed=9), tmp_path / "draft")
    figures = Figures()
    llm = _engine(speculative_config=_draft(tmp_path / "draft"), observer=figures)
    assert _tokens(llm) == plain
    assert figures.drafted > 0
    assert not figures.compiled


def test_a_draft_model_equal_to_the_model_is_always_right(tmp_path: Path) -> None:
    save_pretrained(MODEL, tmp_path / "same")
    figures = Figures()
    llm = _engine(speculative_config=_draft(tmp_path / "same"), observer=figures)
    prompts = prompts_of(9, 20, 5)
    drawn = SamplingParams(temperature=1.0, seed=2, max_tokens=16)
    llm.generate(prompts, drawn)
    assert figures.accepted == figures.drafted > 0
    greedy = SamplingParams(temperature=0, max_tokens=16)
    expected = generate(MODEL, prompts, max_tokens=16)
    assert completions(llm.generate(prompts, greedy)) == expected


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, vocab_size=7)
    save_pretrained(create_decoder(config, seed=9), tmp_path / "other")
    with pytest.raises(ConfigError, match="same vocabulary"):
        _engine(speculative_config=_draft(tmp_path / "other"))


def _draft(path: Path) -> dict[str, object]:
    return {"type": "draft_model", "model": str(path), "num_speculative_tokens": 3}
