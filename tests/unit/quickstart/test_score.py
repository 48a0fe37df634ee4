"""Held-out bits: every token is counted once, with its document's context and no other's."""

import gzip
import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from fornax.config.errors import DataError
from fornax.models import Decoder, DecoderConfig
from fornax.quickstart.score import bits_per_byte, document_bits, windows, yardsticks


@given(num_tokens=st.integers(0, 400), length=st.integers(2, 64))
def test_windows_count_each_token_but_the_first_once(num_tokens, length):
    counted = []
    for start, stop, first in windows(num_tokens, length):
        assert 0 <= start < stop <= num_tokens - 1
        assert stop - start <= length
        assert start < first <= stop
        if start > 0:
            assert first - 1 - start >= length // 2  # half a window to look back on
        counted += range(first, stop + 1)
    assert counted == list(range(1, num_tokens))


@pytest.fixture(scope="module")
def model():
    config = DecoderConfig(
        vocab_size=19, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2,
        initializer_range=0.5,
    )  # fmt: skip
    return Decoder(config, rngs=nnx.Rngs(0))


def _by_hand(model, tokens):
    """Bits of one document in one pass, from its whole logits, in float64."""
    logits = np.asarray(model(jnp.asarray(tokens)[None, :-1]), np.float64)[0]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -log_probs[np.arange(len(tokens) - 1), tokens[1:]].sum()
    return nats / math.log(2) + math.log2(19)


@pytest.mark.slow
def test_documents_within_a_window_cost_what_their_logits_say(model):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 19, n) for n in (1, 2, 9, 16, 17)]
    expected = sum(_by_hand(model, d) if len(d) > 1 else math.log2(19) for d in documents)
    found = document_bits(model, documents, length=16, batch_size=3)
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_longer_document_is_read_in_overlapping_windows(model):
    tokens = np.random.default_rng(1).integers(0, 19, 40)
    expected = math.log2(19)
    for start, stop, first in windows(len(tokens), 16):
        logits = np.asarray(model(jnp.asarray(tokens)[None, start:stop]), np.float64)[0]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for position in range(first, stop + 1):
            expected -= log_probs[position - 1 - start, tokens[position]] / math.log(2)
    assert document_bits(model, [tokens], length=16) == pytest.approx(expected, rel=1e-5)


def test_bits_per_byte_divides_by_the_bytes_of_the_text(model):
    tokens = np.random.default_rng(2).integers(0, 19, 12)
    bits = document_bits(model, [tokens], length=16)
    assert bits_per_byte(model, [tokens], [b"x" * 30], length=16) == pytest.approx(bits / 30)


def test_yardsticks_are_the_compressors_own_output():
    texts = [b"def f(x):\n    return x\n" * 20, bytes(range(256))]
    found = yardsticks(texts)
    sizes = sum(len(gzip.compress(t, 9)) for t in texts)
    assert found.gzip == pytest.approx(8 * sizes / sum(map(len, texts)))
    assert found.xz > found.xz_together > 0
    with pytest.raises(DataError, match="no held-out text"):
        yardsticks([])
