"""A request on the host: its completions, when each ends, its text, log probabilities and times."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TypedDict

import jax
import numpy as np

from fornax.llm.outputs import CompletionOutput, Logprob, RequestOutput, RequestOutputKind
from fornax.llm.sampling.masks import TokenRules, mask_words
from fornax.llm.sampling.sampler import Scored
from fornax.llm.sampling.state import RowParams
from fornax.llm.sampling_params import RepetitionDetectionParams, SamplingParams
from fornax.llm.sequence import Sequence
from fornax.llm.stats import RequestStats
from fornax.llm.structured import Grammar
from fornax.llm.text.detokenizer import Detokenizer

__all__ = [
    "Completion",
    "PoolingOptions",
    "PoolingRequest",
    "RepetitionDetector",
    "Request",
    "RequestOptions",
    "TokenText",
    "pick_logprobs",
]


TokenText = Callable[[int], str]
"""The text of one token."""


class PoolingOptions(TypedDict, total=False):
    """Options of a request beside its prompt."""

    lora: str | None
    """Name of a loaded adapter; None: the model alone."""
    priority: int
    """Lower goes first, under `scheduling_policy="priority"`; 0 by default."""
    cache_salt: str | None
    """Only requests of the same salt share pages of the prefix cache."""


class RequestOptions(PoolingOptions, total=False):
    """Options of a request for completions beside its prompt."""

    prompt: str | None
    """The prompt's text, which its outputs give back."""


class RepetitionDetector:
    """Follows one completion; a token takes the same time wherever it stands.

    A stretch is one pattern again and again when it equals itself moved by the pattern, so for
    each size of pattern it is enough to count for how many tokens that has been so.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._sizes = np.arange(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
        self._needed = self._sizes * (max(params.min_count, 1) - 1)
        self._counts = np.zeros(len(self._sizes), np.int64)
        # Every token stands twice, so that the last ones always lie in a row.
        self._most = max(params.max_pattern_size, 1)
        self._ring = np.full(2 * self._most, -1, np.int64)
        self._at = 0

    def push(self, token: int) -> bool:
        """Take a token; whether the tokens now end with a pattern `min_count` times in a row."""
        last = self._ring[self._at : self._at + self._most][::-1]
        same = last[self._sizes - 1] == token
        self._counts = np.where(same, self._counts + 1, 0)
        self._ring[[self._at, self._at + self._most]] = token
        self._at = (self._at + 1) % self._most
        return bool((self._counts >= self._needed).any())


@dataclass(eq=False, slots=True)
class Completion:
    """What the host keeps of one of a request's completions."""

    index: int
    sequence: Sequence
    params: SamplingParams
    eos: frozenset[int]
    """The model's end-of-text tokens."""
    stop_ids: frozenset[int]
    """The request's own stop tokens."""
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
    """Of the sampled tokens alone, in nats; None unless they were asked for."""
    routed_experts: np.ndarray | None = None
    """Those of all its tokens, once it has ended; None unless the engine returns them."""
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
    def is_free(self) -> bool:
        """Whether its next token may be sampled before those ahead of it are known: all tokens are
        allowed, and no log probabilities are wanted."""
        return self.grammar is None and self.rules is None and not self.wants_logprobs

    @property
    def may_draft(self) -> bool:
        """Whether tokens may be proposed ahead: nothing about a token depends on those before."""
        return self.grammar is None and self.rules is None and not self.params.penalized

    def row_params(self) -> RowParams:
        """Its row of the device's sampler."""
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
        if ending == "stop" and kept[-1] not in self.eos:
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
            routed_experts=self.routed_experts,
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
        """How the completion ends with its `count`-th token, None if it continues."""
        params = self.params
        if count >= params.min_tokens:
            if token in self.eos and not params.ignore_eos:
                return "stop"
            if token in self.stop_ids:
                return "stop"
        if count >= self.sequence.max_len - self.sequence.num_prompt:
            return "length"
        if self.repetition is not None and self.repetition.push(token):
            return "repetition"
        return None


@dataclass(frozen=True)
class PoolingRequest:
    """A request for an embedding."""

    request_id: str
    sequence: Sequence

    @property
    def sequences(self) -> list[Sequence]:
        """Its one sequence."""
        return [self.sequence]


