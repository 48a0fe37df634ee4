"""Compiling a constraint in a process that can be killed, to see whether it ends.

llguidance bounds most of its work, but not the intersection of regular expressions: a hundred
characters of Lark with `&`, or a JSON schema's `allOf` of patterns, run for ever, and a thread
cannot be stopped. So each constraint is compiled here first.
"""

import contextlib
import json
import os
import queue
import resource
import statistics
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["GrammarTrial", "TrialTooLong"]

_MEMORY = 8 << 30
"""Bytes of address space that the process may take."""
_NICE = 10
"""How far the process stands back from the engine."""
_MASKS = 6


class TrialTooLong(Exception):  # noqa: N818 - the caller says what was too long
    """The constraint was not compiled in time."""


class GrammarTrial:
    """One process, made when it is first needed and anew after it was killed.

    Calls come from one thread at a time; `close` may come from another.
    """

    def __init__(self, backend: Tokenizer, vocab_size: int, eos: Sequence[int]):
        self._backend = backend
        self._vocab_size = vocab_size
        self._eos = list(eos)
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run(self, source: str, seconds: float) -> float:
        """Compile the constraint, or fail to, within the time.

        Args:
            source: llguidance's grammar.
            seconds: for the constraint; the process has a minute to start.

        Returns:
            Processor seconds that each of its first tokens takes; 0 if it does not compile.

        Raises:
            TrialTooLong: it takes longer, or more memory than there is for it.
        """
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        return float(self._ask(process, source, seconds))

    def close(self) -> None:
        """End the process."""
        if self._end is not None:
            self._end()

    def _start(self) -> "subprocess.Popen[str]":
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "fornax.llm.grammar_trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._end = weakref.finalize(self, _kill, process)
        self._answers = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process, self._answers), daemon=True).start()
        setup = {"vocab_size": self._vocab_size, "eos": self._eos}
        self._ask(process, {"tokenizer": self._backend.to_str(), **setup}, 60.0)
        return process

    def _ask(self, process: "subprocess.Popen[str]", message: Any, seconds: float) -> str:
        assert process.stdin is not None, "it was started with a pipe"
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            answer = self._answers.get(timeout=seconds)
        except (OSError, queue.Empty):
            answer = ""
        if not answer:
            self.close()
            raise TrialTooLong
        return answer


def _kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None, "it was started with a pipe"
    with contextlib.suppress(OSError):  # what it did not read is lost
        process.stdin.close()


def _read(process: "subprocess.Popen[str]", answers: "queue.SimpleQueue[str]") -> None:
    """Hand on lines; an empty one at the end."""
    assert process.stdout is not None, "it was started with a pipe"
    with process.stdout as lines:
        for line in lines:
            answers.put(line)
    answers.put("")


def _serve() -> None:
    """The process: a line with the tokenizer, then a line for each constraint."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(
        setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos"] or None
    )
    limits = LLParserLimits(verbose_errors=False)
    _say("ready")
    for line in sys.stdin:
        _bound_time()
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
        _say(str(_mask_seconds(matcher)))


def _mask_seconds(matcher: "LLMatcher") -> float:
    """Processor seconds that a mask takes, the median of some; the first one prepares others."""
    times = []
    for _ in range(_MASKS):
        begin = time.thread_time()
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        times.append(time.thread_time() - begin)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if matcher.is_error() or not len(allowed) or matcher.is_stopped():
            break
        matcher.try_consume_tokens([int(allowed[len(allowed) // 2])])
    return statistics.median(times[1:] or [0.0])


def _bound_time() -> None:
    """End a minute of processor time from now, should nobody be left to end this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soon = int(used.ru_utime + used.ru_stime) + 60
    resource.setrlimit(resource.RLIMIT_CPU, (soon, resource.RLIM_INFINITY))


def _say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve()
