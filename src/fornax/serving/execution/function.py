"""One function of a loaded version: what it accepts, its queue, its answers and its figures."""

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from fornax.config.errors import ServingCode, ServingError
from fornax.export.buckets import join, split
from fornax.export.spec import Signature
from fornax.serving.batching import Batch, Key, Limit, Queue, RowPlan, Waiting
from fornax.serving.events import Events
from fornax.serving.execution.admission import Admission, Shapes, refuse_nonfinite
from fornax.serving.execution.reports import Reports
from fornax.serving.execution.runner import Computed, Runner, compute_error
from fornax.serving.execution.scheduler import SHORT_SECONDS, Claim, DeviceScheduler
from fornax.serving.settings import ModelSettings
from fornax.serving.statistics import Counters, ModelStatistics
from fornax.serving.types import InferRequest, InferResult, Timing

__all__ = ["Function"]


@dataclasses.dataclass(slots=True, eq=False)
class PendingRequest:
    """A request and the future its sender waits for."""

    request: InferRequest
    future: "asyncio.Future[InferResult]"
    arrived: int
    """By `time.monotonic_ns()`."""
    rows: int
    parts: list[Mapping[str, np.ndarray] | None]
    missing: int
    timing: Timing = dataclasses.field(default_factory=Timing)
    ended: bool = False

    def take(
        self, part: int, outputs: Mapping[str, np.ndarray], started: int, computed: Computed
    ) -> None:
        """One part has its outputs, of a batch that was begun at `started`."""
        self.parts[part] = outputs
        self.missing -= 1
        timing, waited = self.timing, started - self.arrived
        if waited > timing.queue:
            timing.queue = waited
        timing.compute_input += computed.input_ns
        timing.compute_infer += computed.infer_ns
        timing.compute_output += computed.output_ns


def abandoned(part: tuple["PendingRequest", int]) -> bool:
    """Whether nobody waits for a request any more, or it has failed already."""
    return part[0].ended or part[0].future.done()


