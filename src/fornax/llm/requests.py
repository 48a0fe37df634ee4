"""A request on the host: its completions, its prompt's log probabilities, its times."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from fornax.llm.completion import Completion
from fornax.llm.outputs import Logprob, RequestOutput
from fornax.llm.sampling_params import SamplingParams
from fornax.llm.sequence import Sequence
from fornax.llm.stats import RequestStats

__all__ = ["Pooling", "Request"]


@dataclass(frozen=True)
class Pooling:
    """A request for an embedding."""

    request_id: str
    sequence: Sequence


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
