"""Greedy completions of a batch of unlike prompts equal those of transformers."""

import numpy as np
import pytest
import torch
from tests.parity.cases import GENERATION_CASES, build
from tests.parity.conftest import HfModel, make_oracle

from fornax.models import generate, load_pretrained

pytestmark = pytest.mark.parity
NEW = 20
LIKE_ANOTHER = (
    "mistral-window",
    "qwen2-window",
    "gemma2",
    "smollm3",
    "qwen3-moe-options",
    "qwen3-5-options",
    "llama4",
)
"""Cases that attend, or keep states, as another does."""


def _prompts(lengths: tuple[int, int]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 97, length).tolist() for length in lengths]


def _complete(oracle: HfModel, prompts: list[list[int]]) -> list[list[int]]:
    """The oracle's greedy completions of left-padded prompts."""
    width = max(map(len, prompts))
    padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    with torch.no_grad():
        found = oracle.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=None,
            pad_token_id=0,
        )
    return found[:, width:].tolist()


def _check(name: str, lengths: tuple[int, int], save_oracle) -> None:
    config, _ = build(name)
    config.tie_word_embeddings = False  # a random tied model says one token over and over
    oracle = make_oracle(config)
    prompts = _prompts(lengths)
    theirs = _complete(oracle, prompts)
    model = load_pretrained(save_oracle(oracle))
    assert generate(model, prompts, max_tokens=NEW, stop_tokens=()) == theirs
    assert len({token for row in theirs for token in row}) > 5, "too uniform to tell"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in LIKE_ANOTHER else [])
        for name in GENERATION_CASES
    ],
)
def test_greedy_tokens_agree(name: str, save_oracle) -> None:
    """Prompts beyond every window and every original context length."""
    _check(name, (19, 24), save_oracle)


@pytest.mark.parametrize("lengths", [(7, 11), (16, 9)], ids=str)
def test_longrope_changes_its_frequencies_on_the_way(lengths: tuple[int, int], save_oracle) -> None:
    """Completions that pass the original 16 positions: all keys are made again, as there."""
    _check("phi4-mini", lengths, save_oracle)
