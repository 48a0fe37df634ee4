"""An engine in its thread with a model and tokenizer of its own, and readers of its streams."""

import asyncio
import functools
import itertools
import threading
import time
from dataclasses import dataclass, replace

import pytest

from fornax.data import Tokenizer, train_bpe
from fornax.llm import CompletionOutput, RequestOutput, SamplingParams
from fornax.llm.async_engine import AsyncEngine
from fornax.llm.build import Parts, build_engine
from fornax.llm.config import EngineConfig
from fornax.llm.stats import Observer
from fornax.models import Decoder, DecoderConfig, create_decoder

__all__ = [
    "Service",
    "ascii_tokens",
    "collect",
    "drop_after",
    "joined",
    "make_service",
    "model",
    "step_when_told",
    "words",
]

_IDS = itertools.count()
_TEXT = (
    'the cat and the dog {"name": "cat", "age": 12, "tags": ["red", "blue"], "good": true}',
    "one two three four five six seven eight nine ten, the end: yes or no?",
    '{"name": "dog", "age": 3, "tags": [], "good": false, "other": null}',
)


@functools.cache
def words() -> Tokenizer:
    """A small byte-level BPE tokenizer."""
    return train_bpe(_TEXT * 4, 320)


@functools.cache
def ascii_tokens() -> tuple[int, ...]:
    """Tokens of whole printable characters."""
    texts = {token: words().decode([token]) for token in range(words().vocab_size)}
    return tuple(t for t, text in texts.items() if text and text.isascii() and text.isprintable())


@functools.cache
def model() -> Decoder:
    """A random decoder of windowed and full layers, with the tokenizer's vocabulary."""
    config = DecoderConfig(
        vocab_size=words().vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        sliding_window=6,
        attention_pattern=("sliding", "full"),
        max_position_embeddings=192,
        initializer_range=0.3,
        scale_residual_init=False,
        tie_embeddings=False,
    )
    return create_decoder(config, seed=3)


@dataclass(frozen=True)
class Service:
    """A running engine."""

    engine: AsyncEngine
    parts: Parts
    model: Decoder

    @property
    def core(self):
        return self.parts.engine

    @property
    def tokenizer(self) -> Tokenizer:
        return words()

    @property
    def pages(self) -> int:
        return sum(pool.num_pages - 1 for pool in self.core.scheduler.manager.pools)

    @property
    def free_pages(self) -> int:
        return sum(pool.available for pool in self.core.scheduler.manager.pools)

    def wait_idle(self, seconds: float = 120.0) -> None:
        """Return when the engine has nothing to do."""
        until = time.monotonic() + seconds
        while self.core.num_requests or self.core.has_work:
            assert time.monotonic() < until, "the engine never ends"
            time.sleep(0.005)


def make_service(observer: Observer, **options) -> Service:
    """Start an engine: pages of 4 tokens, steps of 16, 6 rows, a cache too small for all."""
    sizes = {
        "block_size": 4,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 16,
        "max_model_len": 160,
        "num_gpu_blocks_override": 60,
    }
    config = EngineConfig(**{**sizes, **options})
    parts = build_engine(model(), config, tokenizer=words(), observer=observer)
    engine = AsyncEngine(parts)
    engine.start()
    engine.wait_ready()
    return Service(engine, parts, model())


def step_when_told(
    engine: AsyncEngine, patch: pytest.MonkeyPatch, free_steps: int = 1
) -> threading.Event:
    """Have the engine take some steps, then one for each call posted to it, until the event is set:
    what runs still runs when a test does something to it, however late it does."""
    core, free, steps = engine._engine, threading.Event(), itertools.count()
    step = core.step

    def told():
        until = time.monotonic() + 120
        while next(steps) >= free_steps and not free.is_set() and engine._inbox.empty():
            assert time.monotonic() < until, "nothing was posted"
            time.sleep(0.001)
        return step()

    patch.setattr(core, "step", told)
    return free


async def collect(
    service: Service,
    prompt: list[int],
    params: SamplingParams,
    *,
    request_id: str | None = None,
    lora: str | None = None,
    delay: float = 0.0,
) -> list[RequestOutput]:
    """Every output of a request."""
    name = request_id or f"r{next(_IDS)}"
    found = []
    async for output in service.engine.generate(prompt, params, request_id=name, lora=lora):
        found.append(output)
        await asyncio.sleep(delay)
    return found


async def drop_after(
    service: Service, prompt: list[int], params: SamplingParams, count: int
) -> int:
    """Leave after `count` outputs, or at the end; returns whether the end was reached."""
    stream = service.engine.generate(prompt, params, request_id=f"r{next(_IDS)}")
    finished = False
    for _ in range(count):
        try:
            finished = (await anext(stream)).finished
        except StopAsyncIteration:
            break
    await stream.aclose()  # pyrefly: ignore[missing-attribute]
    return int(finished)


def joined(deltas: list[RequestOutput]) -> list[CompletionOutput]:
    """What a stream of deltas adds up to."""
    found: dict[int, CompletionOutput] = {}
    for output in deltas:
        for one in output.outputs:
            if one.index not in found:
                found[one.index] = replace(one)
                continue
            whole = found[one.index]
            assert whole.finish_reason is None, "something came after the end"
            found[one.index] = replace(
                one,
                text=whole.text + one.text,
                token_ids=whole.token_ids + one.token_ids,
                versions=whole.versions + one.versions,
                logprobs=None if one.logprobs is None else [*(whole.logprobs or []), *one.logprobs],
            )
    return [found[index] for index in sorted(found)]
