"""How a contestant of the LLM benchmarks talks: one line of JSON in, one line of JSON out.

A contestant is a script run in its own environment, so this file needs nothing but Python:

    started as    peer_NAME.py --model DIRECTORY --precision float32 --threads 2
    it answers    {"ready": {...what it is...}}  or  {"absent": "why it takes no part"}
    it receives   {"do": "prepare", "batch": 8, "prompt": 128, "new": 64}
    it answers    {"prepared": seconds}          memory is allocated, programs are compiled
    it receives   {"do": "turn", "prompts": [[token, ...], ...], "new": 64}
    it answers    {"seconds": [[...], ...], "tokens": [[...], ...]}
    it receives   {"do": "release"}
    it answers    {"released": true}             the cache's memory is given back until "prepare"

`seconds` are counted from the moment the prompts are handed over to the moment each generated token
is known to the caller's Python, one list a row. Decoding is greedy and never stops early.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

FLOATS_AND_INTEGERS = ("float32", "bfloat16", "int8", "int4")
GGUF_FILES = ("Q8_0", "Q4_K_M")
"""Precisions of GGUF files that llama.cpp's quantizer writes, which both serve as they are."""


class AbsentError(Exception):
    """The peer takes no part with this precision; the message says why."""


class Record:
    """Collects the tokens of one turn, each with the time at which it was known."""

    def __init__(self, rows: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.seconds: list[list[float]] = [[] for _ in range(rows)]
        self._start = time.perf_counter()

    def token(self, row: int, token: int) -> None:
        """One row has a new token."""
        self.seconds[row].append(time.perf_counter() - self._start)
        self.tokens[row].append(int(token))

    def step(self, tokens: Sequence[int]) -> None:
        """Every row has a new token."""
        now = time.perf_counter() - self._start
        for row, token in enumerate(tokens):
            self.seconds[row].append(now)
            self.tokens[row].append(int(token))


class Peer(Protocol):
    """An engine with a model loaded."""

    details: dict[str, Any]
    """What it is: versions, the precision of weights and cache, settings that matter."""

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        """Make ready for turns of this shape."""

    def release(self) -> None:
        """Give back the memory that a turn's cache takes."""

    def turn(self, prompts: list[list[int]], new: int, record: Record) -> None:
        """Generate `new` tokens for each prompt, telling `record` of each."""


Load = Callable[[Path, str, int], Peer]
"""(model directory, precision, threads) -> peer; raises AbsentError or ImportError."""


def serve(load: Load) -> None:
    """Be a contestant until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    precisions = (*FLOATS_AND_INTEGERS, *GGUF_FILES)
    parser.add_argument("--precision", choices=precisions, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print goes to standard error
        try:
            peer = load(args.model, args.precision, args.threads)
        except (AbsentError, ImportError) as error:
            _say(answers, {"absent": str(error)})
            return
        _say(answers, {"ready": peer.details})
        for line in sys.stdin:
            _say(answers, _answer(peer, json.loads(line)))


def _answer(peer: Peer, asked: dict[str, Any]) -> dict[str, Any]:
    if asked["do"] == "prepare":
        start = time.perf_counter()
        peer.prepare(asked["batch"], asked["prompt"], asked["new"])
        return {"prepared": time.perf_counter() - start}
    if asked["do"] == "release":
        peer.release()
        return {"released": True}
    record = Record(len(asked["prompts"]))
    peer.turn(asked["prompts"], asked["new"], record)
    return {"seconds": record.seconds, "tokens": record.tokens}


def _say(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def converted(model: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return the model's files in a peer's own format, made by `make` on first use."""
    path = model / "converted" / name
    if not (path / "complete").exists():
        path.mkdir(parents=True, exist_ok=True)
        make(path)
        (path / "complete").touch()
    return path
