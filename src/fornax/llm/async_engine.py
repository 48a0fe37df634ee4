"""The engine in a thread of its own, for programs built on asyncio.

Calls go to the thread through a queue that it empties between steps; each step's outputs come back
in one hop to the event loop of the caller.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Unpack

from fornax.config.errors import EngineError
from fornax.llm.build import Parts
from fornax.llm.config import EngineConfig
from fornax.llm.engine import Failure, Output
from fornax.llm.group import IDLE, follow, join_engine
from fornax.llm.outputs import EmbeddingOutput, RequestOutput
from fornax.llm.request import PoolingOptions, RequestOptions
from fornax.llm.sampling_params import SamplingParams
from fornax.llm.stats import Readiness
from fornax.llm.structured import SECONDS, Grammar, too_slow
from fornax.mesh.group import Leader, Member
from fornax.profile import FollowedCaptures

__all__ = ["AsyncEngine", "EngineDead", "EngineFault"]

_log = logging.getLogger("fornax.llm")


class EngineDead(Exception):  # noqa: N818 - a state as much as an error
    """The engine's thread ended with an error; what it was working on is lost."""


class EngineFault(Exception):  # noqa: N818 - nothing that the request's sender could fix
    """A request failed for no fault of its own."""


class _Reader:
    """One request's outputs on their way to its event loop."""

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences
        self.added = False
        """Whether the engine has the request; before, what it has under this id is another's."""
        self.loop = asyncio.get_running_loop()
        self.outputs: asyncio.Queue[Output | BaseException] = asyncio.Queue()


