"""Bits per byte of held-out documents under a model, beside what gzip and xz need for them.

Legend: B windows of a batch, T tokens of a window, D model width.
"""

import gzip
import lzma
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.config.errors import DataError
from fornax.kernels import linear_cross_entropy
from fornax.models import Decoder

__all__ = ["Yardsticks", "bits_per_byte", "document_bits", "windows", "yardsticks"]


@dataclass(frozen=True, kw_only=True)
class Yardsticks:
    """Bits per byte of general-purpose compressors on the same texts."""

    gzip: float
    """gzip -9, each file on its own, as the model reads them."""
    xz: float
    """xz -9, each file on its own."""
    xz_together: float
    """xz -9 of all the files as one: it may look back across files, the model may not."""


def yardsticks(texts: Sequence[bytes]) -> Yardsticks:
    """What the compressors need for `texts`, headers included.

    Raises:
      DataError: when there is no text.
    """
    total = sum(map(len, texts))
    if total == 0:
        raise DataError("there is no held-out text to compress; hold out a larger share")

    def bits(sizes: Iterator[int]) -> float:
        return 8 * sum(sizes) / total

    return Yardsticks(
        gzip=bits(len(gzip.compress(text, 9, mtime=0)) for text in texts),
        xz=bits(len(lzma.compress(text, preset=9)) for text in texts),
        xz_together=bits(iter([len(lzma.compress(b"".join(texts), preset=9))])),
    )


def windows(num_tokens: int, length: int) -> list[tuple[int, int, int]]:
    """Cut a document into windows that share half their length.

    A window's inputs are tokens `start` to `stop - 1`, and its predictions the tokens after each.
    Of those, the ones from `first` on are counted, so that each token but the document's first is
    counted once, and all but those of the first window have at least half a window before them.

    Args:
      num_tokens: tokens of the document.
      length: inputs of a window.

    Returns:
      (start, stop, first) for each window.
    """
    cut: list[tuple[int, int, int]] = []
    counted = 1  # the first token has nothing before it
    while counted < num_tokens:
        start = max(0, counted - 1 - length // 2) if cut else 0
        stop = min(start + length, num_tokens - 1)
        cut.append((start, stop, counted))
        counted = stop + 1
    return cut


def document_bits(
    model: Decoder, documents: Sequence[np.ndarray], *, length: int, batch_size: int = 8
) -> float:
    """Bits that the model needs to write down all the documents, one after another.

    Each document is on its own, and its first token costs log2(V), as if all were as likely.

    Args:
      model: a decoder.
      documents: integer token ids, each document with its end-of-text token.
      length: tokens of a window.
      batch_size: windows computed at once.
    """
    graphdef, state = nnx.split(model)
    cap = model.config.final_logit_softcap

    @jax.jit
    def nats(state: object, tokens_BT: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array):
        decoder = nnx.merge(graphdef, state)
        x_BTD = decoder.hidden(tokens_BT)
        return linear_cross_entropy(
            x_BTD.reshape(-1, x_BTD.shape[-1]),
            decoder.output_weights().astype(x_BTD.dtype),
            targets_BT.reshape(-1),
            weights_BT.reshape(-1),
            softcap=cap,
        ).loss_sum

    total = 0.0
    for rows in _batches(documents, length, batch_size):
        total += float(nats(state, *map(jnp.asarray, rows)))
    first_tokens = len(documents) * math.log2(model.config.vocab_size)
    return total / math.log(2) + first_tokens


def _batches(
    documents: Sequence[np.ndarray], length: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    cut = [
        (d, *window)
        for d, tokens in enumerate(documents)
        for window in windows(len(tokens), length)
    ]
    for begin in range(0, len(cut), batch_size):
        tokens_BT = np.zeros((batch_size, length), np.int32)
        targets_BT = np.zeros((batch_size, length), np.int32)
        weights_BT = np.zeros((batch_size, length), np.float32)
        for row, (d, start, stop, first) in enumerate(cut[begin : begin + batch_size]):
            size = stop - start
            tokens_BT[row, :size] = documents[d][start:stop]
            targets_BT[row, :size] = documents[d][start + 1 : stop + 1]
            weights_BT[row, first - 1 - start : size] = 1.0
        yield tokens_BT, targets_BT, weights_BT


def bits_per_byte(
    model: Decoder, documents: Sequence[np.ndarray], texts: Sequence[bytes], *, length: int
) -> float:
    """`document_bits` over the bytes of the texts that the documents spell."""
    return document_bits(model, documents, length=length) / sum(map(len, texts))
