"""Constraints on generated text: JSON schemas, regular expressions, choices, grammars.

llguidance compiles them and says which tokens may come next.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitedTooLong
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from fornax.config.errors import EngineError
from fornax.llm.constraints import constraint_key, constraint_source
from fornax.llm.grammar_trial import GrammarTrial, TrialTooLong
from fornax.llm.masks import ALL
from fornax.llm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["SECONDS", "Grammar", "GrammarCompiler", "too_slow"]

SECONDS = 10.0
"""How long a request waits for its grammar, at most."""
_MASK_SECONDS = 3e-3
"""Processor time that one token's mask may take of the engine, and so of all who are served."""


class Grammar:
    """What a sequence's tokens must spell, and how far it got.

    `starts_after` are tokens, the end of reasoning, up to which everything is allowed.
    """

    def __init__(self, matcher: "LLMatcher", eos: Sequence[int], starts_after: Sequence[int] = ()):
        self._matcher = matcher
        self._eos = frozenset(eos)
        self._starts_after = tuple(starts_after)
        self._free: list[int] = []
        self._started = not self._starts_after
        self._matched = 0
        self._after_end = 0

    @property
    def finished(self) -> bool:
        """Whether only the end-of-text token may come."""
        return self._started and self._matcher.is_stopped()

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return not self._started or self._matcher.is_accepting()

    def copy(self) -> "Grammar":
        """Another one, just as far."""
        other = Grammar(self._matcher.deep_copy(), tuple(self._eos), self._starts_after)
        other._free, other._started = list(self._free), self._started
        other._matched, other._after_end = self._matched, self._after_end
        return other

    def fill(self, row_W: np.ndarray) -> None:
        """Write which tokens may come next: one bit each, uint32 `[W]`, lowest bit first.

        Raises `EngineError` when the constraint became too complex to follow.
        """
        if not self._started:
            row_W[:] = ALL
            return
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check()
        width = min(len(allowed), len(row_W))
        row_W[:width] = allowed[:width]
        row_W[width:] = 0

    def advance(self, token: int) -> bool:
        """Take a token; False, and nothing taken, when it is not allowed."""
        if not self._started:
            self._free.append(token)
            self._started = self._ends_free_text()
            return True
        if self._matched and self._matcher.is_stopped() and token in self._eos:
            self._after_end += 1  # ignore_eos: one more end of text
            return True
        taken = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        self._matched += taken
        return taken

    def rollback(self, count: int) -> None:
        """Give the last tokens back."""
        ended = min(count, self._after_end)
        self._after_end -= ended
        matched = min(count - ended, self._matched)
        if matched and not self._matcher.rollback(matched):
            self._check()
        self._matched -= matched
        free = count - ended - matched
        if free:
            del self._free[len(self._free) - free :]
            self._started = self._ends_free_text()

    def _ends_free_text(self) -> bool:
        size = len(self._starts_after)
        return tuple(self._free[len(self._free) - size :]) == self._starts_after

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(
                f"structured output cannot go on ({_first_line(self._matcher.get_error())}): "
                "simplify the constraint"
            )


class GrammarCompiler:
    """Makes grammars for one tokenizer, in a thread of its own, and remembers them.

    `vocab_size` is the number of logits; `eos` are the ids that may end a text. A constraint of
    more than `max_characters`, or that takes longer than `seconds`, is refused.
    """

    def __init__(
        self,
        backend: Tokenizer,
        vocab_size: int,
        eos: Sequence[int],
        *,
        seconds: float = SECONDS,
        max_characters: int = 1 << 20,
        remembered: int = 128,
    ):
        self._backend = backend
        self._vocab_size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        self._eos = tuple(eos)
        self._seconds = seconds
        self._max_characters = max_characters
        self._remembered = remembered
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._made: OrderedDict[str, LLMatcher] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._trial = GrammarTrial(backend, self._vocab_size, self._eos)

    def compile(
        self, params: StructuredOutputsParams, *, starts_after: Sequence[int] = ()
    ) -> Grammar:
        """A grammar at its start; waits for it.

        Raises `EngineError` for a constraint that is invalid, impossible, or too large.
        """
        made = self.submit(params, starts_after=starts_after)
        try:
            return made.result(self._seconds)
        except WaitedTooLong:
            made.cancel()
            raise too_slow(self._seconds) from None

    def submit(
        self, params: StructuredOutputsParams, *, starts_after: Sequence[int] = ()
    ) -> Future[Grammar]:
        """The same without waiting; the future raises what `compile` raises but for the time."""
        key = constraint_key(params)
        if len(key) > self._max_characters:
            raise EngineError(
                f"structured_outputs has {len(key)} characters; at most {self._max_characters}"
            )
        made = self._recall(key)
        if made is None:
            return self._pool.submit(self._make, key, params, starts_after)
        ready: Future[Grammar] = Future()
        ready.set_result(Grammar(made.deep_copy(), self._eos, starts_after))
        return ready

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._trial.close()

    def _recall(self, key: str) -> "LLMatcher | None":
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
            return self._made.get(key)

    def _make(
        self, key: str, params: StructuredOutputsParams, starts_after: Sequence[int]
    ) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        made = self._recall(key)
        if made is None:
            source = constraint_source(params, self._backend)
            self._try(source)
            limits = LLParserLimits(verbose_errors=False)
            made = LLMatcher(self._llguidance(), source, log_level=0, limits=limits)
            made.compute_bitmask()  # the first one prepares others, which copies share
            if made.is_error():
                raise EngineError(
                    f"structured_outputs cannot be followed ({_first_line(made.get_error())}): "
                    "change the constraint"
                )
            with self._lock:
                self._made[key] = made
                while len(self._made) > self._remembered:
                    self._made.popitem(last=False)
        return Grammar(made.deep_copy(), self._eos, starts_after)

    def _try(self, source: str) -> None:
        """Compile it where it can be stopped. Raises `EngineError` when it was."""
        self._llguidance()  # first: what is wrong with the tokenizer is an error of its own
        try:
            each = self._trial.run(source, self._seconds / 2)
        except TrialTooLong:
            raise too_slow(self._seconds / 2) from None
        if each > _MASK_SECONDS:
            raise EngineError(
                f"structured_outputs takes {1e3 * each:.1f} ms of each token to follow, at most "
                f"{1e3 * _MASK_SECONDS:g} are taken: shorten its longest texts and patterns"
            )

    def _llguidance(self) -> "LLTokenizer":
        """llguidance's view of the vocabulary; made once, about a second for a large one."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(
                        self._backend.to_str(),
                        n_vocab=self._vocab_size,
                        eos_token=list(self._eos) or None,
                    )
                except ValueError as error:
                    raise EngineError(
                        f"structured output does not work with this tokenizer ({error})"
                    ) from error
            return self._tokenizer


def too_slow(seconds: float) -> EngineError:
    """What a request is told whose grammar was not compiled in time."""
    return EngineError(f"structured_outputs takes more than {seconds:g} s to compile: simplify it")


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0] if message.strip() else "no reason given"
