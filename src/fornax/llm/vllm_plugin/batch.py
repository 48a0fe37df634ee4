"""From what vLLM's scheduler sends to a plan that Fornax's runner runs.

vLLM allocates the pages: block n of vLLM is page n of every page group, and block 0, which it never
allocates, is the page that padding writes to.
"""

import itertools
import random
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fornax.config.errors import EngineError
from fornax.llm.sampling.masks import TokenRules
from fornax.llm.sampling.state import RowParams
from fornax.llm.sampling_params import REFUSED, SamplingParams
from fornax.llm.scheduler_output import Entry, PageCopy, PageUpdate, Sample, SchedulerOutput
from fornax.llm.sequence import Sequence

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest  # pyrefly: ignore[missing-import]
    from vllm.v1.core.sched.output import (  # pyrefly: ignore[missing-import]
        CachedRequestData,
        NewRequestData,
    )
    from vllm.v1.core.sched.output import (  # pyrefly: ignore[missing-import]
        SchedulerOutput as Scheduled,
    )
    from vllm.v1.outputs import LogprobsTensors  # pyrefly: ignore[missing-import]

    import vllm  # pyrefly: ignore[missing-import]

__all__ = ["Batch", "Request", "sampling_params"]

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
    "trace_decode_token_ids",
)
"""Fields that mean the same in both; the others are the business of vLLM's own processes."""

_IN_FRONT = ("flat_logprobs",)
"""Fields that Fornax's engine refuses and vLLM supports without its worker."""


def sampling_params(params: "vllm.SamplingParams | vllm.PoolingParams") -> SamplingParams:
    """A request's vLLM parameters as Fornax's.

    Raises:
      EngineError: not a completion, or a field that is not supported, by name.
    """
    if not hasattr(params, "temperature"):
        raise EngineError("only completions are supported; `fornax serve` has /v1/embeddings")
    names = [*_SAME, *(name for name in REFUSED if name not in _IN_FRONT)]
    given = {name: getattr(params, name) for name in names}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


@dataclass(eq=False)
class Request:
    """What the worker keeps of a request until vLLM says that it has ended."""

    sequence: Sequence
    params: SamplingParams
    seed: int
    rules: TokenRules | None
    pages: list[int]
    adapter: "LoRARequest | None"
    prompt_scores: "LogprobsTensors | None" = None
    """Log probabilities of the prompt's tokens, as vLLM expects them, while they are collected."""

    def row_params(self, vocab_size: int) -> RowParams:
        """What the device's sampler receives of it."""
        return RowParams.make(
            self.params,
            seed=self.seed,
            prompt=self.sequence.prompt,
            output=self.sequence.output,
            vocab_size=vocab_size,
        )


class Batch:
    """The worker's requests and the rows of the batch that they have."""

    def __init__(self, *, rows: int, groups: int, vocab_size: int, seed: int) -> None:
        """Begin without requests.

        Args:
          rows: sequences that run at once, at most.
          groups: page groups of the model's cache.
          vocab_size: V.
          seed: of requests that bring none.
        """
        self.requests: dict[str, Request] = {}
        self._groups = range(groups)
        self._vocab = vocab_size
        self._seeds = random.Random(seed)
        self._ids = itertools.count()
        self._free_rows = list(range(rows))
        self._by_row: dict[int, Request] = {}

    def plan(self, scheduled: "Scheduled") -> SchedulerOutput:
        """The step that a `SchedulerOutput` asks for."""
        for name in scheduled.finished_req_ids:
            self._drop(name)
        starts: dict[str, int] = {}
        plan = SchedulerOutput(num_tokens=scheduled.total_num_scheduled_tokens)
        for data in scheduled.scheduled_new_reqs:
            self._add(data)
            starts[data.req_id] = data.num_computed_tokens
        plan.updates += self._update_cached(scheduled.scheduled_cached_reqs, starts)
        for name, count in scheduled.num_scheduled_tokens.items():
            self._schedule(plan, name, starts[name], count, scheduled.num_scheduled_tokens)
        for source, target in scheduled.kv_cache_block_copies or ():
            plan.copies += [PageCopy(group, source, target) for group in self._groups]
        return plan

    def _add(self, data: "NewRequestData") -> None:
        self._drop(data.req_id)  # it resumes, or its prompt has grown
        if data.prompt_token_ids is None or data.mm_features:
            raise EngineError(f"request {data.req_id} is not made of tokens alone")
        params = sampling_params(data.sampling_params)
        sequence = Sequence(
            id=next(self._ids),
            request_id=data.req_id,
            prompt=data.prompt_token_ids,
            max_len=len(data.prompt_token_ids) + (params.max_tokens or 0),
        )
        sequence.tokens = list(data.prefill_token_ids or data.prompt_token_ids)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        self.requests[data.req_id] = Request(
            sequence=sequence,
            params=params,
            seed=seed,
            rules=self._rules(params, data.sampling_params),
            pages=list(data.block_ids[0]),
            adapter=data.lora_request,
        )

    def _rules(self, params: SamplingParams, theirs: "vllm.SamplingParams") -> TokenRules | None:
        words = theirs.bad_words_token_ids or ()
        wanted = (params.min_tokens, params.allowed_token_ids, params.trace_decode_token_ids, words)
        if not any(wanted):
            return None
        stops = sorted(theirs.all_stop_token_ids)
        return TokenRules(params, stop_ids=stops, bad_words=words, vocab_size=self._vocab)

    def _update_cached(
        self, cached: "CachedRequestData", starts: dict[str, int]
    ) -> Iterator[PageUpdate]:
        """Apply what is new about known requests; yields page changes of those with a row."""
        each = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for name, blocks, computed in each:
            request = self.requests[name]
            starts[name] = computed
            if name in cached.all_token_ids:
                request.sequence.tokens = list(cached.all_token_ids[name])
            if name in cached.resumed_req_ids:
                request.pages = []
            known = len(request.pages)
            request.pages += blocks[0] if blocks else ()
            if request.sequence.row is not None:
                yield from self._pages(request, known)

    def _schedule(
        self, plan: SchedulerOutput, name: str, start: int, count: int, running: dict[str, int]
    ) -> None:
        request = self.requests[name]
        sequence = request.sequence
        if sequence.row is None:
            sequence.row = self._assign_row(request, running)
            plan.started.append(sequence)
            plan.updates += self._pages(request, 0)
        entry = Entry(sequence, sequence.row, start, count)
        if entry.stop >= len(sequence.tokens):
            where = len(plan.entries)
            plan.samples.append(Sample(sequence, sequence.row, where, count - 1, entry.stop))
        plan.entries.append(entry)

    def _pages(self, request: Request, first: int) -> Iterator[PageUpdate]:
        row = request.sequence.row
        assert row is not None, "pages of a request without a row"
        for index, page in enumerate(request.pages[first:], start=first):
            for group in self._groups:
                yield PageUpdate(group, row, index, page)

    def _assign_row(self, request: Request, running: Items[str] | dict[str, int]) -> int:
        """A row for a request; one that does not run in this step may lose its row."""
        if not self._free_rows:
            idle = (x for x in self._by_row.values() if x.sequence.request_id not in running)
            self._release_row(next(idle))
        row = self._free_rows.pop()
        self._by_row[row] = request
        return row

    def _release_row(self, request: Request) -> None:
        row = request.sequence.row
        if row is not None:
            del self._by_row[row]
            self._free_rows.append(row)
            request.sequence.row = None

    def _drop(self, name: str) -> None:
        request = self.requests.pop(name, None)
        if request is not None:
            self._release_row(request)
