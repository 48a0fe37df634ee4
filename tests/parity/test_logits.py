"""Logits equal transformers' in float32 for every family and option, whatever the batch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from tests.memory import let_programs_go
from tests.parity.cases import CASES, UNPACKED, UNPADDED, build
from tests.parity.conftest import make_oracle, oracle_logits

from fornax.models import Decoder, load_pretrained, save_pretrained

pytestmark = pytest.mark.parity
TOLERANCE = 1e-4
VOCAB = 97


@pytest.fixture(autouse=True)
def small_process() -> Iterator[None]:
    """Many cases compile their own programs."""
    yield
    let_programs_go(1600)


def _tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, (batch, length), dtype=np.int32)


def _largest(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert theirs.std() > 0.3, "logits too small for the tolerance to mean anything"
    return float(np.abs(np.asarray(ours) - theirs).max())


def _compiled(model: Decoder) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, tokens, ids: nnx.merge(graphdef, state)(tokens, None, ids))
    return lambda tokens, segment_ids: np.asarray(run(state, tokens, segment_ids))


def _left_padded(shape: tuple[int, int]) -> np.ndarray:
    mask = np.ones(shape, np.int32)
    mask[0, : shape[1] // 3] = 0
    return mask


def _packed(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids of three documents a row, and the positions that restart in each."""
    segments = np.ones(shape, np.int32)
    segments[:, shape[1] // 3 :] = 2
    segments[:, 3 * shape[1] // 4 :] = 3
    row = np.concatenate([np.arange(n) for n in np.bincount(segments[0])[1:]])
    return segments, np.broadcast_to(row, shape).copy()


@pytest.mark.parametrize("name", CASES)
def test_logits_agree(name: str, save_oracle, tmp_path: Path) -> None:
    """Plain, left-padded and packed batches; then saved by us and loaded by transformers."""
    config, length = build(name)
    oracle = make_oracle(config)
    model = load_pretrained(save_oracle(oracle))
    run = _compiled(model)

    tokens = _tokens(2, length)
    plain = oracle_logits(oracle, tokens)
    assert _largest(run(tokens, np.ones_like(tokens)), plain) < TOLERANCE

    mask = _left_padded(tokens.shape)
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    real = mask.astype(bool)
    if name in UNPADDED or CASES[name][0] in UNPADDED:
        rows = [
            oracle_logits(oracle, row[here][None])[0]
            for row, here in zip(tokens, real, strict=True)
        ]
        theirs = np.concatenate(rows)
    else:
        theirs = oracle_logits(oracle, tokens, attention_mask=mask, position_ids=positions)[real]
    assert _largest(run(tokens, mask)[real], theirs) < TOLERANCE

    segments, positions = _packed(tokens.shape)
    if CASES[name][0] in UNPACKED:
        documents = [tokens[:, segments[0] == number] for number in (1, 2, 3)]
        theirs = np.concatenate([oracle_logits(oracle, part) for part in documents], axis=1)
    else:
        theirs = oracle_logits(oracle, tokens, position_ids=positions)
    assert _largest(run(tokens, segments), theirs) < TOLERANCE

    save_pretrained(model, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", experts_implementation="eager"
    ).eval()
    assert type(again) is type(oracle)
    assert again.dtype == torch.float32
    np.testing.assert_array_equal(oracle_logits(again, tokens), plain)


def test_logits_agree_without_segment_ids(save_oracle) -> None:
    """The shortest call, with nothing but tokens."""
    config, length = build("gemma3")
    oracle = make_oracle(config)
    tokens = _tokens(2, length)
    ours = load_pretrained(save_oracle(oracle))(tokens)
    assert _largest(ours, oracle_logits(oracle, tokens)) < TOLERANCE
