"""Continuous batching: which sequences run in the next step, and with how many tokens each."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence as Items
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from fornax.config.errors import EngineError
from fornax.llm.block_manager import BlockManager
from fornax.llm.budget import Job, StepLimit, share_tokens
from fornax.llm.scheduler_output import Entry, Sample, SchedulerOutput
from fornax.llm.sequence import Sequence, Status

__all__ = ["Scheduler", "SchedulerConfig"]

_order = attrgetter("order")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How sequences share the steps."""

    max_num_seqs: int = 256
    """Most sequences that run at once."""
    max_num_batched_tokens: int = 2048
    """Most tokens of one step."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of service: first come, or smaller `priority` first."""
    priority_aging_seconds: float = 60.0
    """Waiting time that makes up for one level of priority, so that nothing waits for ever."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in one step; 0 for no limit."""
    max_num_partial_prefills: int = 4
    """Most prompts that are partly computed at once, beside those of which less than a page is left
    after the last state that is kept."""
    max_loras: int = 0
    """Most different adapters that run at once."""
    buckets: tuple[int, ...] = ()
    """Step sizes in tokens that are compiled, ascending; chunks of prompts prefer to fill one."""
    inter_token_latency_target: float | None = None
    """Seconds that a step may take in which sequences decode, so that prompts get no more of it."""


