"""Compiles a grammar in a process that can be killed, to see whether it ends.

llguidance bounds most of its work, but not the intersection of regular expressions: a hundred
characters of Lark with `&`, or a JSON schema's `allOf` of patterns, run for ever, and a thread
cannot be stopped. So each constraint is compiled here first.
"""

import os
import resource
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from fornax.config.worker_process import WorkerProcess, receive, send

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["GrammarProcess", "GrammarTimeout"]

_MEMORY = 8 << 30
"""Bytes of address space that the process may take."""
_NICE = 10
"""How far the process stands back from the engine."""
_MASKS = 6


class GrammarTimeout(Exception):  # noqa: N818 - the caller says what was too long
    """The constraint was not compiled in time."""


class GrammarProcess:
    """One process, made when it is first needed and remade after it was killed.

    Calls come from one thread at a time; `close` may come from another.
    """

    def __init__(self, backend: Tokenizer, vocab_size: int, eos: Sequence[int]):
        self._backend = backend
        self._vocab_size = vocab_size
        self._eos = list(eos)
        self._process: WorkerProcess | None = None

    def run(self, source: str, seconds: float) -> float:
        """Compile the constraint, or fail to, within the time.

        Args:
            source: llguidance's grammar.
            seconds: for the constraint; the process has a minute to start.

        Returns:
            Processor seconds that each of its first tokens takes; 0 if it does not compile.

        Raises:
            GrammarTimeout: it takes longer, or more memory than there is for it.
        """
        try:
            if self._process is None:
                self._process = WorkerProcess("fornax.llm.grammar_process:main")
                setup = {"vocab_size": self._vocab_size, "eos": self._eos}
                self._process.ask({"tokenizer": self._backend.to_str(), **setup}, 60.0)
            return float(self._process.ask(source, seconds))
        except (TimeoutError, EOFError):
            self.close()
            raise GrammarTimeout from None

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()


def main(parent: Connection) -> None:
    """The process: a message with the tokenizer, then one for each constraint."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = receive(parent)
    tokenizer = LLTokenizer(
        setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos"] or None
    )
    limits = LLParserLimits(verbose_errors=False)
    send(parent, "ready")
    while True:
        matcher = LLMatcher(tokenizer, receive(parent), log_level=0, limits=limits)
        send(parent, _mask_seconds(matcher))


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
