"""Data workers beside Grain's own: batches/s of an input whose transforms take the time.

Text is split by a regular expression and its words are hashed in Python, a stand-in for a tokenizer
without native code. The same batches are read by the process itself, by data workers
(`--data-workers`) and by Grain's processes (`prefetch.workers`); every reading is checked to be the
same bit for bit. Stored tokens show what asking another process would cost.

What buffers hold is made while processes start and costs nothing later: twice as many batches are
read before the clock runs, and several times as many while it does.

    python benchmarks/data_workers.py [--batches 48] [--rounds 3]
"""

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from _harness import machine, table, versions, write_results
from fornax.config.credentials import Credentials
from fornax.data import DataConfig, Jsonl, Prefetch, Python, open_batches
from fornax.data.remote import DataWorkers, pack_tokens, unpack_tokens

WORD = re.compile(r"\w+|[^\w\s]")
BATCH, LENGTH = 16, 512
BUFFER = 8
RUN = Credentials.make()


def tokenize(record: dict[str, Any]) -> dict[str, Any]:
    """Words to ids by a hash, over and over: some milliseconds a record."""
    ids: list[int] = []
    for turn in range(4):
        ids = [hash_of(word, turn) for word in WORD.findall(record["text"])]
    return {"tokens": np.array(ids, np.int32)}


def hash_of(word: str, turn: int) -> int:
    """A number below 32768."""
    found = turn
    for letter in word:
        found = (found * 31 + ord(letter)) & 0x7FFF
    return found


def settings(folder: Path) -> DataConfig:
    """The input: 2,000 documents of some hundred words."""
    rng = np.random.default_rng(0)
    lines = [
        {"text": " ".join(f"word{n}" for n in rng.integers(0, 5000, rng.integers(100, 500)))}
        for _ in range(2000)
    ]
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataConfig(
        source=Jsonl(path=str(file)),
        transforms=(Python(target="data_workers:tokenize"),),
        prefetch=Prefetch(buffer=BUFFER),
    )


def read(
    config: DataConfig, batches: int, workers: DataWorkers | None = None
) -> tuple[float, float, int]:
    """Seconds of the clock and of this process's processors for some batches, and their digest."""
    digest = 0
    with open_batches(config, batch_size=BATCH, seq_len=LENGTH, workers=workers) as opened:
        for _ in range(2 * BUFFER):  # what was ready before is used up
            next(opened)
        began, used = time.monotonic(), time.process_time()
        for _ in range(batches):
            digest = hash((digest, next(opened)["tokens"].tobytes()))
        return time.monotonic() - began, time.process_time() - used, digest


def transport() -> float:
    """MB/s at which tokens are packed and unpacked, both ways together, of one core."""
    tokens = [np.arange(400, dtype=np.uint16) for _ in range(2048)]
    size = sum(each.nbytes for each in tokens) / 1e6
    times = []
    for _ in range(20):
        began = time.process_time()
        arrays, body = pack_tokens(tokens)
        unpack_tokens(json.loads(json.dumps(arrays)), body)
        times.append(time.process_time() - began)
    return size / statistics.median(times)


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    import socket

    from fornax.config.worker_process import WorkerProcess

    with tempfile.TemporaryDirectory() as name, open(os.devnull, "wb") as log:
        config = settings(Path(name))
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        processes = []
        for listener in listeners:
            process = WorkerProcess(
                "fornax.data.worker:run",
                log=log,
                environment={"PYTHONPATH": str(Path(__file__).parent)},
                inherit=[listener.fileno()],
            )
            process.send({"listener": listener.fileno(), "credentials": RUN.fields()})
            processes.append(process)
        for process in processes:
            process.receive(60)
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in listeners]
        ways: dict[str, tuple[DataConfig, DataWorkers | None]] = {"itself": (config, None)}
        for count in (1, 2):
            ways[f"{count} data workers"] = (
                config,
                DataWorkers(tuple(addresses[:count]), RUN),
            )
        for count in (1, 2):
            ways[f"{count} processes of Grain's"] = (
                replace(config, prefetch=Prefetch(buffer=BUFFER, workers=count)),
                None,
            )
        seen: dict[str, list[tuple[float, float, int]]] = {way: [] for way in ways}
        for _ in range(given.rounds):
            for way, (how, workers) in ways.items():
                seen[way].append(read(how, given.batches, workers))
        for process in processes:
            process.kill()
        for listener in listeners:
            listener.close()
    assert len({digest for found in seen.values() for *_, digest in found}) == 1
    alone = statistics.median(took for took, *_ in seen["itself"])
    rows: list[list[object]] = []
    for way, found in seen.items():
        took = statistics.median(each[0] for each in found)
        used = statistics.median(each[1] for each in found)
        rows.append(
            [
                way,
                f"{given.batches / took:.1f}",
                f"{alone / took:.2f}",
                f"{1000 * used / given.batches:.1f}",
            ]
        )
    text = "\n".join(
        [
            f"# Heavy transforms, {BATCH} rows of {LENGTH} tokens",
            "",
            f"{machine()}; {versions('grain')}; load {os.getloadavg()[0]:.1f}; medians of "
            f"{given.rounds} rounds of {given.batches} batches, after {2 * BUFFER} that are not "
            f"counted; buffers of {BUFFER}.",
            "",
            table(("read by", "batches/s", "ratio", "ms of the host's processor a batch"), rows),
            "",
            f"Tokens are packed and unpacked at {transport():.0f} MB/s of one core.",
            "",
        ]
    )
    print(text)
    write_results("data_workers", text)


if __name__ == "__main__":
    main()
