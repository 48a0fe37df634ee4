"""The engine: requests in, outputs out, one `step` at a time, the device always a step ahead.

A call dispatches the model's part of step n + 1, then works through the results of step n while it
runs, then dispatches the sampling of step n + 1, for which it now knows every earlier token. Where
each sequence advances by one token, and none needs a mask or log probabilities, one program does
both, and several steps of a few milliseconds in one call.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from jax.profiler import StepTraceAnnotation, TraceAnnotation

from fornax.config.errors import EngineError
from fornax.llm.adapters import Adapter, Adapters
from fornax.llm.outputs import EmbeddingOutput, RequestOutput
from fornax.llm.program_cache import ProgramCache
from fornax.llm.request import Completion, PoolingRequest, Request, TokenText, pick_logprobs
from fornax.llm.runner import Runner, RunnerOutput
from fornax.llm.scheduler import Scheduler
from fornax.llm.scheduler_output import Sample, SchedulerOutput
from fornax.llm.sequence import Sequence, Status
from fornax.llm.speculation import Proposer, accepted_tokens
from fornax.llm.stats import Observer, StepStats
from fornax.llm.weights import Weights

__all__ = ["Engine", "Failure", "Output"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that the engine could not continue with."""

    request_id: str
    message: str
    fault: bool = False
    """Whether the engine or its weights are to blame, rather than the request."""


Output = RequestOutput | EmbeddingOutput | Failure