class AsyncEngine:
    """Serves requests of one event loop (or several) by an engine in a background thread."""

    def __init__(self, parts: Parts) -> None:
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.chat_template
        self.default_sampling_params = parts.default_sampling_params
        """Fields of SamplingParams as the model's generation_config.json has them."""
        self.max_model_len = parts.limits.max_model_len
        """Tokens of a sequence, prompt and output, at most."""
        self.max_num_seqs = parts.limits.max_num_seqs
        """Sequences that run at once."""
        self._programs = parts.programs
        self._engine = parts.engine
        self._input_processor = parts.input_processor
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._readers: dict[str, _Reader] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ended: BaseException | None = None
        self._stop_at: float | None = None
        self._ready = threading.Event()
        self._leader: Leader | None = None
        self._process_0: Member | None = None

    def join(self, config: EngineConfig) -> None:
        """Become the engine of one of several processes, which all call this.

        Raises:
          ClusterError: they differ, or one did not come.
        """
        runner = self._engine.runner
        joined = join_engine(runner.limits, config, runner.weights.config)
        if isinstance(joined, Leader):
            self._leader = joined
            engine = self._engine
            runner.executor.tell = lambda name, *arrays: joined.tell(
                name, *arrays, call=engine.calls
            )
        else:
            self._process_0 = joined

    def follow(self, profiles: Path | None = None) -> None:
        """Carry out what process 0 says until it ends, in any other process.

        Args:
          profiles: where its part of profiles goes; None: it makes none.

        Raises:
          LinkError: process 0 is gone.
        """
        assert self._process_0 is not None, "call `join` first, in a process that is not process 0"
        try:
            self._programs.compile_all()
            self._programs.wait()
            captures = FollowedCaptures(profiles, self._process_0)
            follow(self._engine.runner.executor, self._process_0, captures)
        finally:
            self._programs.close()
            self._input_processor.close()

    @property
    def leader(self) -> Leader | None:
        """What tells the engine's other processes; None where there are none."""
        return self._leader

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        return sum(reader.sequences for reader in list(self._readers.values()))

    @property
    def is_sleeping(self) -> bool:
        """Whether the cache was given up until `wake`."""
        return self._engine.is_sleeping

    def readiness(self) -> Readiness:
        """How far compiling is; other processes count as one more program."""
        found = self._programs.readiness()
        if self._leader is None:
            return found
        done = found.done + self._leader.done()
        return dataclasses.replace(found, done=done, total=found.total + 1)

    def error(self) -> BaseException | None:
        """What the engine died of."""
        return self._error

    def start(self) -> None:
        """Start the thread, and compiling."""
        self._programs.compile_all()
        self._input_processor.warm_up()
        if self._leader is not None:
            self._leader.watch(lambda error: self._inbox.put(functools.partial(_raise, error)))
        self._thread = threading.Thread(target=self._run, name="fornax-engine", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Return when every step is compiled, or the engine died."""
        self._ready.wait()

    def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Stop the thread, after the running requests or the time; compiling stops at once."""
        if not self.readiness().ready:
            self._programs.close()
        self._inbox.put(lambda: setattr(self, "_stop_at", time.monotonic() + drain_seconds))
        if self._thread is not None:
            self._thread.join()
        if self._leader is not None:
            self._leader.close()
        self._programs.close()
        self._input_processor.close()

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        constrain_after: tuple[int, ...] = (),
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come; closing the iterator aborts.

        Raises:
          EngineError: the request is not supported.
          EngineDead: the engine ended while it ran.
          EngineFault: the model's output is not a number.
        """
        grammar = await self._grammar(params, constrain_after)
        prepare = functools.partial(
            self._input_processor.request,
            prompt_ids,
            params,
            request_id=request_id,
            grammar=grammar,
            **options,
        )
        slow = _takes_long(params, len(prompt_ids))
        request = await asyncio.to_thread(prepare) if slow else prepare()
        with self._reading(request_id, params.n) as reader:
            self._submit(request_id, reader, lambda: self._engine.add(request))
            while True:
                output = await _next(reader)
                yield output
                if output.finished:
                    return

    async def embed(
        self, prompt_ids: list[int], *, request_id: str, **options: Unpack[PoolingOptions]
    ) -> EmbeddingOutput:
        """The prompt's embedding; cancelling aborts.

        Raises:
          EngineError: the request is not supported.
          EngineDead: the engine ended while it ran.
        """
        pooling = self._input_processor.pooling(prompt_ids, request_id=request_id, **options)
        with self._reading(request_id) as reader:
            self._submit(request_id, reader, lambda: self._engine.add(pooling))
            return await _next(reader)

    async def add_lora(self, name: str, path: str) -> None:
        """Load an adapter.

        Raises:
          EngineError: adapters are not enabled, or this one does not fit the model.
        """
        adapters = self._engine.need_adapters()
        loaded = await asyncio.to_thread(adapters.read, name, path)
        await self._command(lambda: self._engine.add_adapter(loaded))

    async def remove_lora(self, name: str) -> None:
        """Unload an adapter; its requests are aborted.

        Raises:
          EngineError: there is none of this name.
        """
        self._engine.need_adapters()
        await self._command(lambda: self._deliver(self._engine.remove_adapter(name)))

    def loras(self) -> Mapping[str, str]:
        """Paths of the loaded adapters by name."""
        return self._engine.adapters.paths if self._engine.adapters else {}

    async def update_weights(self, params: object, version: int) -> None:
        """Continue with other weights; see `Engine.update_weights`.

        Raises:
          EngineError: they are not this model's.
        """
        weights = await asyncio.to_thread(self._engine.runner.weights.adopt, params)
        await self._command(lambda: self._deliver(self._engine.update_weights(weights, version)))

    async def sleep(self, level: int = 1) -> None:
        """Give the cache up; requests wait.

        Raises:
          EngineError: for another level than 1, which keeps the weights.
        """
        if level != 1:
            raise EngineError(
                f"sleep level {level} is not supported; level 1 gives the cache up and keeps the "
                "weights"
            )
        await self._command(lambda: self._deliver(self._engine.sleep()))

    async def wake(self) -> None:
        """Take the cache back."""
        await self._command(self._engine.wake)

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        await self._command(self._engine.scheduler.manager.reset_prefix_cache)

    async def _command(self, work: Callable[[], None]) -> None:
        """Run something between two steps of the engine."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except EngineError as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._inbox.put(run)
        waiting = asyncio.wrap_future(done)
        while not waiting.done():
            if self._ended is not None and not done.done():
                raise self._ended
            await asyncio.wait([waiting], timeout=0.2)
        waiting.result()

    async def _grammar(
        self, params: SamplingParams, constrain_after: tuple[int, ...]
    ) -> Grammar | None:
        """The request's grammar; a caller that waits no longer takes it out of the queue."""
        made = self._input_processor.grammar(params, constrain_after)
        if made is None:
            return None
        try:
            return await asyncio.wait_for(asyncio.wrap_future(made), SECONDS)
        except TimeoutError:
            raise too_slow(SECONDS) from None

    @contextlib.contextmanager
    def _reading(self, request_id: str, sequences: int = 1) -> Iterator[_Reader]:
        if request_id in self._readers:
            raise EngineError(f"request id {request_id!r} is in use; give another")
        reader = self._readers[request_id] = _Reader(sequences)
        try:
            if (
                self._ended is not None
            ):  # looked at only now: `_fail_readers` knows this reader or not
                raise self._ended
            yield reader
        finally:
            self._readers.pop(request_id, None)
            self._inbox.put(lambda: self._engine.abort(request_id))

    def _submit(self, request_id: str, reader: _Reader, add: Callable[[], None]) -> None:
        def run() -> None:
            reader.added = True
            try:
                add()
            except EngineError as error:
                self._deliver([Failure(request_id, str(error))])

        self._inbox.put(run)

    def _deliver(self, outputs: list[Output]) -> None:
        """Send outputs to their readers, one hop for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Reader, Output]]] = {}
        for output in outputs:
            reader = self._readers.get(output.request_id)
            if reader is not None and reader.added:
                by_loop.setdefault(reader.loop, []).append((reader, output))
        for loop, pairs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody reads
                loop.call_soon_threadsafe(_put_all, pairs)

    def _run(self) -> None:
        try:
            self._programs.wait()
            if self._leader is not None:
                self._leader.wait()
            self._ready.set()
            while self._take_calls():
                if self._engine.has_work:
                    self._deliver(self._engine.step())
                    if self._leader is not None and not self._engine.has_work:
                        self._leader.tell(IDLE)
        except CancelledError:  # stopped before everything was compiled
            self._fail_readers(EngineDead("the engine was shut down"))
        except BaseException as error:
            _log.exception("the engine died")
            self._error = error
            self._fail_readers(EngineDead(f"the engine died: {error}"))
        else:
            self._fail_readers(EngineDead("the engine was shut down"))
        finally:
            self._ready.set()

    def _take_calls(self) -> bool:
        """Run what was posted, waiting for something to do; False when it is time to stop."""
        while True:
            stopping = self._stop_at is not None
            idle = not self._engine.has_work
            if stopping and (
                self._engine.num_requests == 0 or time.monotonic() >= (self._stop_at or 0)
            ):
                return False
            try:
                work = self._inbox.get(block=idle, timeout=0.1 if stopping else None)
            except queue.Empty:
                if idle:
                    continue
                return True
            work()

    def _fail_readers(self, error: BaseException) -> None:
        self._ended = error
        for reader in list(self._readers.values()):
            with contextlib.suppress(RuntimeError):
                reader.loop.call_soon_threadsafe(reader.outputs.put_nowait, error)


def _raise(error: Exception) -> None:
    raise error


def _put_all(pairs: list[tuple[_Reader, Output]]) -> None:
    for reader, output in pairs:
        reader.outputs.put_nowait(output)


async def _next(reader: _Reader) -> Any:
    output = await reader.outputs.get()
    if isinstance(output, BaseException):
        raise output
    if isinstance(output, Failure):
        raise (EngineFault if output.fault else EngineError)(output.message)
    return output


def _takes_long(params: SamplingParams, prompt: int) -> bool:
    """Whether to prepare a request takes more than about a millisecond."""
    characters = sum(map(len, params.stop))
    return bool(params.bad_words) or characters > 256 or params.n * prompt > 65536
