"""Rows of tokens from texts: some to calibrate with, others held out.

Legend: N rows, T tokens of a row.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.data import Jsonl, Tokenizer, load_tokenizer
from fornax.data.files import Storage

__all__ = ["Rows", "read_rows"]

_HELD_OUT = 16
"""Rows held out, and as many to choose by, at most; fewer where there are less than eight times as
many in all."""
_NUMBERS = {1: "one", 2: "two", 3: "three"}


@dataclass(frozen=True)
class Rows:
    """Tokens of texts, cut into rows."""

    calibration_NT: np.ndarray
    """int32."""
    choice_NT: np.ndarray
    """int32, of later texts: to choose between schemes; none unless asked for."""
    held_out_NT: np.ndarray
    """int32, of later texts still."""
    sha256: str
    """Of the texts that the rows are of."""


def read_rows(
    folder: Path,
    data: str,
    *,
    samples: int,
    length: int,
    seed: int,
    vocab_size: int,
    choice: bool = False,
) -> Rows:
    """Rows from the column `text` of JSON lines, the texts drawn in an order that the seed gives.

    Texts lie one after another, the tokenizer's end token between them where it has one.

    Args:
      folder: of the tokenizer.
      data: files of JSON lines.
      samples: rows to calibrate with, at most.
      length: T.
      seed: of the order.
      vocab_size: of the model.
      choice: whether some rows are to choose by.

    Raises:
      ConfigError: a tokenizer with more ids than the model, or sizes that cannot be.
      DataError: no tokenizer, lines without a text, or less than two rows of tokens, three with
        `choice`.
    """
    if samples < 1 or length < 2:
        raise ConfigError(f"samples={samples}, length={length}: at least 1 row of 2 tokens")
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} ids and the model {vocab_size}; "
            "give the directory the model's own"
        )
    parts = 3 if choice else 2
    ids, sha256 = _tokens(tokenizer, data, (samples + (parts - 1) * _HELD_OUT) * length, seed)
    rows_NT = ids[: len(ids) // length * length].reshape(-1, length)
    if len(rows_NT) < parts:
        raise DataError(
            f"{data} has {len(ids)} tokens, and calibration needs {_NUMBERS[parts]} rows of "
            f"{length} at least, {_NUMBERS[parts - 1]} of them held out: give more text, or "
            "shorter rows with --length"
        )
    held_out = max(1, min(_HELD_OUT, len(rows_NT) // 8))
    end = len(rows_NT) - held_out
    rest = end - held_out if choice else end
    return Rows(rows_NT[: min(rest, samples)], rows_NT[rest:end], rows_NT[end:], sha256)


def _tokens(tokenizer: Tokenizer, data: str, most: int, seed: int) -> tuple[np.ndarray, str]:
    source = Jsonl(path=data).open(Storage())
    digest, pieces, count = hashlib.sha256(), [], 0
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    for index in np.random.default_rng(seed).permutation(len(source)):
        record = source[int(index)]
        text = record.get("text")
        if not isinstance(text, str):
            has = ", ".join(record) or "nothing"
            raise DataError(f"{source.locate(int(index))} has no column text; it has {has}")
        digest.update(text.encode(errors="surrogatepass") + b"\0")
        pieces.append(np.array([*tokenizer.encode(text), *end], np.int32))
        count += len(pieces[-1])
        if count >= most:
            break
    ids = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
    return ids[:most], digest.hexdigest()