class Function:
    """See the module. Everything is called in the event loop's thread."""

    def __init__(
        self,
        model: str,
        version: str,
        signature: Signature,
        runners: Sequence[tuple[DeviceScheduler, Limit, Runner]],
        settings: ModelSettings,
        events: Events,
    ):
        """A function and its replicas: where each runs, and how often at once."""
        self.model, self.version, self.signature = model, version, signature
        self.counters = Counters()
        self._reports = Reports(model, version, signature, self.counters, events)
        self.pending = 0
        self.draining = False
        self._idle: asyncio.Event | None = None
        self._refuse_nonfinite = settings.nan.outputs == "refuse"
        batching = settings.batching_of(signature.name)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        shapes = Shapes(signature)
        self._admission = Admission(model, signature, shapes, settings)
        self.queue = Queue(
            plans(shapes, runners[0][2], batching.max_rows),
            limit=batching.queue_limit,
            delay=batching.max_delay_ms * 1e-3,
            preferred=batching.preferred_sizes,
            fits=shapes.fits,
            abandoned=abandoned,
            gone=self._gone,
            together=signature.batch is not None,
        )
        self.runners = [runner for _, _, runner in runners]
        self._schedulers = [scheduler for scheduler, _, _ in runners]
        self._claims: list[tuple[DeviceScheduler, Claim]] = []
        for scheduler, limit, runner in runners:
            short = all(p.seconds <= SHORT_SECONDS for p in runner.prepared.values())
            claim = Claim(
                self.queue,
                limit,
                settings.weight,
                name=f"{model}/{signature.name}",
                runner=runner,
                answers=self,
                short=short,
            )
            scheduler.attach(claim)
            self._claims.append((scheduler, claim))

    def statistics(self, name: str) -> ModelStatistics:
        """A copy of the figures."""
        own = {each.name: getattr(self.counters, each.name) for each in fields(Counters)}
        own["reject"] = dict(own["reject"])
        own["batches"] = {rows: replace(entry) for rows, entry in own["batches"].items()}
        return ModelStatistics(
            **own,
            name=name,
            version=self.version,
            pending=self.pending,
            queued=self.queue.size,
            compilations_after_ready=sum(runner.late for runner in self.runners),
        )

    async def drained(self) -> None:
        """Wait until every request accepted has its answer; none is accepted any more."""
        self.draining = True
        self.queue.delay = 0.0  # there is nobody to wait for
        self._kick()
        if self.pending:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    async def quiet(self) -> None:
        """Wait for batches under way whose requests have ended already."""
        while any(claim.limit.running for _, claim in self._claims):
            await asyncio.sleep(0.002)

    def submit(self, request: InferRequest) -> "asyncio.Future[InferResult]":
        """Take a request into the queue; the future gets its `InferResult` or its error.

        Raises:
          ServingError: when it is refused.
        """
        now = time.monotonic_ns()
        try:
            answer = self._accept(request, now)
        except ServingError as error:
            self.counters.failed(error.code, time.monotonic_ns() - now)
            self._reports.ended(request, error)
            raise
        return answer.future

    def overdue(self, now: float) -> None:
        """Answer those whose deadline has passed."""
        for each in self.queue.expire(now):
            self._fail(each.owner[0], _late(each.owner[0], now))
            each.forget()

    def answer(self, batch: Batch, computed: Computed, started: int) -> None:
        """Hand out what was computed."""
        if computed.error is not None:
            if not isinstance(computed.error, ServingError):
                self._reports.failed(computed.error)
            error = compute_error(computed.error)
            for each in batch.requests:
                self._fail(each.owner[0], error)
                each.forget()
            return
        prepared = self.runners[0].prepared[batch.bucket, batch.key]
        self._reports.batch(batch, prepared, computed)
        for each, outputs in zip(batch.requests, computed.answers, strict=True):
            answer, part = each.owner
            if answer.ended:
                continue
            if answer.future.done():
                self._gone(each)
                continue
            answer.take(part, outputs, started, computed)
            if not answer.missing:
                try:
                    self._succeed(answer)
                except Exception as failure:  # such as no memory to join its parts
                    self._reports.failed(failure)
                    self._fail(answer, compute_error(failure))
            each.forget()

    def fail_waiting(self, error: ServingError) -> None:
        """Refuse all that waits."""
        for each in self.queue.clear():
            self._fail(each.owner[0], error)
            each.forget()

    def close(self) -> None:
        """Leave the schedulers; nothing waits or runs any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for scheduler, claim in self._claims:
            scheduler.detach(claim)
        self._claims.clear()
        self._schedulers.clear()
        self.runners.clear()

    def _accept(self, request: InferRequest, now: int) -> PendingRequest:
        if self.draining:
            raise ServingError(
                ServingCode.UNAVAILABLE,
                f"version {self.version} of {self.model!r} is being unloaded; send again",
            )
        rows, key, priority, deadline = self._admission.read(request, now)
        most = self.queue.plans[key].most
        count = -(-rows // most)
        answer = PendingRequest(
            request, self._loop.create_future(), now, rows, [None] * count, count
        )
        arrived = now * 1e-9
        if count == 1:
            waiting = Waiting(
                (answer, 0),
                request.inputs,
                rows,
                key,
                priority,
                deadline,
                arrived,
                request.request_id,
            )
            self.queue.put(waiting)
        else:
            self.queue.put(
                *(
                    Waiting(
                        (answer, i),
                        part,
                        size,
                        key,
                        priority,
                        deadline,
                        arrived,
                        request.request_id,
                    )
                    for i, (size, part) in enumerate(
                        split(self.signature, request.inputs, rows, most)
                    )
                )
            )
        if deadline is not None and (self._timer is None or deadline < self._timer_due):
            self._watch(deadline, arrived)
        self.pending += 1
        self._kick()
        return answer

    def _kick(self) -> None:
        schedulers = self._schedulers
        if len(schedulers) == 1:
            schedulers[0].kick()
        else:
            for scheduler in sorted(schedulers, key=lambda scheduler: scheduler.running):
                scheduler.kick()

    def _watch(self, deadline: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = deadline
        self._timer = self._loop.call_later(max(deadline - now, 1e-3), self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = time.monotonic()
        self.overdue(now)
        following = self.queue.next_deadline()
        if following is not None:
            self._watch(following, now)

    def _succeed(self, answer: PendingRequest) -> None:
        request = answer.request
        outputs = join(self.signature, [part for part in answer.parts if part is not None])
        if request.outputs:
            outputs = {name: outputs[name] for name in request.outputs}
        if self._refuse_nonfinite:
            try:
                refuse_nonfinite(outputs, ServingCode.INTERNAL, "output")
            except ServingError as error:
                self._fail(answer, error)
                return
        timing = answer.timing
        result = InferResult(
            self.model, self.version, self.signature.name, request.id, outputs, timing
        )
        answer.future.set_result(result)
        self.counters.answered(answer.rows, timing, time.monotonic_ns() - answer.arrived)
        self._end(answer, result)

    def _fail(self, answer: PendingRequest, error: ServingError) -> None:
        if answer.ended:
            return
        if answer.future.done():
            if error.code is not ServingCode.DEADLINE_EXCEEDED:
                error = ServingError(ServingCode.CANCELLED, "the client left")
        else:
            error = ServingError(error.code, str(error))  # its own: each raise adds to a traceback
            answer.future.set_exception(error)
        self.counters.failed(error.code, time.monotonic_ns() - answer.arrived)
        self._end(answer, error)

    def _gone(self, each: Waiting) -> None:
        """Nobody waits for this one any more, or its sender gave up at its deadline."""
        answer, now = each.owner[0], time.monotonic()
        if each.deadline is not None and each.deadline <= now:
            self._fail(answer, _late(answer, now))
        else:
            self._fail(answer, ServingError(ServingCode.CANCELLED, "the client left"))
        each.forget()

    def _end(self, answer: PendingRequest, outcome: InferResult | ServingError) -> None:
        answer.ended = True
        self.pending -= 1
        if self._idle is not None and not self.pending:
            self._idle.set()
        self._reports.ended(answer.request, outcome)


def plans(shapes: Shapes, runner: Runner, most: int | None) -> dict[Key, RowPlan]:
    """For each padded shape, how waiting rows are cut into batches on such a device."""
    return {
        key: RowPlan(
            buckets,
            buckets[-1] if most is None else most,
            {rows: runner.prepared[rows, key].seconds for rows in buckets},
        )
        for key, buckets in shapes.rows.items()
    }


def _late(answer: PendingRequest, now: float) -> ServingError:
    waited = now - answer.arrived * 1e-9
    return ServingError(
        ServingCode.DEADLINE_EXCEEDED,
        f"the deadline passed after {waited * 1e3:.1f} ms in the queue; allow more time, or send "
        "less",
    )
