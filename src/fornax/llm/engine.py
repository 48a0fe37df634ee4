"""The engine: requests in, outputs out, one `turn` at a time, the device always a step ahead.

A turn dispatches the model's part of step n + 1, then works through the results of step n while it
runs, then dispatches the sampling of step n + 1, for which it now knows every earlier token.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fornax.config.errors import EngineError
from fornax.llm.adapters import Adapters
from fornax.llm.logprobs import Scores, TokenText, pick
from fornax.llm.lora_file import Adapter
from fornax.llm.outputs import EmbeddingOutput, Logprob, RequestOutput
from fornax.llm.plan import Plan, Sample
from fornax.llm.programs import Programs
from fornax.llm.requests import Pooling, Request
from fornax.llm.runner import Runner, Ticket
from fornax.llm.scheduler import Scheduler
from fornax.llm.sequence import Sequence, Status
from fornax.llm.speculation import Proposer
from fornax.llm.stats import Observer, StepStats
from fornax.llm.weights import Weights

__all__ = ["Engine", "Failure", "Output"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that the engine could not go on with."""

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
        programs: Programs,
        *,
        proposer: Proposer | None = None,
        adapters: Adapters | None = None,
        token_text: TokenText | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.programs = programs
        self.adapters = adapters
        self.observer = observer
        self.version = 0
        """Version of the weights."""
        self._proposer = proposer
        self._token_text = token_text
        self._requests: dict[str, Request] = {}
        self._pooling: dict[str, Pooling] = {}
        self._owner: dict[int, tuple[Request, int]] = {}
        self._failed: dict[str, str] = {}
        self._inflight: tuple[Ticket, int] | None = None
        self._asleep = False
        self._turned = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything."""
        return not self._asleep and (self.scheduler.has_work or self._inflight is not None)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests) + len(self._pooling)

    @property
    def is_sleeping(self) -> bool:
        """Whether the cache's memory is given back."""
        return self._asleep

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
          EngineError: it can never run.
        """
        sequences = [completion.sequence for completion in request.completions]
        self._check_adapter(sequences[0].lora)
        sequences[0].children = sequences[1:]
        self.scheduler.add(sequences[0])
        self._requests[request.request_id] = request
        for index, sequence in enumerate(sequences):
            self._owner[sequence.id] = (request, index)

    def add_pooling(self, pooling: Pooling) -> None:
        """Queue a request for an embedding.

        Raises:
          EngineError: it can never run.
        """
        self._check_adapter(pooling.sequence.lora)
        self.scheduler.add(pooling.sequence)
        self._pooling[pooling.request_id] = pooling

    def abort(self, request_id: str) -> None:
        """End a request at whatever point it is; its pages are free for the next step."""
        pooling = self._pooling.pop(request_id, None)
        if pooling is not None:
            self.scheduler.finish(pooling.sequence)
        request = self._requests.pop(request_id, None)
        if request is not None:
            for completion in request.completions:
                completion.finish("abort")
            self._drop(request)

    def turn(self) -> list[Output]:
        """Go one step on; returns what readers get."""
        if not self._turned:
            self._turned = time.monotonic()
        outputs: list[Output] = []
        if self._proposer is not None:  # drafts are made of known tokens: no step ahead
            outputs += self._process()
            self._propose()
        plan = self.scheduler.schedule()
        bucket = 0
        if plan is not None:
            self._start(plan)
            bucket = self.runner.forward(plan, self._place_adapters(plan))
        outputs += self._process()
        if plan is not None:
            self._inflight = (self._sample(plan, bucket), self.version)
        elif not self.scheduler.has_work:
            self._turned = 0.0
        return outputs

    def drain(self) -> list[Output]:
        """Work through the step in flight without beginning another."""
        return self._process()

    def update_weights(self, weights: Weights, version: int) -> list[Output]:
        """Go on with other weights; running sequences are computed anew under them.

        Tokens sampled so far stay, tagged with the version that made them.
        """
        outputs = self._process()
        self.scheduler.reset()
        state = None if self.adapters is None else self.adapters.attach(weights.state)
        self.runner.update_weights(weights, state)
        if self._proposer is not None:
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
        sequences = {i: each.completions[0].sequence for i, each in self._requests.items()}
        sequences |= {i: each.sequence for i, each in self._pooling.items()}
        adapters.remove(name)
        for request_id in [i for i, sequence in sequences.items() if sequence.lora == name]:
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
            self.runner.sleep()
            if self._proposer is not None:
                self._proposer.sleep()
            self._asleep = True
        return outputs

    def wake(self) -> None:
        """Make the cache again; sequences that were running are computed anew."""
        if self._asleep:
            self.runner.wake()
            if self._proposer is not None:
                self._proposer.wake()
            self._asleep = False

    # Before a step.

    def _start(self, plan: Plan) -> None:
        now = time.monotonic()
        for sequence in plan.started:
            if sequence.pooling or sequence.row is None:
                continue
            request, index = self._owner[sequence.id]
            request.scheduled = request.scheduled or now
            params = request.completions[index].row_params()
            self.runner.load_row(sequence.row, params)
            if self._proposer is not None:
                self._proposer.start(sequence, params)

    def _propose(self) -> None:
        if self._proposer is None:
            return
        ready = [
            sequence
            for sequence in self.scheduler.running
            if sequence.remaining == 1
            and not sequence.num_pending
            and not sequence.pooling
            # Its first sample has been taken, so that there is something to go on from.
            and len(sequence.tokens) > sequence.num_prompt
            and self._completion(sequence).may_draft
        ]
        self._proposer.propose(ready)

    def _place_adapters(self, plan: Plan) -> dict[int, int]:
        """Bring the step's adapters to the device; returns the slot of each entry that has one."""
        if self.adapters is None:
            return {}
        names = {i: e.sequence.lora for i, e in enumerate(plan.entries) if e.sequence.lora}
        if self.adapters.place(set(names.values())):
            self.runner.use_state(self.adapters.attach(self.runner.weights.state))
        return {index: self.adapters.slot(name) for index, name in names.items()}

    def _sample(self, plan: Plan, bucket: int) -> Ticket:
        masks: dict[int, np.ndarray] = {}
        dead: set[int] = set()
        checked: dict[int, Sample] = {}
        logprobs = False
        for index, sample in enumerate(plan.samples):
            if sample.sequence.status is Status.FINISHED:
                dead.add(index)
                continue
            completion = self._completion(sample.sequence)
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
        drafted = None if self._proposer is None else self._proposer.drafted(checked)
        scores = {
            index: targets
            for index, entry in enumerate(plan.entries)
            if (targets := self._targets(entry.sequence, entry.start, entry.stop)) is not None
        }
        return self.runner.sample(plan, bucket, masks, dead, logprobs, scores, drafted)

    def _targets(self, sequence: Sequence, start: int, stop: int) -> np.ndarray | None:
        """The prompt tokens after each token of an entry, if they are to be scored."""
        if sequence.id not in self._owner:
            return None
        request, index = self._owner[sequence.id]
        if request.prompt_logprobs is None or index:
            return None
        if len(request.prompt_logprobs) >= min(stop + 1, sequence.num_prompt):
            return None  # scored before a preemption, or no prompt
        targets = np.full(stop - start, -1, np.int32)
        known = sequence.prompt[start + 1 : stop + 1]
        targets[: len(known)] = known
        return targets

    # After a step.

    def _process(self) -> list[Output]:
        if self._inflight is None:
            return []
        ticket, version = self._inflight
        self._inflight = None
        plan = ticket.plan
        tokens = ticket.tokens()
        stats = self._stats(ticket)
        touched: dict[str, Request] = {}
        outputs: list[Output] = []
        for index, pieces in ticket.scored.items():
            self._score(plan, index, pieces)
        for first, count in _runs(plan.samples):
            sequence = plan.samples[first].sequence
            drafts = count - 1
            if sequence.status is Status.FINISHED:
                self.scheduler.received(sequence, [], drafts)
                continue
            request, index = self._owner[sequence.id]
            accepted = _accept(sequence.drafts, tokens[first : first + count])
            problem = self._failed.pop(request.request_id, None)
            broken = problem is None and -1 in accepted
            if broken:
                problem = _NOT_FINITE
            if problem is None:
                self._count_drafts(stats, drafts, len(accepted) - 1)
                problem = self._take(request, index, accepted, drafts, version, ticket, first)
            if problem is not None:
                outputs.append(self._fail(request, problem, broken))
                touched.pop(request.request_id, None)
                continue
            stats.generation_tokens += len(accepted)
            touched[request.request_id] = request
        outputs += self._emit(touched)
        outputs += self._embeddings(ticket)
        self._report(stats)
        return outputs

    def _take(
        self,
        request: Request,
        index: int,
        accepted: list[int],
        drafts: int,
        version: int,
        ticket: Ticket,
        first: int,
    ) -> str | None:
        """Give a completion its tokens; returns what is wrong with them, if anything."""
        completion = request.completions[index]
        sequence = completion.sequence
        kept = completion.take(accepted)
        self.scheduler.received(sequence, kept, drafts)
        logprobs = None
        if completion.params.logprobs is not None:
            wanted = completion.params.logprobs
            logprobs = pick(ticket.logprobs, first, kept, wanted, self._token_text)
        if completion.token_logprobs is not None:
            completion.token_logprobs += ticket.token_logprobs[first : first + len(kept)]
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
        request.first_token = request.first_token or now
        completion.last_token_time = now
        if completion.finished:
            self._finish(sequence)
        return None

    def _emit(self, touched: dict[str, Request]) -> Iterator[Output]:
        for request in touched.values():
            output = request.output()
            if request.finished:
                self._requests.pop(request.request_id, None)
                self._drop(request)
            if output is not None:
                yield output

    def _embeddings(self, ticket: Ticket) -> Iterator[Output]:
        if not ticket.plan.pooled:
            return
        rows = ticket.embeddings()
        for sample, row in zip(ticket.plan.pooled, rows, strict=True):
            sequence = sample.sequence
            pooling = self._pooling.pop(sequence.request_id, None)
            if pooling is None:
                continue
            self.scheduler.finish(sequence)
            if not np.isfinite(row).all():
                yield Failure(sequence.request_id, _NOT_FINITE, fault=True)
                continue
            yield EmbeddingOutput(
                request_id=sequence.request_id,
                embedding=row.tolist(),
                prompt_token_ids=sequence.prompt,
                num_cached_tokens=sequence.num_cached,
            )

    def _score(self, plan: Plan, index: int, pieces: tuple[Any, ...]) -> None:
        entry = plan.entries[index]
        if entry.sequence.id not in self._owner:
            return
        request, _ = self._owner[entry.sequence.id]
        wanted = request.params.prompt_logprobs
        if request.prompt_logprobs is None or wanted is None:
            return
        targets = entry.sequence.prompt[entry.start + 1 : entry.stop + 1]
        found: list[Mapping[int, Logprob]] = []
        for piece in pieces:
            scores = Scores.read(piece)
            part, targets = targets[: len(scores.rank_M)], targets[len(scores.rank_M) :]
            found += pick(scores, 0, part, wanted, self._token_text)
        # After a preemption the first of them may have been scored before.
        request.prompt_logprobs += found[len(request.prompt_logprobs) - entry.start - 1 :]

    def _fail(self, request: Request, problem: str, fault: bool = False) -> Failure:
        self._requests.pop(request.request_id, None)
        self._drop(request)
        return Failure(request.request_id, problem, fault)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._owner.pop(sequence.id, None)
        if self._proposer is not None:
            self._proposer.finish(sequence)

    def _drop(self, request: Request) -> None:
        self._failed.pop(request.request_id, None)
        for completion in request.completions:
            if completion.sequence.status is not Status.FINISHED:
                self._finish(completion.sequence)
        if self.observer is not None:
            self.observer.finished(request.stats())

    def _completion(self, sequence: Sequence) -> Any:
        request, index = self._owner[sequence.id]
        return request.completions[index]

    # Figures.

    def _stats(self, ticket: Ticket) -> StepStats:
        plan, scheduler = ticket.plan, self.scheduler
        now = time.monotonic()
        stats = StepStats(
            seconds=now - self._turned,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            cache_usage=scheduler.manager.usage,
            bucket=ticket.bucket,
            tokens=plan.num_tokens,
            prompt_tokens=sum(
                max(0, min(entry.stop, entry.sequence.num_prompt) - entry.start)
                for entry in plan.entries
            ),
            prefix_queries=plan.prefix_queries,
            prefix_hits=plan.prefix_hits,
            preemptions=len(plan.preempted),
            running_loras=scheduler.running_loras,
            waiting_loras=scheduler.waiting_loras,
            compiled=tuple(self.programs.late),
        )
        self.programs.late.clear()
        self._turned = now
        return stats

    def _count_drafts(self, stats: StepStats, drafts: int, accepted: int) -> None:
        if not drafts:
            return
        stats.drafts += 1
        stats.draft_tokens += drafts
        stats.accepted_tokens += accepted
        per_position = stats.accepted_per_position
        per_position.extend([0] * (drafts - len(per_position)))
        for position in range(accepted):
            per_position[position] += 1

    def _report(self, stats: StepStats) -> None:
        if self.observer is not None:
            self.observer.step(stats)


_NOT_FINITE = (
    "the model's output is not a number: its weights or its arithmetic are broken; check the "
    "checkpoint for NaN"
)
_NO_TOKEN = (
    "the request's own constraints leave no token to choose; check allowed_token_ids, min_tokens, "
    "bad_words and structured outputs against each other"
)


def _runs(samples: list[Sample]) -> Iterator[tuple[int, int]]:
    """First index and count of the adjacent samples of each sequence."""
    first = 0
    for index in range(1, len(samples) + 1):
        if index == len(samples) or samples[index].sequence is not samples[first].sequence:
            yield first, index - first
            first = index


def _accept(drafts: list[int], sampled: list[int]) -> list[int]:
    """The sampled tokens up to the first that is not what was proposed."""
    for count, token in enumerate(sampled[:-1], start=1):
        if token != drafts[count - 1]:
            return sampled[:count]
    return sampled
