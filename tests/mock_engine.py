"""An engine without a model: it repeats its prompt. For tests of the server and of clients, and
to measure what the server itself costs."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack

from fornax.config import EngineError
from fornax.data import Tokenizer
from fornax.llm.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    RequestOutput,
    RequestOutputKind,
)
from fornax.llm.request import PoolingOptions, RequestOptions
from fornax.llm.sampling_params import SamplingParams
from fornax.llm.stats import Observer, Readiness, RequestStats, StepStats
from fornax.llm.text import ChatTemplate

__all__ = ["MockEngine"]


@dataclass(eq=False)
class _Stream:
    """One request: what it makes, what of it waits to be read."""

    engine: "MockEngine"
    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    pieces: list[tuple[int, str]]
    """Tokens and their texts, repeated over and over."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    arrival: float = field(default_factory=time.monotonic)
    scheduled: float = 0.0
    made: int = 0
    closed: bool = False
    items: deque[RequestOutput | BaseException | None] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> "_Stream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self.items:
            if self.closed:
                raise StopAsyncIteration
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        item = self.items.popleft()
        if item is None:
            self.closed = True
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            self.closed = True
            raise item
        return item

    async def aclose(self) -> None:
        """Abort, unless it ended."""
        self.closed = True
        self.engine._abort(self)

    def deliver(self, item: RequestOutput | BaseException | None) -> None:
        """Hand an output to the reader; in the reader's loop."""
        self.items.append(item)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class MockEngine:
    """Makes a token of every running request each `step_seconds`, in a thread of its own."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        max_model_len: int = 1024,
        max_num_seqs: int = 32,
        step_seconds: float = 0.0,
        observer: Observer | None = None,
        reply: str | None = None,
    ):
        """`reply` is what it says instead of the prompt, over and over."""
        self.tokenizer = tokenizer
        tokenizer.backend.encode_special_tokens = False
        self.chat_template = chat_template
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.default_sampling_params: dict[str, Any] = {}
        self.is_sleeping = False
        self.leader = None
        self.ready = Readiness(done=1, total=1, seconds_left=0.0)
        self.embedding_width = 8
        self.aborted = 0
        self._reply = reply
        self._step_seconds = step_seconds
        self._observer = observer
        self._adapters: dict[str, str] = {}
        self._error: BaseException | None = None
        self._lock = threading.Condition()
        self._running: list[_Stream] = []
        self._waiting: deque[_Stream] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mock-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Stop the thread, after the running requests or the time."""
        until = time.monotonic() + drain_seconds
        while self.num_unfinished and time.monotonic() < until:
            time.sleep(0.01)
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join()

    def die(self, error: BaseException) -> None:
        """Fail as an engine does: every request gets the error, and none is taken any more."""
        with self._lock:
            self._error = error
            self._lock.notify()

    def readiness(self) -> Readiness:
        """As set in `ready`."""
        return self.ready

    def error(self) -> BaseException | None:
        """What it died of."""
        return self._error

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        return len(self._running) + len(self._waiting)

    def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        constrain_after: tuple[int, ...] = (),
        **options: Unpack[RequestOptions],
    ) -> _Stream:
        """Repeat the prompt's tokens until `max_tokens` or a stop string."""
        if self._error is not None:
            raise RuntimeError("the engine died") from self._error
        params.check_for_model(vocab_size=self.tokenizer.vocab_size)
        if max(prompt_ids) >= self.tokenizer.vocab_size:
            raise EngineError(f"prompt: token {max(prompt_ids)} is not in the vocabulary")
        if self._reply is None:
            ids = prompt_ids
        else:
            ids = self.tokenizer.encode(self._reply).tolist()
        pieces = [(number, self.tokenizer.decode([number], special=True)) for number in ids]
        stream = _Stream(self, request_id, options.get("prompt"), prompt_ids, params, pieces)
        with self._lock:
            self._waiting.append(stream)
            self._lock.notify()
        return stream

    async def embed(
        self, prompt_ids: list[int], *, request_id: str, **options: Unpack[PoolingOptions]
    ) -> EmbeddingOutput:
        """A vector of unit length that depends on the prompt."""
        if max(prompt_ids) >= self.tokenizer.vocab_size:
            raise EngineError(f"prompt: token {max(prompt_ids)} is not in the vocabulary")
        vector = [0.0] * self.embedding_width
        vector[sum(prompt_ids) % self.embedding_width] = 1.0
        return EmbeddingOutput(request_id, vector, prompt_ids)

    async def add_lora(self, name: str, path: str) -> None:
        """Remember an adapter."""
        if not path.startswith("/"):
            raise EngineError(f"lora_path={path} is not an absolute path")
        self._adapters = {**self._adapters, name: path}

    async def remove_lora(self, name: str) -> None:
        """Forget an adapter."""
        self._adapters = {n: path for n, path in self._adapters.items() if n != name}

    def loras(self) -> Mapping[str, str]:
        """The adapters."""
        return self._adapters

    async def sleep(self, level: int = 1) -> None:
        """Stop taking requests."""
        self.is_sleeping = True

    async def wake(self) -> None:
        """Take requests again."""
        self.is_sleeping = False

    async def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    def _abort(self, stream: _Stream) -> None:
        with self._lock:
            if stream in self._running:
                self._running.remove(stream)
            elif stream in self._waiting:
                self._waiting.remove(stream)
            else:
                return
            self.aborted += 1

    def _run(self) -> None:
        while True:
            with self._lock:
                while not (self._running or self._waiting or self._stopping or self._error):
                    self._lock.wait()
                if self._stopping or self._error is not None:
                    left = [*self._running, *self._waiting]
                    self._running.clear()
                    self._waiting.clear()
                    break
                while self._waiting and len(self._running) < self.max_num_seqs:
                    stream = self._waiting.popleft()
                    stream.scheduled = time.monotonic()
                    self._running.append(stream)
                made = self._step()
            self._send(made)
            time.sleep(self._step_seconds)
        failure = RuntimeError("the engine died" if self._error is not None else "it stopped")
        self._send([(stream, failure) for stream in left])

    def _send(self, made: list[tuple[_Stream, Any]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Any]]] = {}
        for stream, item in made:
            by_loop.setdefault(stream.loop, []).append((stream, item))
        for loop, pairs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody reads
                loop.call_soon_threadsafe(_deliver, pairs)

    def _step(self) -> list[tuple[_Stream, RequestOutput | None]]:
        """The next token of every running request."""
        made: list[tuple[_Stream, RequestOutput | None]] = []
        for stream in list(self._running):
            outputs = [_next(stream, index) for index in range(stream.params.n)]
            stream.made += 1
            finished = all(output.finished for output in outputs)
            if stream.params.output_kind is RequestOutputKind.DELTA:
                made.append((stream, _output(stream, outputs, finished)))
            elif finished:
                whole = [_whole(stream, output) for output in outputs]
                made.append((stream, _output(stream, whole, True)))
            if finished:
                self._running.remove(stream)
                made.append((stream, None))
                self._observe_end(stream)
        if self._observer is not None:
            count = len(made)
            self._observer.step(
                StepStats(
                    running=len(self._running),
                    waiting=len(self._waiting),
                    bucket=max(32, count),
                    tokens=count,
                    generation_tokens=count,
                )
            )
            for _ in range(count):
                self._observer.inter_token(self._step_seconds)
        return made

    def _observe_end(self, stream: _Stream) -> None:
        if self._observer is not None:
            self._observer.finished(
                RequestStats(
                    stream.request_id,
                    stream.arrival,
                    stream.scheduled,
                    stream.scheduled,
                    time.monotonic(),
                    len(stream.prompt_ids),
                    0,
                    stream.made,
                    ["length"],
                    stream.params.n,
                    stream.params.max_tokens,
                )
            )


