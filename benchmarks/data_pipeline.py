"""Packed tokens per second: Fornax, plain Grain, torch DataLoader and Hugging Face datasets.

All read the same documents of uint16 tokens, shuffled and without end, and give batches of packed
rows. Fornax, Grain and torch read the same ArrayRecord shards; Hugging Face, which cannot, gets the
same documents as a memory-mapped Arrow dataset. Every peer is vectorised with NumPy and, where it
helps, tried with and without workers. Rounds are interleaved; the table shows medians.

    python benchmarks/data_pipeline.py [--seconds 1.5] [--rounds 5] [--documents 40000]

Peers that are not installed are named and left out; the oracle environment (`make parity`) has all.
"""

import argparse
import datetime
import importlib.util
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags
from grain.experimental import (
    ConcatThenSplitIterDataset,
    FirstFitPackIterDataset,
    ThreadPrefetchIterDataset,
)

from fornax.data import (
    ArrayRecord,
    ConcatThenSplit,
    DataConfig,
    FirstFit,
    Packing,
    Prefetch,
    open_batches,
)
from fornax.data.sources.array_record import open_writer

Tokens = Generator[np.ndarray, None, None]
"""Endless `tokens` arrays; closing it stops its threads and workers."""

Rates = dict[str, list[tuple[float, float]]]
"""By peer, tokens per second and tokens a CPU second of each round."""

BATCH, SEQ_LEN, SHARDS, BINS = 8, 1024, 4, 64


@dataclass(frozen=True)
class Peer:
    """A way to make batches: its name, what it gives, and how to start endless `tokens` arrays."""

    name: str
    gives: str
    start: Callable[[], Tokens]


def write_documents(root: Path, count: int) -> list[np.ndarray]:
    """`count` documents of log-normal length (mean about 490 tokens), in `SHARDS` files."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5.7, 1.0, count).clip(2, 20_000).astype(int)
    documents = [rng.integers(1, 32_000, n).astype("<u2") for n in lengths]
    for shard in range(SHARDS):
        writer = open_writer(root / f"docs-{shard}.array_record", compression=False)
        for document in documents[shard::SHARDS]:
            writer.write(document.tobytes())
        writer.close()
    return documents


def paths_of(root: Path) -> list[str]:
    """The ArrayRecord shards."""
    return [str(root / f"docs-{shard}.array_record") for shard in range(SHARDS)]


def fornax_peer(root: Path, packing: Packing, prefetch: Prefetch) -> Tokens:
    """Fornax as a user configures it."""
    source = ArrayRecord(path=tuple(paths_of(root)), content="uint16")
    config = DataConfig(source=source, packing=packing, prefetch=prefetch)
    batches = open_batches(config, batch_size=BATCH, seq_len=SEQ_LEN)
    try:
        for batch in batches:
            yield batch["tokens"]
    finally:
        batches.close()


def grain_peer(root: Path, first_fit: bool, workers: int) -> Tokens:
    """Grain's own operations in the order its tutorials give them."""
    source = grain.sources.ArrayRecordDataSource(paths_of(root))
    records = grain.MapDataset.source(source).seed(0).shuffle().repeat()
    decoded = records.map(lambda data: {"tokens": np.frombuffer(data, "<u2").astype(np.int32)})
    rows = decoded.to_iter_dataset(grain.ReadOptions(num_threads=16, prefetch_buffer_size=500))
    lengths = {"tokens": SEQ_LEN}
    if first_fit:
        cut = rows.map(lambda record: {"tokens": record["tokens"][:SEQ_LEN]})
        packed = FirstFitPackIterDataset(cut, length_struct=lengths, num_packing_bins=BINS)
    else:
        packed = ConcatThenSplitIterDataset(rows, length_struct=lengths)
    batches = packed.batch(BATCH, drop_remainder=True)
    if workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    else:
        batches = ThreadPrefetchIterDataset(batches, prefetch_buffer_size=4)
    iterator = iter(batches)
    try:
        for batch in iterator:
            yield batch["tokens"]
    finally:
        iterator.close()


