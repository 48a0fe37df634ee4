"""The texts of a built dataset, decoded: for scoring beside compressors, and for looking at."""

from collections.abc import Iterator
from pathlib import Path

from fornax.data.files import Storage
from fornax.data.manifest import read_manifest
from fornax.data.sources.dataset import Dataset
from fornax.data.tokenizer import Tokenizer, load_backend

_READ = 256


def dataset_tokenizer(path: str | Path, storage: Storage | None = None) -> Tokenizer | None:
    """The tokenizer of a built dataset, or None when it stores text."""
    storage = storage or Storage()
    manifest = read_manifest(path, storage)
    if manifest.tokenizer is None:
        return None
    folder = storage.join(path, manifest.tokenizer)
    backend = load_backend(storage.local(storage.join(folder, "tokenizer.json")))
    return Tokenizer(
        backend, eos_id=manifest.eos_id, bos_id=manifest.bos_id, pad_id=manifest.pad_id
    )


def read_texts(path: str | Path, split: str, storage: Storage | None = None) -> Iterator[str]:
    """The text of every record of a split, in stored order, without special tokens.

    Raises `DataError` for a dataset or a split that is not there.
    """
    storage = storage or Storage()
    source = Dataset(path=str(path)).open(storage, split)
    tokenizer = dataset_tokenizer(path, storage)
    for start in range(0, len(source), _READ):
        indices = list(range(start, min(start + _READ, len(source))))
        for record in source.__getitems__(indices):
            yield record["text"] if tokenizer is None else tokenizer.decode(record["tokens"])