def _deliver(made: list[tuple[_Stream, Any]]) -> None:
    for stream, item in made:
        stream.deliver(item)


def _next(stream: _Stream, index: int) -> CompletionOutput:
    number, text = stream.pieces[stream.made % len(stream.pieces)]
    last = stream.made + 1 >= (stream.params.max_tokens or 1)
    stopped = next((stop for stop in stream.params.stop if stop in text), None)
    logprobs: list[Mapping[int, Logprob]] | None = None
    if stream.params.logprobs is not None:
        logprobs = [{number: Logprob(-0.5, 1, text)}]
    reason = "stop" if stopped is not None else "length" if last else None
    return CompletionOutput(index, text, [number], None, logprobs, reason, stopped)


def _whole(stream: _Stream, last: CompletionOutput) -> CompletionOutput:
    taken = list(itertools.islice(itertools.cycle(stream.pieces), stream.made))
    last.text = "".join(text for _, text in taken)
    last.token_ids = [number for number, _ in taken]
    if last.logprobs is not None:
        last.logprobs = [{number: Logprob(-0.5, 1, text)} for number, text in taken]
    return last


def _output(stream: _Stream, outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
    positions = None
    if (stream.params.prompt_logprobs is not None and stream.made == 1) or (
        stream.params.prompt_logprobs is not None and finished
    ):
        positions = _scores(stream)
    return RequestOutput(
        stream.request_id, stream.prompt, stream.prompt_ids, outputs, finished, positions
    )


def _scores(stream: _Stream) -> list[Mapping[int, Logprob] | None]:
    decode = stream.engine.tokenizer.decode
    return [None] + [
        {number: Logprob(-1.0, 1, decode([number], special=True))}
        for number in stream.prompt_ids[1:]
    ]
