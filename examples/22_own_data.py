"""Feed Fornax your own data: a source class, a transform function, a mixture, an exact resume.

python examples/22_own_data.py
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from fornax.data import (
    BuildConfig,
    DataConfig,
    Dataset,
    FirstFit,
    Mixture,
    Part,
    Python,
    PythonSource,
    Tokenize,
    TrainBpe,
    build,
    inspect,
    open_batches,
)

# `target` is an import path. A module of yours would be `my_package.my_module:Sums`.
sys.modules["own_data"] = sys.modules[__name__]


class Sums:
    """A source: anything with a length and random access."""

    def __init__(self, count: int, largest: int):
        self.count, self.largest = count, largest

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, str]:
        a, b = np.random.default_rng(index).integers(0, self.largest, 2)
        return {"text": f"{a} + {b} = {a + b}\n"}


def no_zero(record: dict[str, str]) -> bool:
    """A filter: True keeps the record."""
    return not record["text"].startswith("0 ")


def in_words(record: dict[str, str], rng: np.random.Generator) -> dict[str, str]:
    """A map that draws: `rng` is the record's own, so that every run repeats it."""
    word = ("plus", "and")[rng.integers(2)]
    return {**record, "text": record["text"].replace("+", word)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sums = PythonSource(target="own_data:Sums", arguments={"count": 2000, "largest": 50})
        built = build(
            BuildConfig(
                source=sums,
                output=Path(folder) / "sums",
                transforms=(Python(target="own_data:no_zero"),),
                tokenizer=TrainBpe(vocab_size=300),
                holdout=0.05,
            )
        )
        print(f"built: {built.manifest.splits['train'].records} records, {built.manifest.dropped}")

        tokenize = Tokenize(tokenizer=built.path / "tokenizer")
        words = (Python(target="own_data:in_words"), tokenize)
        config = DataConfig(
            source=Mixture(
                parts=(
                    Part(name="digits", source=Dataset(path=str(built.path)), weight=3.0),
                    Part(name="words", source=sums, weight=1.0, transforms=words),
                )
            ),
            packing=FirstFit(bins=16),
        )
        found = inspect(config, seq_len=64)
        print(f"{found.tokens:,} tokens in {found.rows:,} rows of 64, {found.fill_rate:.1%} full")

        with open_batches(config, batch_size=16, seq_len=64) as batches:
            for _ in range(5):
                next(batches)
            state = batches.state()
            expected = next(batches)

        # Continue from the saved position, as two hosts where one host saved it.
        halves = []
        for host in range(2):
            with open_batches(
                config, batch_size=16, seq_len=64, process_index=host, process_count=2
            ) as batches:
                batches.restore(state)
                halves.append(next(batches)["tokens"])
        assert np.array_equal(np.concatenate(halves), expected["tokens"])
        print("two hosts continued where one stopped: same batch")
