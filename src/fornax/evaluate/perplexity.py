"""Perplexity and bits per byte of documents, each token predicted once with its left context.

Legend: B windows at a time, T tokens of a window, N documents.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from fornax.config.errors import ConfigError, DataError
from fornax.evaluate.config import EvaluateConfig
from fornax.evaluate.model import EvaluatedModel
from fornax.evaluate.statistics import Estimate, ratio
from fornax.models import Decoder, token_logprobs
from fornax.tune.data import Problems, read_lines

__all__ = ["Perplexity", "measure_perplexity", "read_documents", "windows"]

_CONTEXT = 1024


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """How well a model predicts text."""

    documents: int
    tokens: int
    """Tokens that were predicted."""
    bytes: int
    """Bytes of their text, in UTF-8."""
    loss: Estimate
    """Nats per token."""
    perplexity: Estimate
    bits_per_byte: Estimate


def measure_perplexity(subject: EvaluatedModel, config: EvaluateConfig) -> Perplexity:
    """Score every document of `config.text`.

    A document begins after the token that the tokenizer puts before texts, else after its end
    token, which pretraining puts between documents, else after its BOS. Without any its first token
    is not scored, nor its bytes.

    Raises:
      ConfigError: a context beyond the model's.
      DataError: no documents, or lines that cannot be read.
    """
    context = config.context or min(_CONTEXT, subject.max_positions)
    if context > subject.max_positions:
        raise ConfigError(
            f"context={context} is beyond the {subject.max_positions} positions that "
            f"{subject.name} is made for; lower it"
        )
    stride = config.stride or context // 2
    tokenizer = subject.origin.tokenizer
    own = subject.codec.prompt("").tolist()
    known = [*own[-1:], tokenizer.eos_id, tokenizer.bos_id]
    first = next((token for token in known if token is not None), None)
    sequences, sizes = [], []
    for text in read_documents(config.text, config.column, config.limit):
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        size = len(text.encode(errors="replace"))
        if first is None:
            size -= len(tokenizer.decode(ids[:1]).encode())
        sequences.append(np.array(([] if first is None else [first]) + ids, np.int32))
        sizes.append(size)
    nats = document_nats(subject.decoder, sequences, context, stride, config.batch_size)
    counts = [max(0, len(tokens) - 1) for tokens in sequences]
    if not sum(counts):
        raise DataError(f"{', '.join(config.text)}: no document has a token that can be predicted")
    more = {"confidence": config.confidence, "seed": config.seed}
    loss = ratio(nats, counts, **more)
    bits = ratio(np.asarray(nats) / math.log(2), sizes, **more)
    return Perplexity(
        documents=len(sequences),
        tokens=sum(counts),
        bytes=sum(sizes),
        loss=loss,
        perplexity=Estimate(*(math.exp(min(x, 700.0)) for x in (loss.value, loss.low, loss.high))),
        bits_per_byte=bits,
    )


def read_documents(paths: Sequence[str], column: str, limit: int | None) -> Iterator[str]:
    """The texts of files: a plain file is one, each line of a JSON lines file has one.

    Raises:
      DataError: a file that cannot be read, or a line without the column.
    """
    count = 0
    for path in paths:
        for text in _texts(path, column):
            if limit is not None and count == limit:
                return
            count += 1
            yield text


def _texts(path: str, column: str) -> Iterator[str]:
    if not path.endswith((".jsonl", ".ndjson", ".json", ".gz", ".parquet")):
        try:
            yield Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path} cannot be read as text: {error}; name text or .jsonl files"
            ) from error
        return
    problems = Problems()
    for line in read_lines(path, problems):
        text = line.fields.get(column)
        if isinstance(text, str):
            yield text
        else:
            has = ", ".join(line.fields) or "none"
            raise DataError(
                f"{line.where}: there is no text in the column {column}; it has {has}: name one "
                "with --column"
            )
    problems.check()


def windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """The windows of a sequence: (start, end, first): predictions from `first` to `end` are new.

    Tokens are numbered from 0; token i is predicted by those before it, so the first never is.
    """
    scored, end = 1, 0
    while scored < length:
        end = min(length, context if not end else end + stride)
        yield max(0, end - context), end, scored
        scored = end


def document_nats(
    decoder: Decoder, sequences: Sequence[np.ndarray], context: int, stride: int, batch: int
) -> list[float]:
    """Negative log-likelihood of each sequence after its first token, in nats, float64 sums."""
    longest = max((len(tokens) for tokens in sequences), default=0)
    width = min(context, 1 << max(4, (longest - 1).bit_length()))
    pieces = [
        (number, start, end, first)
        for number, tokens in enumerate(sequences)
        for start, end, first in windows(len(tokens), context, stride)
    ]
    graphdef, state = nnx.split(decoder)

    @jax.jit
    def score(state: Any, tokens_BT: jax.Array, targets_BT: jax.Array, segments_BT: jax.Array):
        model = nnx.merge(graphdef, state)
        return token_logprobs(model, tokens_BT, targets_BT, segment_ids_BT=segments_BT).logprobs

    nats = np.zeros(len(sequences))
    for at in range(0, len(pieces), batch):
        group = pieces[at : at + batch]
        tokens_BT = np.zeros((batch, width), np.int32)
        targets_BT = np.full((batch, width), -1, np.int32)
        segments_BT = np.zeros((batch, width), np.int32)
        for row, (number, start, end, first) in enumerate(group):
            tokens = sequences[number][start:end]
            tokens_BT[row, : len(tokens)] = tokens
            segments_BT[row, : len(tokens)] = 1
            targets_BT[row, first - start - 1 : end - start - 1] = tokens[first - start :]
        found_BT = np.asarray(score(state, tokens_BT, targets_BT, segments_BT), np.float64)
        for row, (number, *_) in enumerate(group):
            nats[number] -= found_BT[row][targets_BT[row] >= 0].sum()
    return nats.tolist()
