"""One completion on the host: when it ends, its text, its log probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fornax.llm.masks import TokenRules, mask_words
from fornax.llm.outputs import CompletionOutput, Logprob, RequestOutputKind
from fornax.llm.repetition import RepetitionDetector
from fornax.llm.sampler_state import RowParams
from fornax.llm.sampling_params import SamplingParams
from fornax.llm.sequence import Sequence
from fornax.llm.structured import Grammar
from fornax.llm.text.detokenizer import Detokenizer

__all__ = ["Completion", "Ends"]


@dataclass(frozen=True)
class Ends:
    """Tokens that end a completion."""

    eos: frozenset[int]
    """The model's end-of-text tokens."""
    stop: frozenset[int]
    """The request's own stop tokens."""


@dataclass(eq=False, slots=True)
class Completion:
    """What the host keeps of one of a request's completions."""

    index: int
    sequence: Sequence
    params: SamplingParams
    ends: Ends
    seed: int
    vocab_size: int
    detokenizer: Detokenizer | None = None
    grammar: Grammar | None = None
    rules: TokenRules | None = None
    repetition: RepetitionDetector | None = None
    text: str = ""
    num_tokens: int = 0
    versions: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, Logprob]] | None = None
    token_logprobs: list[float] | None = None
    """Of the sampled tokens alone, as plain numbers; None if nobody asks for them."""
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_token_time: float = 0.0
    _sent_text: int = 0
    _sent_tokens: int = 0
    _sent_finish: bool = False

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities of its tokens are wanted, in either form."""
        return self.params.logprobs is not None or self.token_logprobs is not None

    @property
    def may_draft(self) -> bool:
        """Whether tokens may be proposed ahead: nothing about a token depends on those before."""
        return self.grammar is None and self.rules is None and not self.params.penalized

    def row_params(self) -> RowParams:
        """What the device's sampler is told of it."""
        sequence = self.sequence
        return RowParams.make(
            self.params,
            seed=self.seed,
            prompt=sequence.prompt,
            output=sequence.output,
            vocab_size=self.vocab_size,
        )

    def mask(self) -> np.ndarray | None:
        """Tokens that may come next, uint32 [W]; None for all."""
        mask = None
        if self.grammar is not None:
            mask = np.empty(mask_words(self.vocab_size), np.uint32)
            self.grammar.fill(mask)
        if self.rules is not None:
            sequence = self.sequence
            mask = self.rules.apply(sequence.tokens, mask, prompt=sequence.num_prompt)
        return mask

    def take(self, tokens: list[int]) -> list[int]:
        """Read newly sampled tokens; returns those it keeps: none after one that ends it."""
        kept, ending = tokens, None
        for count, token in enumerate(tokens, start=1):
            ending = self._token_ends(token, self.num_tokens + count)
            if ending is not None:
                kept = tokens[:count]
                break
        read = self._detokenize(kept, ending)
        if self.finished:  # by a stop string
            return kept[:read]
        if ending == "stop" and kept[-1] not in self.ends.eos:
            self.stop_reason = kept[-1]
        if ending == "repetition":
            self.stop_reason = "repetition_detected"
        if ending is not None:
            self.finish(ending)
        return kept

    def record(
        self, tokens: list[int], version: int, logprobs: list[Mapping[int, Logprob]] | None
    ) -> None:
        """Count tokens that `take` kept and that are in the sequence now."""
        self.num_tokens += len(tokens)
        self.versions.extend([version] * len(tokens))
        if logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs.extend(logprobs)
            for token, found in zip(tokens, logprobs, strict=True):
                self.cumulative_logprob += found[token].logprob
        if self.grammar is not None:
            for token in tokens:
                self.grammar.advance(token)

    def finish(self, reason: str) -> None:
        """End it from outside."""
        if self.finish_reason is None:
            self.finish_reason = reason
            if self.detokenizer is not None:
                self.text += self.detokenizer.finish()

    def output(self, kind: RequestOutputKind) -> CompletionOutput | None:
        """What a reader of `kind` gets now; None when there is nothing new."""
        delta = kind is RequestOutputKind.DELTA
        if delta and self._nothing_new():
            return None
        if kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        first = self._sent_tokens if delta else 0
        output = CompletionOutput(
            index=self.index,
            text=self.text[self._sent_text if delta else 0 :],
            token_ids=self.sequence.tokens[self.sequence.num_prompt + first :],
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[first:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            versions=self.versions[first:],
            token_logprobs=None if self.token_logprobs is None else self.token_logprobs[first:],
        )
        self._sent_text, self._sent_tokens = len(self.text), self.num_tokens
        self._sent_finish = self.finished
        return output

    def _nothing_new(self) -> bool:
        if self.finished:
            return self._sent_finish
        waited = self.num_tokens - self._sent_tokens
        interval = self.params.stream_interval or 1
        return waited == 0 or (self._sent_tokens > 0 and waited < interval)

    def _detokenize(self, tokens: list[int], ending: str | None) -> int:
        """Add the tokens' text, and end at a stop string; returns how many tokens were read."""
        if self.detokenizer is None:
            return len(tokens)
        if ending == "stop" and not self.params.include_stop_str_in_output:
            tokens = tokens[:-1]  # the text of a stop token is not part of the output
        if not tokens:
            return 0
        pushed = self.detokenizer.push(tokens)
        self.text += pushed.text
        if pushed.stop is not None:
            self.finish_reason, self.stop_reason = "stop", pushed.stop
        return pushed.consumed

    def _token_ends(self, token: int, count: int) -> str | None:
        """How the completion ends with its `count`-th token, None if it goes on."""
        params = self.params
        if count >= params.min_tokens:
            if token in self.ends.eos and not params.ignore_eos:
                return "stop"
            if token in self.ends.stop:
                return "stop"
        if count >= self.sequence.max_len - self.sequence.num_prompt:
            return "length"
        if self.repetition is not None and self.repetition.push(token):
            return "repetition"
        return None
