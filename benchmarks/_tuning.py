"""What the post-training benchmark gives every contestant: models, files of examples, a gate.

A contestant trains with its own loop, in a thread; the gate stops that loop between two optimizer
steps, so that contestants take turns although none of them hands its loop out.
"""

import json
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

GROUPS, GENERATIONS = 4, 8
"""Prompts of one reinforcement step, and completions of each."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one contestant is asked to do."""

    name: str
    """sft, sft-lora, dpo or grpo."""
    model: str
    """Directory of a Hugging Face model."""
    data: str
    """File of examples."""
    steps: int
    """Optimizer steps of a turn."""
    batch: int = 8
    """Examples, or pairs, of a step."""
    prompt: int = 64
    """Tokens of a prompt, at most."""
    length: int = 256
    """Tokens of an example, at most."""
    new: int = 64
    """Tokens of a sampled completion, at most."""
    threads: int = 2

    def dump(self) -> str:
        """As one argument of a command line."""
        return json.dumps(asdict(self))


def read_job(text: str) -> Job:
    """Read what `Job.dump` wrote."""
    return Job(**json.loads(text))


class Gate:
    """Lets a training loop run `steps` steps for each turn."""

    def __init__(self, steps: int, settle: Callable[[], Any] = lambda: None) -> None:
        self._steps, self._settle = steps, settle
        self._left = 0
        self._started = False
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None

    def step(self) -> None:
        """Called by the training loop before each step; returns when it may continue."""
        if self._left == 0:
            if self._started:
                self._settle()  # nothing of a step may run in another's turn
                self._done.release()
            self._started = True
            self._go.acquire()
            self._left = self._steps
        self._left -= 1

    def turn(self) -> None:
        """Let the steps of a turn run; returns when they are done."""
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def run(self, train: Callable[[], Any]) -> Callable[[], None]:
        """Start a training loop behind the gate; returns the turn."""

        def work() -> None:
            try:
                train()
            except BaseException as error:
                self._error = error
            else:
                self._error = RuntimeError("the training loop ended before the benchmark")
            self._done.release()

        threading.Thread(target=work, daemon=True).start()
        return self.turn


def reward(text: str) -> float:
    """What reinforcement is to raise: the share of the letter e."""
    return text.count("e") / max(len(text), 1)


def write_data(folder: Path, tokenizer: Path, *, count: int, job: Job, seed: int = 0) -> Path:
    """Write the examples of a job, cut from the standard library's source; return the file."""
    rng = np.random.default_rng(seed)
    words = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files[:80])
    ids = words.encode(source).ids

    def piece(shortest: int, longest: int) -> str:
        size = int(rng.integers(shortest, longest))
        start = int(rng.integers(0, len(ids) - size))
        return words.decode(ids[start : start + size])

    # Text is cut shorter than the limits: encoded again it may take a few tokens more.
    longest = (job.length - job.prompt) * 7 // 8
    lines: list[dict[str, str]] = []
    for _ in range(count):
        line = {"prompt": piece(job.prompt // 2, job.prompt * 7 // 8)}
        if job.name.startswith("sft"):
            line["completion"] = piece(16, longest)
        elif job.name == "dpo":
            line |= {"chosen": piece(16, longest), "rejected": piece(16, longest)}
        lines.append(line)
    path = folder / f"{job.name.split('-')[0]}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