def pack_numpy(documents: list[np.ndarray], left: np.ndarray) -> tuple[Any, np.ndarray]:
    """Concat-then-split: rows, their segment ids and positions `[n, T]`, and the tokens left."""
    flat = np.concatenate([left, *documents]).astype(np.int32)
    lengths = np.array([len(left), *map(len, documents)])
    starts = np.cumsum(lengths) - lengths
    segments = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
    positions = np.arange(len(flat), dtype=np.int32) - np.repeat(starts.astype(np.int32), lengths)
    rows = len(flat) // SEQ_LEN
    end = rows * SEQ_LEN
    arrays = (a[:end].reshape(rows, SEQ_LEN) for a in (flat, segments, positions))
    return tuple(arrays), flat[end:]


class TorchDocuments:
    """A map-style dataset that reads a list of documents at once."""

    def __init__(self, root: Path):
        self._paths = paths_of(root)
        self._source: Any = None
        self._length = len(grain.sources.ArrayRecordDataSource(self._paths))

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> list[np.ndarray]:
        if self._source is None:
            self._source = grain.sources.ArrayRecordDataSource(self._paths)
        return [np.frombuffer(data, "<u2") for data in self._source.__getitems__(indices)]

    def __getitem__(self, index: int) -> np.ndarray:
        return self.__getitems__([index])[0]


def torch_collate(documents: list[np.ndarray]) -> Any:
    """Packs a list of documents into rows in the worker; what does not fill a row is left out."""
    import torch

    arrays, _ = pack_numpy(documents, np.empty(0, np.int32))
    return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]


def torch_peer(root: Path, workers: int) -> Tokens:
    """A DataLoader whose workers read and pack 256 documents at a time."""
    import torch

    loader = torch.utils.data.DataLoader(
        TorchDocuments(root),
        batch_size=256,
        shuffle=True,
        num_workers=workers,
        collate_fn=torch_collate,
        generator=torch.Generator().manual_seed(0),
        persistent_workers=workers > 0,
    )
    while True:
        for tokens, segments, positions in loader:
            for start in range(0, len(tokens) - BATCH + 1, BATCH):
                batch = [a[start : start + BATCH] for a in (tokens, segments, positions)]
                yield batch[0].numpy()


def hugging_face_peer(dataset: Any) -> Tokens:
    """A streamed dataset: buffer shuffle, a batched map that packs, batches of rows."""

    def pack(columns: dict[str, Any]) -> dict[str, Any]:
        (tokens, segments, positions), _ = pack_numpy(
            list(columns["tokens"]), np.empty(0, np.int32)
        )
        return {"tokens": tokens, "segment_ids": segments, "positions": positions}

    streamed = dataset.to_iterable_dataset().with_format("numpy")
    packed = streamed.shuffle(seed=0, buffer_size=1000).map(
        pack, batched=True, batch_size=256, remove_columns=["tokens"]
    )
    while True:
        for batch in packed.iter(batch_size=BATCH, drop_last_batch=True):
            yield batch["tokens"]