class Scheduler:
    """Decides each step. All calls come from one thread, the engine's.

    Sequences are in one total order that no waiting changes: by arrival, or by priority plus
    arrival over `priority_aging_seconds`. The sequence that is first in order is never preempted,
    and the last is preempted first; finitely many sequences come before any one, so none starves.
    """

    def __init__(self, config: SchedulerConfig, manager: BlockManager) -> None:
        self.config = config
        self.manager = manager
        self.running: list[Sequence] = []
        """In order."""
        self.waiting: list[Sequence] = []
        """In order; new and preempted ones."""
        self._rows = list(range(config.max_num_seqs))
        self._adapters: dict[str, int] = {}
        self._draining: str | None = None
        self._plan = SchedulerOutput()
        target = config.inter_token_latency_target
        self._limit = None if target is None else StepLimit(target, config.buckets)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.running or self.waiting)

    @property
    def running_loras(self) -> tuple[str, ...]:
        """Adapters of running sequences."""
        return tuple(self._adapters)

    @property
    def waiting_loras(self) -> tuple[str, ...]:
        """Adapters of waiting sequences."""
        return tuple(dict.fromkeys(each.lora for each in self.waiting if each.lora is not None))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence and with it its children. EngineError if it can never run."""
        for each in (sequence, *sequence.children):
            self._check(each)
            each.order = self._key(each)
        insort(self.waiting, sequence, key=_order)

    def schedule(self, steps: int = 1) -> SchedulerOutput | None:
        """Plan the next call, and count its tokens as computed and sampled; None if nothing can
        run before results of earlier plans have been received.

        Args:
          steps: of a call that does nothing but decode, at most. Fewer are planned where a sequence
            reaches its length or pages are short, and one where others wait.
        """
        plan = self._plan
        before = len(plan.preempted)
        budget = self._decode(plan, steps)
        self._prefill(plan, budget, admits=len(plan.preempted) == before)
        if not plan.entries:
            return None
        plan.started = [each for each in dict.fromkeys(plan.started) if each.row is not None]
        self._plan = SchedulerOutput()
        return plan

    def took(self, plan: SchedulerOutput, bucket: int, seconds: float) -> None:
        """Take in how long a step of `bucket` tokens took."""
        if self._limit is not None and plan.prompt_tokens:
            self._limit.took(bucket, seconds)

    def received(self, sequence: Sequence, tokens: Items[int], sampled: int = 1) -> None:
        """Take the tokens that came of a sequence's samples in one plan.

        `sampled` is how many they were, one for each step or draft and one more; `tokens` what was
        accepted of them, from the first on; the rest is rolled back. With no token at all (sampling
        failed) the sequence stands still until `finish`. A finished sequence takes none.
        """
        drafted, sequence.drafts = bool(sequence.drafts), []
        sequence.num_pending -= sampled
        if sequence.status is Status.FINISHED:
            return
        sequence.tokens.extend(tokens)
        if sequence.status is Status.RUNNING:
            if tokens:
                sequence.num_computed -= sampled - len(tokens)
                sequence.state = len(tokens) - 1 if drafted else 0
            self.manager.commit(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence at any point; its pages and row are free for the next plan. Children that
        were not forked yet run on without it. Does nothing when it is finished already."""
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
        elif sequence.status is not Status.FINISHED:
            self._remove(self.waiting, sequence)
        sequence.status = Status.FINISHED
        children = [each for each in sequence.children if each.status is not Status.FINISHED]
        sequence.children = []
        if children:
            children[0].children = children[1:]
            insort(self.waiting, children[0], key=_order)

    def reset(self) -> None:
        """Preempt all running sequences and drop the prefix cache, as for new weights or sleep.
        They start again once their pending tokens were received."""
        while self.running:
            self._preempt(self.running[-1])
        self.manager.reset_prefix_cache()

    def _check(self, sequence: Sequence) -> None:
        stored = max(sequence.max_len - (0 if sequence.pooling else 1), sequence.num_prompt)
        shortage = self.manager.shortage(stored)
        if shortage is not None:
            raise EngineError(
                f"request {sequence.request_id} may reach {sequence.max_len} tokens and then needs "
                f"{shortage}; lower its token limit, or give the cache more memory"
            )

    def _key(self, sequence: Sequence) -> tuple[float, float, int]:
        rank = sequence.arrival
        if self.config.policy == "priority":
            rank = sequence.priority + sequence.arrival / self.config.priority_aging_seconds
        return (rank, sequence.arrival, sequence.id)

    def _decode(self, plan: SchedulerOutput, steps: int) -> int:
        """Plan the sequences with one token to compute; returns the tokens left for prompts."""
        running = self.running
        decodes = []
        prefills = 0
        for sequence in running:
            length = len(sequence.tokens) + sequence.num_pending
            remaining = length - sequence.num_computed
            if remaining > 1:
                prefills += 1
            elif sequence.drafts and sequence.num_pending:
                continue  # which of its drafts hold is not known yet
            elif remaining == 1 and (length < sequence.max_len or sequence.pooling):
                decodes.append(sequence)
        most = self.config.max_num_batched_tokens
        if decodes and self._limit is not None:
            most = min(most, self._limit.tokens(len(decodes)))
        budget = most - len(decodes)
        extra = budget // 2 if prefills or self.waiting else budget
        steps = self._steps(decodes, steps) if steps > 1 else 1
        for sequence in decodes:
            if sequence.row is None:  # preempted by one before it
                budget += 1
                continue
            drafts = self._drafts(sequence, extra) if sequence.drafts else 0
            start = sequence.num_computed
            if drafts and not self.manager.extend(sequence, start, start + 1 + drafts, plan):
                drafts = 0
            if not drafts and not self._make_room(sequence, start, start + steps, plan):
                budget += 1
                continue
            extra -= drafts
            budget -= drafts
            self._emit(plan, sequence, 1 + drafts, drafts, steps)
        return budget

    def _steps(self, decodes: list[Sequence], most: int) -> int:
        """How many steps of one call these sequences can decode, if no other needs to run: without
        one that ends, or passes the place where a state is to be kept, before the last."""
        if self.waiting or len(decodes) < len(self.running):
            return 1
        for each in decodes:
            if each.pooling or each.drafts or each.num_computed < each.num_prompt:
                return 1
            most = min(most, each.max_len - each.length, self.manager.until_kept(each))
        while most > 1 and not self.manager.has_room(decodes, most):
            most -= 1
        return most

    def _drafts(self, sequence: Sequence, most: int) -> int:
        """How many of the drafts to try; none before the prompt is forked."""
        if sequence.children:
            return 0
        return min(len(sequence.drafts), most, sequence.max_len - len(sequence.tokens) - 1)

    def _make_room(self, sequence: Sequence, start: int, stop: int, plan: SchedulerOutput) -> bool:
        """Make tokens writable, if need be at the expense of the last in order."""
        while not self.manager.extend(sequence, start, stop, plan):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _prefill(self, plan: SchedulerOutput, budget: int, admits: bool) -> None:
        """Share the rest of the step between prompts: those begun, then those that wait."""
        if budget < 1:
            return
        partial = [sequence for sequence in self.running if sequence.remaining > 1]
        jobs = [self._job(sequence, sequence.num_computed, True) for sequence in partial]
        starved = [each for each in partial if self.manager.room(each, plan) < 1]
        candidates = self._candidates(jobs, budget) if admits and not starved else []
        grants = share_tokens(
            budget,
            jobs,
            limit=self.config.max_num_partial_prefills,
            base=plan.num_tokens,
            buckets=self.config.buckets,
        )
        for sequence, grant in zip(partial, grants[: len(partial)], strict=True):
            self._advance(plan, sequence, grant)
        for sequence, grant in zip(candidates, grants[len(partial) :], strict=True):
            if grant and self._admit(plan, sequence, grant):
                self._advance(plan, sequence, grant)
        if starved and not plan.entries:
            self._relieve(starved[0], plan)

    def _job(self, sequence: Sequence, computed: int, running: bool) -> Job:
        remaining = sequence.length - computed
        most = self.config.long_prefill_token_threshold or remaining
        return Job(remaining, most, running)

    def _candidates(self, jobs: list[Job], budget: int) -> list[Sequence]:
        """Choose the waiting sequences that may start now, in order, and add their jobs."""
        found: list[Sequence] = []
        wanted = sum(min(job.remaining, job.most) for job in jobs)
        adapters = set(self._adapters)
        barred: set[str] = set()
        spare = self.manager.spare(len(self.running))
        for sequence in self.waiting:
            enough = wanted >= budget and len(jobs) >= self.config.max_num_partial_prefills
            if enough or len(found) == len(self._rows) or sequence.num_pending:
                break
            if sequence.lora is not None and not self._adapter_fits(
                sequence.lora, adapters, barred
            ):
                continue
            match = self.manager.match(sequence)
            if not self.manager.claim(sequence, match, spare):
                break
            if sequence.lora is not None:
                adapters.add(sequence.lora)
            job = self._job(sequence, match.num_tokens, False)
            wanted += min(job.remaining, job.most)
            jobs.append(job)
            found.append(sequence)
        else:
            if not barred:
                self._draining = None
        return found

    def _adapter_fits(self, lora: str, adapters: set[str], barred: set[str]) -> bool:
        """Whether an adapter can run now. While one waits for a place, sequences behind it start
        no more with the adapter that has the fewest running, so that its place comes free."""
        if lora in adapters:
            return not (barred and lora == self._draining)
        if not barred and len(adapters) < self.config.max_loras:
            return True
        barred.add(lora)
        if self._draining not in self._adapters:
            self._draining = min(self._adapters, key=self._adapters.__getitem__, default=None)
        return False

    def _admit(self, plan: SchedulerOutput, sequence: Sequence, grant: int) -> bool:
        """Give a waiting sequence row and pages; False if forks or others before it took them, or
        took so much of its prefix that `grant` would leave one partial prefill too many."""
        if not self._rows:
            return False
        match = self.manager.match(sequence)
        if sequence.length - match.num_tokens > grant:
            partial = sum(each.remaining > 1 for each in self.running)
            if partial >= self.config.max_num_partial_prefills:
                return False
        if not self.manager.claim(sequence, match, self.manager.spare(0)):
            return False
        self._remove(self.waiting, sequence)
        self._start(plan, sequence)
        self.manager.admit(sequence, match, plan)
        if not sequence.began:
            sequence.began = True
            sequence.num_cached = match.num_tokens
            if sequence.reads_cache and self.manager.prefix_caching:
                plan.prefix_queries += len(sequence.tokens)
                plan.prefix_hits += match.num_tokens
        return True

    def _advance(self, plan: SchedulerOutput, sequence: Sequence, grant: int) -> None:
        """Plan a chunk of a prompt, as long as pages can be had."""
        count = min(grant, sequence.remaining, self.manager.room(sequence, plan))
        if count < 1:
            return
        count = self.manager.chunk(sequence, count)
        start = sequence.num_computed
        if self.manager.extend(sequence, start, start + count, plan):
            self._emit(plan, sequence, count, 0)

    def _relieve(self, sequence: Sequence, plan: SchedulerOutput) -> None:
        """Preempt from the last in order until a prompt that is short of pages can continue."""
        while self.running[-1] is not sequence and self.manager.room(sequence, plan) < 1:
            self._preempt(self.running[-1])
        self._advance(plan, sequence, self.config.max_num_batched_tokens)

    def _emit(
        self, plan: SchedulerOutput, sequence: Sequence, count: int, drafts: int, steps: int = 1
    ) -> None:
        """Put [num_computed, num_computed + count) into the plan and the samples it leads to."""
        row = sequence.row
        assert row is not None, "only running sequences are planned"
        entry = len(plan.entries)
        start = sequence.num_computed
        length = len(sequence.tokens) + sequence.num_pending
        plan.entries.append(Entry(sequence, row, start, count, drafts, sequence.state, steps=steps))
        plan.num_tokens += count
        sequence.state = 0
        del sequence.drafts[drafts:]
        stop = start + count
        sequence.num_computed = stop + steps - 1
        self.manager.commit(sequence)
        self.manager.keep_state(sequence, plan.entries[-1], plan)
        if stop - drafts < length:
            return
        if sequence.pooling:
            plan.pooled.append(Sample(sequence, row, entry, count - 1, length))
            return
        first = count - 1 - drafts
        for draft in range(drafts + 1):
            plan.samples.append(Sample(sequence, row, entry, first + draft, length + draft))
        sequence.num_pending += drafts + steps
        if sequence.children:
            self._fork(plan, sequence, entry, count - 1)

    def _fork(self, plan: SchedulerOutput, parent: Sequence, entry: int, offset: int) -> None:
        """Let the children share the prompt; those without a row queue on their own."""
        children = [each for each in parent.children if each.status is not Status.FINISHED]
        parent.children = []
        for child in children:
            if not self._rows:
                insort(self.waiting, child, key=_order)
                continue
            row = self._start(plan, child)
            child.began = True
            child.num_cached = parent.num_cached
            self.manager.fork(parent, child, plan)
            assert parent.row is not None, "only running sequences are planned"
            plan.forks.pop(row, None)  # of a child that was preempted since
            plan.forks[row] = parent.row
            plan.samples.append(Sample(child, row, entry, offset, child.num_prompt))
            child.num_pending = 1

    def _start(self, plan: SchedulerOutput, sequence: Sequence) -> int:
        sequence.row = heapq.heappop(self._rows)
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_order)
        if sequence.lora is not None:
            self._adapters[sequence.lora] = self._adapters.get(sequence.lora, 0) + 1
        plan.started.append(sequence)
        return sequence.row

    def _stop(self, sequence: Sequence) -> None:
        """Take row and pages back."""
        assert sequence.row is not None, "a running sequence has a row"
        self._remove(self.running, sequence)
        heapq.heappush(self._rows, sequence.row)
        sequence.row = None
        sequence.state = 0
        self.manager.free(sequence)
        if sequence.lora is not None:
            self._adapters[sequence.lora] -= 1
            if not self._adapters[sequence.lora]:
                del self._adapters[sequence.lora]

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        sequence.status = Status.PREEMPTED
        sequence.drafts = []
        insort(self.waiting, sequence, key=_order)
        self._plan.preempted.append(sequence)

    @staticmethod
    def _remove(queue: list[Sequence], sequence: Sequence) -> None:
        """Take a sequence out of a queue; children that wait for their parent are in none."""
        index = bisect_left(queue, sequence.order, key=_order)
        if index < len(queue) and queue[index] is sequence:
            del queue[index]
