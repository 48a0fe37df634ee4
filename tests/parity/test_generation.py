"""Greedy completions of a batch of unlike prompts equal those of transformers."""

import numpy as np
import pytest
import torch
from tests.parity.cases import GENERATION_CASES, build
from tests.parity.conftest import make_oracle

from fornax.models import generate, load_pretrained

pytestmark = pytest.mark.parity
NEW = 20


def _prompts(lengths: tuple[int, int]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 97, length).tolist() for length in lengths]


@pytest.mark.parametrize("name", GENERATION_CASES)
def test_greedy_tokens_agree(name: str, save_oracle) -> None:
    """Prompts beyond every window and every original context length, padded on the left."""
    config, _ = build(name)
    config.tie_word_embeddings = False  # a random tied model says one token over and over
    oracle = make_oracle(config)
    prompts = _prompts((19, 24))
    width = max(map(len, prompts))
    padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    with torch.no_grad():
        theirs = oracle.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=None,
            pad_token_id=0,
        )[:, width:].tolist()
    model = load_pretrained(save_oracle(oracle))
    ours = generate(model, prompts, max_tokens=NEW, stop_tokens=())
    assert ours == theirs
    assert len({token for row in ours for token in row}) > 5, "completions too uniform to tell"