def peers_of(root: Path, documents: list[np.ndarray]) -> tuple[list[Peer], list[str]]:
    """The peers that can run here, and the names of those that cannot."""
    five = "tokens, targets, weights, segments, positions"
    three = "tokens, segments, positions"
    missing = []
    thread, processes = Prefetch(), Prefetch(workers=2)
    concat, first = ConcatThenSplit(), FirstFit(bins=BINS)
    peers = [
        Peer("Fornax concat", five, lambda: fornax_peer(root, concat, thread)),
        Peer("Fornax concat, 2 workers", five, lambda: fornax_peer(root, concat, processes)),
        Peer("Fornax first-fit", five, lambda: fornax_peer(root, first, thread)),
        Peer("Grain concat", three, lambda: grain_peer(root, False, 0)),
        Peer("Grain concat, 2 workers", three, lambda: grain_peer(root, False, 2)),
        Peer("Grain first-fit", three, lambda: grain_peer(root, True, 0)),
    ]
    if importlib.util.find_spec("torch"):
        peers += [
            Peer("torch DataLoader", three, lambda: torch_peer(root, 0)),
            Peer("torch DataLoader, 2 workers", three, lambda: torch_peer(root, 2)),
        ]
    else:
        missing.append("torch")
    if importlib.util.find_spec("datasets"):
        import datasets

        datasets.disable_progress_bars()
        made = datasets.Dataset.from_dict({"tokens": [d.astype(np.int32) for d in documents]})
        made.save_to_disk(str(root / "hugging_face"))
        loaded = datasets.load_from_disk(str(root / "hugging_face"))
        peers.append(Peer("Hugging Face datasets", three, lambda: hugging_face_peer(loaded)))
    else:
        missing.append("datasets")
    return peers, missing


def run_for(iterator: Iterator[np.ndarray], seconds: float) -> tuple[float, float]:
    """Tokens per second and a CPU second, padding left out."""
    seen = 0
    began, began_cpu = time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - began) < seconds:
        seen += int(np.count_nonzero(next(iterator)))
    return seen / passed, seen / (time.process_time() - began_cpu)


def measure(iterator: Iterator[np.ndarray], seconds: float) -> tuple[float, float]:
    """`run_for`, after as long to warm up: read-ahead buffers fill and workers start."""
    next(iterator)
    run_for(iterator, seconds)
    return run_for(iterator, seconds)


def main() -> None:
    """Measure, print the table, and write it beside the other results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=40_000)
    arguments = parser.parse_args()
    flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        peers, missing = peers_of(root, write_documents(root, arguments.documents))
        rates: Rates = {peer.name: [] for peer in peers}
        for number in range(arguments.rounds):
            for peer in peers:
                iterator = peer.start()
                rates[peer.name].append(measure(iterator, arguments.seconds))
                iterator.close()
            print(f"round {number + 1} of {arguments.rounds} done", flush=True)
    table = report(peers, rates, missing, arguments)
    print(table)
    date = datetime.date.today().isoformat()
    out = Path(__file__).parent / "results" / f"{date}-cpu-data_pipeline.md"
    out.parent.mkdir(exist_ok=True)
    out.write_text(table)
    print(f"written to {out}")


def report(peers: list[Peer], rates: Rates, missing: list[str], arguments: Any) -> str:
    """The results as Markdown."""
    medians = {name: statistics.median(v for v, _ in values) for name, values in rates.items()}
    ours = medians["Fornax concat"]
    lines = [
        "# Packed tokens per second",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, Grain "
        f"{grain.__version__}; batch {BATCH} x {SEQ_LEN}, {arguments.documents:,} documents of "
        f"log-normal length (mean about 490 tokens), shuffled; medians of {arguments.rounds} "
        f"interleaved rounds of {arguments.seconds} s, each after as long a warm-up. "
        f"Load average at the end: {os.getloadavg()[0]:.1f}. A CPU second counts the "
        "main process and its threads: not measured for peers with workers.",
        "",
        "| peer | gives | million tokens/s | range | per CPU second | Fornax concat / peer |",
        "|---|---|---|---|---|---|",
    ]
    for peer in peers:
        values = [wall / 1e6 for wall, _ in rates[peer.name]]
        cpu = f"{statistics.median(cpu for _, cpu in rates[peer.name]) / 1e6:.2f}"
        cpu = "" if "workers" in peer.name else cpu
        lines.append(
            f"| {peer.name} | {peer.gives} | {medians[peer.name] / 1e6:.2f} | "
            f"{min(values):.2f} to {max(values):.2f} | {cpu} | "
            f"{ours / medians[peer.name]:.2f} |"
        )
    if missing:
        lines += ["", f"Not installed, so not measured: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