class Engine:
    """Owns the scheduler and the runner; every call comes from one thread."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        programs: ProgramCache,
        *,
        proposer: Proposer | None = None,
        token_text: TokenText | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.programs = programs
        self.adapters = runner.adapters
        self._routed = runner.routed
        self.observer = observer
        self.version = 0
        """Version of the weights."""
        self._speculates = proposer is not None
        self._proposer = proposer or Proposer()
        self._token_text = token_text
        self._requests: dict[str, Request | PoolingRequest] = {}
        self._owner: dict[int, tuple[Request, Completion]] = {}
        """By sequence; those of a `PoolingRequest` are not among them."""
        self._failed: dict[str, str] = {}
        """By request: what went wrong while its next token was being chosen."""
        self._inflight: tuple[RunnerOutput, int] | None = None
        self._asleep = False
        self._stepped = 0.0
        self.calls = 0
        """Of `step`, so far: the number of the one that runs."""
        self._step_seconds = CALL_SECONDS
        """Of a step that decodes, in the last call that did."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return not self._asleep and (self.scheduler.has_work or self._inflight is not None)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def is_sleeping(self) -> bool:
        """Whether the cache's memory is given back."""
        return self._asleep

    def add(self, request: Request | PoolingRequest) -> None:
        """Queue a request.

        Raises:
          EngineError: it can never run.
        """
        first, *others = request.sequences
        self._check_adapter(first.lora)
        first.children = others
        _mark("queued", request.request_id, tokens=first.num_prompt)
        self.scheduler.add(first)
        self._requests[request.request_id] = request
        if isinstance(request, Request):
            for completion in request.completions:
                self._owner[completion.sequence.id] = (request, completion)

    def abort(self, request_id: str) -> None:
        """End a request at whatever point it is; its pages are free for the next step."""
        request = self._requests.pop(request_id, None)
        if isinstance(request, PoolingRequest):
            self.scheduler.finish(request.sequence)
        elif request is not None:
            for completion in request.completions:
                completion.finish("abort")
            self._drop(request)
        if request is not None:
            _mark("aborted", request_id)

    def step(self) -> list[Output]:
        """Go one step on; returns what readers get. Profiles number the calls."""
        self.calls += 1
        with StepTraceAnnotation("engine", step_num=self.calls, requests=len(self._requests)):
            return self._step()

    def _step(self) -> list[Output]:
        if not self._stepped:
            self._stepped = time.monotonic()
        outputs: list[Output] = []
        if self._speculates:  # drafts are made of known tokens: no step ahead
            outputs += self._process()
            with TraceAnnotation("engine/propose"):
                self._propose()
        with TraceAnnotation("engine/schedule"):
            plan = self.scheduler.schedule(self._most_steps())
        sampled, bucket = None, 0
        if plan is not None:
            self._start(plan)
            if self._decodes(plan):
                sampled = self.runner.decode(plan, plan.adapters)
            else:
                bucket = self.runner.forward(plan, plan.adapters)
        outputs += self._process()
        if plan is not None:
            with TraceAnnotation("engine/sample"):
                self._inflight = (sampled or self._sample(plan, bucket), self.version)
        elif not self.scheduler.has_work:
            self._stepped = 0.0
        return outputs

    def update_weights(self, weights: Weights, version: int) -> list[Output]:
        """Continue with other weights; running sequences are recomputed under them.

        Tokens sampled so far stay, tagged with the version that made them.
        """
        outputs = self._process()
        self.scheduler.reset()
        self.runner.update_weights(weights)
        self._proposer.reset()
        self.version = version
        return outputs

    def add_adapter(self, adapter: Adapter) -> None:
        """Take in what `adapters.read` returned.

        Raises:
          EngineError: adapters are off, or there is one of this name.
        """
        self.need_adapters().add(adapter)

    def remove_adapter(self, name: str) -> list[Output]:
        """Forget an adapter; requests that use it fail.

        Raises:
          EngineError: adapters are off, or there is none of this name.
        """
        adapters = self.need_adapters()
        self._check_adapter(name)  # before the results of a step could get lost
        outputs = self._process()
        using = [i for i, each in self._requests.items() if each.sequences[0].lora == name]
        adapters.remove(name)
        for request_id in using:
            self.abort(request_id)
            outputs.append(Failure(request_id, f"adapter {name!r} was unloaded"))
        return outputs

    def _check_adapter(self, name: str | None) -> None:
        """Raise EngineError if an adapter is gone."""
        if name is not None:
            self.need_adapters().salt(name)

    def need_adapters(self) -> Adapters:
        """The adapters; EngineError if they are off."""
        if self.adapters is None:
            raise EngineError("adapters are off; start the engine with enable_lora")
        return self.adapters

    def sleep(self) -> list[Output]:
        """Give back the caches' memory, a draft model's too; requests wait until `wake`."""
        outputs = self._process()
        if not self._asleep:
            self.scheduler.reset()
            self.runner.executor.sleep()
            self._proposer.sleep()
            self._asleep = True
        return outputs

    def wake(self) -> None:
        """Make the cache again; sequences that were running are recomputed."""
        if self._asleep:
            self.runner.executor.wake()
            self._proposer.wake()
            self._asleep = False

    def _start(self, plan: SchedulerOutput) -> None:
        now = time.monotonic()
        for sequence in plan.preempted:
            _mark("preempted", sequence.request_id)
        for sequence in plan.started:
            if sequence.pooling:
                _mark("started", sequence.request_id)
            if sequence.pooling or sequence.row is None:
                continue
            request, completion = self._owner[sequence.id]
            if not request.scheduled:
                request.scheduled = now
                _mark("started", request.request_id)
            params = completion.row_params()
            self.runner.load_row(sequence.row, params)
            self._proposer.start(sequence, params)

    def _propose(self) -> None:
        ready = [
            sequence
            for sequence in self.scheduler.running
            if sequence.remaining == 1
            and not sequence.num_pending
            and not sequence.pooling
            # Its first sample has been taken, so that there is something to continue from.
            and len(sequence.tokens) > sequence.num_prompt
            and self._owner[sequence.id][1].may_draft
        ]
        self._proposer.propose(ready)

    def _most_steps(self) -> int:
        """Steps that the next call may do: so many that readers do not notice that tokens come
        together, and new requests hardly wait longer."""
        most = min(self.runner.most_steps, int(CALL_SECONDS / self._step_seconds))
        return most if most > 1 and self._are_free(self.scheduler.running) else 1

    def _decodes(self, plan: SchedulerOutput) -> bool:
        """Whether a call's sampling needs nothing that the results before it will say, so that one
        program does both. A sequence that they end is sampled in vain."""
        if plan.steps > 1:
            return True  # which nothing else was planned for
        return self.runner.decodes(plan) and self._are_free(each.sequence for each in plan.samples)

    def _are_free(self, sequences: Iterable[Sequence]) -> bool:
        owner = self._owner
        return all(each.pooling or owner[each.id][1].is_free for each in sequences)

    def _sample(self, plan: SchedulerOutput, bucket: int) -> RunnerOutput:
        masks: dict[int, np.ndarray] = {}
        dead: set[int] = set()
        checked: dict[int, Sample] = {}
        logprobs = False
        for index, sample in enumerate(plan.samples):
            if sample.sequence.status is Status.FINISHED:
                dead.add(index)
                continue
            completion = self._owner[sample.sequence.id][1]
            try:
                mask = completion.mask()
            except EngineError as error:
                self._failed[sample.sequence.request_id] = str(error)
                continue
            if mask is not None:
                masks[index] = mask
                if not mask.any():
                    self._failed[sample.sequence.request_id] = _NO_TOKEN
            logprobs = logprobs or completion.wants_logprobs
            if completion.may_draft:
                checked[index] = sample
        drafted = self._proposer.drafted(checked)
        scores: dict[int, np.ndarray] = {}
        for index, entry in enumerate(plan.entries):
            request, completion = self._owner.get(entry.sequence.id, (None, None))
            if request is None or completion is None or completion.index:
                continue
            targets = request.prompt_targets(entry.start, entry.stop)
            if targets is not None:
                scores[index] = targets
        return self.runner.sample(plan, bucket, masks, dead, logprobs, scores, drafted)

    def _process(self) -> list[Output]:
        if self._inflight is None:
            return []
        result, version = self._inflight
        self._inflight = None
        plan = result.plan
        with TraceAnnotation("engine/wait"):
            tokens = result.tokens()
        if self._routed is not None and result.routed is not None:
            self._routed.take(plan, *result.routed)
        stats = self._stats(result)
        touched: dict[str, Request] = {}
        outputs: list[Output] = []
        for index, pieces in result.scored.items():
            entry = plan.entries[index]
            request, _ = self._owner.get(entry.sequence.id, (None, None))
            if request is not None:
                request.take_prompt_logprobs(entry.start, entry.stop, pieces, self._token_text)
        for first, count in plan.sample_runs():
            sequence = plan.samples[first].sequence
            sampled = list(chain.from_iterable(tokens[first : first + count]))
            if sequence.status is Status.FINISHED:
                self.scheduler.received(sequence, [], len(sampled))
                continue
            request, completion = self._owner[sequence.id]
            drafts = count - 1
            accepted = accepted_tokens(sequence.drafts, sampled) if drafts else sampled
            problem = self._failed.pop(request.request_id, None)
            broken = problem is None and -1 in accepted
            if broken:
                problem = _NOT_FINITE
            before = completion.num_tokens
            if problem is None:
                if drafts:
                    stats.count_drafts(drafts, len(accepted) - 1)
                problem = self._take(
                    request, completion, accepted, len(sampled), version, result, first
                )
            if problem is not None:
                self._requests.pop(request.request_id, None)
                self._drop(request)
                _mark("failed", request.request_id)
                outputs.append(Failure(request.request_id, problem, broken))
                touched.pop(request.request_id, None)
                continue
            stats.generation_tokens += completion.num_tokens - before
            touched[request.request_id] = request
        outputs += self._emit(touched)
        outputs += self._embeddings(result)
        if self.observer is not None:
            self.observer.step(stats)
        return outputs

    def _take(
        self,
        request: Request,
        completion: Completion,
        accepted: list[int],
        sampled: int,
        version: int,
        result: RunnerOutput,
        first: int,
    ) -> str | None:
        """Give a completion its tokens, of `sampled` in the plan; returns what is wrong with them,
        if anything."""
        sequence = completion.sequence
        kept = completion.take(accepted)
        self.scheduler.received(sequence, kept, sampled)
        logprobs = None
        if completion.params.logprobs is not None:
            wanted = completion.params.logprobs
            logprobs = pick_logprobs(result.logprobs, first, kept, wanted, self._token_text)
        if completion.token_logprobs is not None:
            completion.token_logprobs += result.token_logprobs[first : first + len(kept)]
        try:
            completion.record(kept, version, logprobs)
        except EngineError as error:
            return str(error)
        now = time.monotonic()
        if self.observer is not None:
            if not request.first_token:
                self.observer.first_token(now - request.arrival)
            elif completion.last_token_time:
                for _ in kept:
                    self.observer.inter_token((now - completion.last_token_time) / len(kept))
        if not request.first_token:
            request.first_token = now
            _mark("first token", request.request_id)
        completion.last_token_time = now
        if completion.finished:
            if self._routed is not None:
                completion.routed_experts = self._routed.of(sequence)
            self._finish(sequence)
        return None

    def _emit(self, touched: dict[str, Request]) -> Iterator[Output]:
        for request in touched.values():
            output = request.output()
            if request.finished:
                self._requests.pop(request.request_id, None)
                self._drop(request)
                sampled = sum(each.num_tokens for each in request.completions)
                _mark("finished", request.request_id, tokens=sampled)
            if output is not None:
                yield output

    def _embeddings(self, result: RunnerOutput) -> Iterator[Output]:
        if not result.plan.pooled:
            return
        rows = result.embeddings()
        for sample, row in zip(result.plan.pooled, rows, strict=True):
            sequence = sample.sequence
            request = self._requests.get(sequence.request_id)
            if not isinstance(request, PoolingRequest) or request.sequence is not sequence:
                continue  # aborted
            del self._requests[sequence.request_id]
            self.scheduler.finish(sequence)
            _mark("finished", sequence.request_id, tokens=0)
            if not np.isfinite(row).all():
                yield Failure(sequence.request_id, _NOT_FINITE, fault=True)
                continue
            yield EmbeddingOutput(
                request_id=sequence.request_id,
                embedding=row.tolist(),
                prompt_token_ids=sequence.prompt,
                num_cached_tokens=sequence.num_cached,
            )

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._owner.pop(sequence.id, None)
        self._proposer.finish(sequence)
        if self._routed is not None:
            self._routed.forget(sequence)

    def _drop(self, request: Request) -> None:
        self._failed.pop(request.request_id, None)
        for completion in request.completions:
            if completion.sequence.status is not Status.FINISHED:
                self._finish(completion.sequence)
        if self.observer is not None:
            self.observer.finished(request.stats())

    def _stats(self, result: RunnerOutput) -> StepStats:
        plan, scheduler = result.plan, self.scheduler
        now = time.monotonic()
        seconds = now - self._stepped
        if result.decoded_KT is not None:
            self._step_seconds = seconds / plan.steps
        scheduler.took(plan, result.bucket, seconds)
        stats = StepStats(
            seconds=seconds,
            steps=plan.steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            cache_usage=scheduler.manager.usage,
            bucket=result.bucket,
            tokens=plan.num_tokens,
            prompt_tokens=plan.prompt_tokens,
            prefix_queries=plan.prefix_queries,
            prefix_hits=plan.prefix_hits,
            preemptions=len(plan.preempted),
            running_loras=scheduler.running_loras,
            waiting_loras=scheduler.waiting_loras,
            compiled=tuple(self.programs.late),
        )
        self.programs.late.clear()
        self._stepped = now
        return stats


CALL_SECONDS = 0.02
"""Of several steps in one call, at most."""


def _mark(event: str, request_id: str, **tokens: int) -> None:
    """Show in profiles what happens to a request; `fornax.profile.serving` reads it."""
    with TraceAnnotation(f"request/{event}", request=request_id, **tokens):
        pass


_NOT_FINITE = (
    "the model's output is not a number: its weights or its arithmetic are broken; check the "
    "checkpoint for NaN"
)
_NO_TOKEN = (
    "the request's own constraints leave no token to choose; check allowed_token_ids, min_tokens, "
    "bad_words and structured outputs against each other"
)
