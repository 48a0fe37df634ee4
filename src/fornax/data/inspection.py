"""`inspect`: what a dataset or a raw source holds, and how well it would pack."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fornax.config.errors import DataError
from fornax.data.config import DataConfig, Prefetch
from fornax.data.files import Storage
from fornax.data.manifest import FILE
from fornax.data.packing import Document, Packing, Position
from fornax.data.pipeline import Pipeline, open_pipeline
from fornax.data.sources import Dataset
from fornax.data.texts import dataset_tokenizer
from fornax.data.tokenizer import Tokenizer, load_tokenizer
from fornax.data.transforms import Tokenize

_SAMPLE_CHARACTERS = 200
_BINS = 12


@dataclass(frozen=True)
class Bin:
    """Records with `low` to `high` tokens, both included."""

    low: int
    high: int
    records: int


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found in one split."""

    split: str
    records: int
    """Records before any transform."""
    documents: int
    """Documents after the transforms."""
    tokens: int
    shortest: int
    median: float
    longest: int
    histogram: tuple[Bin, ...]
    """Documents by length, in powers of two."""
    rows: int
    """Rows of one epoch under the packing."""
    fill_rate: float
    """Share of the rows' places that hold a token."""
    cut_documents: int
    """Documents that the packing spreads over several rows."""
    dropped_tokens: int
    """Tokens that the packing leaves out."""
    samples: tuple[str, ...]
    """The first records: their text where a tokenizer is known, else their token ids."""


def inspect(
    target: str | Path | DataConfig,
    *,
    split: str = "train",
    seq_len: int = 1024,
    packing: Packing | None = None,
    samples: int = 3,
) -> Inspection:
    """Read one split once and describe it.

    Args:
        target: the folder of a built dataset, or a pipeline's configuration.
        split: the split to read.
        seq_len: tokens of a row for the fill rate.
        packing: the packing for the fill rate; none: the configuration's.
        samples: records to show.

    Raises:
        DataError: the dataset, the split, a record or a field is missing or damaged.
    """
    if not isinstance(target, DataConfig):
        if not Storage().exists(Storage().join(target, FILE)):
            raise DataError(f"{target} is not a finished dataset: it has no {FILE}")
        target = DataConfig(source=Dataset(path=str(target)))
    config = replace(
        target,
        packing=packing or target.packing,
        virtual_shards=1,
        epochs=1,
        shuffle=False,
        prefetch=Prefetch(buffer=0),
    )
    pipeline = open_pipeline(config, batch_size=1, seq_len=seq_len, split=split)
    lengths, firsts = _read(pipeline, samples)
    if not len(lengths):
        raise DataError(f"the {split} split has no documents: every record was dropped")
    packed = _packed(pipeline, lengths)
    tokenizer = _tokenizer(config)
    return Inspection(
        split=split,
        records=sum(len(part) for part in pipeline.parts),
        documents=len(lengths),
        tokens=int(lengths.sum()),
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        longest=int(lengths.max()),
        histogram=histogram(lengths),
        rows=packed.rows,
        fill_rate=packed.tokens / (packed.rows * seq_len) if packed.rows else 0.0,
        cut_documents=packed.cut,
        dropped_tokens=int(lengths.sum()) - packed.tokens,
        samples=tuple(_shown(tokens, tokenizer) for tokens in firsts),
    )


def _read(pipeline: Pipeline, samples: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Length of every document, int64 `[documents]`, and the first documents' tokens."""
    lengths: list[int] = []
    firsts: list[np.ndarray] = []
    for document in pipeline.stream(0).read_from(0):
        lengths.append(len(document.tokens))
        if len(firsts) < samples:
            firsts.append(document.tokens)
    return np.asarray(lengths, np.int64), firsts


def histogram(lengths: np.ndarray) -> tuple[Bin, ...]:
    """Documents by length in powers of two, from the shortest to the longest."""
    exponents = np.maximum(np.ceil(np.log2(np.maximum(lengths, 1))), 0).astype(int)
    low = max(int(exponents.min()), int(exponents.max()) - _BINS + 1)
    bins = []
    for exponent in range(low, int(exponents.max()) + 1):
        first = exponent == low
        chosen = exponents <= exponent if first else exponents == exponent
        start = 0 if first else (1 << (exponent - 1)) + 1
        bins.append(Bin(start, 1 << exponent, int(chosen.sum())))
    return tuple(bins)


@dataclass(frozen=True)
class _Packed:
    rows: int
    tokens: int
    cut: int


def _packed(pipeline: Pipeline, lengths: np.ndarray) -> _Packed:
    """Pack documents of these lengths; their tokens are never read again."""
    documents = _Lengths(lengths)
    packer = pipeline.config.packing.packer(documents, pipeline.seq_len, Position(), seed=0)
    rows = tokens = 0
    pieces = np.zeros(len(lengths), np.int64)
    for row in packer:
        rows += 1
        for segment in row:
            tokens += segment.length
            pieces[documents.number(segment.tokens)] += 1
    return _Packed(rows, tokens, int((pieces > 1).sum()))


class _Lengths:
    """Documents of given lengths without their tokens: views of one array of zeros."""

    def __init__(self, lengths: np.ndarray):
        zeros = np.zeros(int(lengths.max()), np.uint8)
        self._documents = [Document(i, zeros[:n]) for i, n in enumerate(lengths.tolist())]
        self._numbers = {id(document.tokens): document.position for document in self._documents}

    @property
    def full_pass(self) -> int:
        return len(self._documents)

    def read_from(self, position: int) -> Iterator[Document]:
        return iter(self._documents[position:])

    def number(self, tokens: np.ndarray) -> int:
        return self._numbers[id(tokens)]


def _tokenizer(config: DataConfig) -> Tokenizer | None:
    """The tokenizer that the dataset or the pipeline carries."""
    if isinstance(config.source, Dataset):
        storage = config.storage()
        return dataset_tokenizer(config.source.path, storage)
    paths = [t.tokenizer for t in config.transforms if isinstance(t, Tokenize)]
    return load_tokenizer(paths[-1]) if paths else None


def _shown(tokens: np.ndarray, tokenizer: Tokenizer | None) -> str:
    head = tokens[:_SAMPLE_CHARACTERS]
    if tokenizer is None:
        return " ".join(str(int(token)) for token in head[:40])
    return tokenizer.decode(head, special=True)[:_SAMPLE_CHARACTERS]