@dataclass(eq=False, slots=True)
class Request:
    """What the engine keeps of a request until its last completion ends."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    completions: list[Completion]
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
    """Filled in order as the prompt is computed."""
    arrival: float = field(default_factory=time.monotonic)
    scheduled: float = 0.0
    first_token: float = 0.0
    _sent_prompt_logprobs: bool = False

    @property
    def sequences(self) -> list[Sequence]:
        """One for each completion."""
        return [completion.sequence for completion in self.completions]

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(completion.finished for completion in self.completions)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self.completions[0].sequence.num_cached

    def output(self) -> RequestOutput | None:
        """What its reader gets now; None when there is nothing new."""
        kind = self.params.output_kind
        outputs = [found for each in self.completions if (found := each.output(kind)) is not None]
        finished = self.finished
        if kind.name == "FINAL_ONLY" and not finished:
            return None
        if not outputs and not finished:
            return None
        logprobs = None
        if kind.name != "DELTA" or not self._sent_prompt_logprobs:
            logprobs = self.prompt_logprobs
            self._sent_prompt_logprobs = True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=logprobs,
            num_cached_tokens=self.num_cached_tokens,
        )

    def prompt_targets(self, start: int, stop: int) -> np.ndarray | None:
        """The prompt tokens after tokens [start, stop), int32, -1 where there is none; None where
        they are not to be scored."""
        if self.prompt_logprobs is None:
            return None
        if len(self.prompt_logprobs) >= min(stop + 1, len(self.prompt_ids)):
            return None  # scored before a preemption, or no prompt
        targets = np.full(stop - start, -1, np.int32)
        known = self.prompt_ids[start + 1 : stop + 1]
        targets[: len(known)] = known
        return targets

    def take_prompt_logprobs(
        self, start: int, stop: int, pieces: Items[Scored], text: TokenText | None
    ) -> None:
        """Read the log probabilities of `prompt_targets`; waits for the device."""
        if self.prompt_logprobs is None:
            return
        wanted = self.params.prompt_logprobs or 0
        targets = self.prompt_ids[start + 1 : stop + 1]
        found: list[Mapping[int, Logprob]] = []
        for piece in pieces:
            scores: Scored = jax.tree.map(np.asarray, piece)
            part, targets = targets[: len(scores.ranks)], targets[len(scores.ranks) :]
            found += pick_logprobs(scores, 0, part, wanted, text)
        # After a preemption the first of them may have been scored before.
        self.prompt_logprobs += found[len(self.prompt_logprobs) - start - 1 :]

    def stats(self) -> RequestStats:
        """Its figures, once it has ended."""
        return RequestStats(
            request_id=self.request_id,
            arrival=self.arrival,
            scheduled=self.scheduled,
            first_token=self.first_token,
            finished=time.monotonic(),
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.num_cached_tokens,
            generation_tokens=sum(each.num_tokens for each in self.completions),
            finish_reasons=[each.finish_reason or "abort" for each in self.completions],
            n=len(self.completions),
            max_tokens=self.params.max_tokens,
        )


def pick_logprobs(
    scores: Scored, first: int, tokens: Items[int], wanted: int, text: TokenText | None
) -> list[Mapping[int, Logprob]]:
    """For each token, standing from place `first` on: itself and the `wanted` most likely ones.

    A `wanted` of -1 takes all that there are.
    """
    most = scores.top_ids.shape[1]
    wanted = most if wanted < 0 else min(wanted, most)
    found: list[Mapping[int, Logprob]] = []
    for place, token in enumerate(tokens, start=first):
        one = {token: _entry(token, float(scores.logprobs[place]), int(scores.ranks[place]), text)}
        ids = scores.top_ids[place, :wanted].tolist()
        values = scores.top_logprobs[place, :wanted].tolist()
        for rank, (other, value) in enumerate(zip(ids, values, strict=True), start=1):
            if other not in one:
                one[other] = _entry(other, value, rank, text)
        found.append(one)
    return found


def _entry(token: int, logprob: float, rank: int, text: TokenText | None) -> Logprob:
    return Logprob(logprob, rank, None if text is None else text(token))
