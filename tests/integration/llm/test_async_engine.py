"""The engine in its thread: streams, aborts, commands while requests run, several event loops."""

import asyncio
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from flax import nnx
from tests.integration.llm.helpers import Figures, prompts_of
from tests.integration.llm.streams import (
    Service,
    ascii_tokens,
    collect,
    drop_after,
    joined,
    make_service,
    model,
    step_when_told,
)

from fornax.config.errors import EngineError
from fornax.llm import RequestOutput, RequestOutputKind, SamplingParams
from fornax.llm.async_engine import AsyncEngine, EngineDead
from fornax.llm.build import build_engine
from fornax.llm.config import EngineConfig

LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    figures = Figures()
    service = make_service(figures)
    yield service
    service.engine.shutdown()
    assert not figures.compiled, "a program was compiled after the engine was ready"
    assert service.free_pages == service.pages, "pages were not given back"
    assert service.engine.error() is None


@pytest.fixture
def doomed() -> Iterator[Service]:
    """An engine that a test may break."""
    service = make_service(Figures())
    yield service
    service.engine.shutdown()


STREAMED = {
    "greedy": SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.1, seed=5, max_tokens=30),
    "several": SamplingParams(temperature=1.0, seed=9, n=3, max_tokens=20),
    "scored": SamplingParams(temperature=0, max_tokens=9, logprobs=2, prompt_logprobs=1),
    "rarely": SamplingParams(temperature=1.0, seed=3, max_tokens=23, stream_interval=5),
    "stopped": SamplingParams(
        temperature=1.0,
        seed=4,
        max_tokens=120,
        min_tokens=9,
        stop=["th", "e", "a", "1"],
        allowed_token_ids=ascii_tokens(),
    ),
    "stopped-kept": SamplingParams(
        temperature=1.0,
        seed=4,
        max_tokens=120,
        min_tokens=9,
        stop=["th", "e", "a", "1"],
        include_stop_str_in_output=True,
        allowed_token_ids=ascii_tokens(),
    ),
}


@pytest.mark.parametrize("name", STREAMED)
def test_deltas_add_up_to_the_final_output(name: str, service: Service) -> None:
    params = STREAMED[name]
    [prompt] = prompts_of(13)

    async def run() -> tuple[list[RequestOutput], ...]:
        each = [dataclasses.replace(params, output_kind=kind) for kind in RequestOutputKind]
        return tuple(await asyncio.gather(*(collect(service, prompt, one) for one in each)))

    cumulative, deltas, [final] = asyncio.run(run())
    assert joined(deltas) == final.outputs
    assert cumulative[-1].outputs == final.outputs
    assert (deltas[0].prompt_logprobs or None) == final.prompt_logprobs
    assert all(output.prompt_logprobs is None for output in deltas[1:])
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    for earlier, later in itertools.pairwise(cumulative):
        for one, other in zip(earlier.outputs, later.outputs, strict=True):
            assert other.text.startswith(one.text)
            assert other.token_ids[: len(one.token_ids)] == one.token_ids
    if params.stop:
        assert final.outputs[0].finish_reason == "stop"
        assert final.outputs[0].text.endswith(final.outputs[0].stop_reason) == (
            params.include_stop_str_in_output
        )
    assert len(deltas) > (3 if name == "rarely" else 5), "nothing was streamed"


def test_text_of_a_stream_is_the_tokens_text(service: Service) -> None:
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=40, allowed_token_ids=ascii_tokens(), output_kind=DELTA
    )
    [output] = joined(asyncio.run(collect(service, prompts_of(5)[0], params)))
    assert output.text == service.tokenizer.decode(output.token_ids)
    assert len(output.text) >= 40


def test_a_closed_stream_frees_its_pages_within_one_step(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, closed = service.core, threading.Event()
    original, after, made = core.step, [], []

    def step() -> Any:  # what is late here holds up the other side, so that neither request ends
        if core.num_requests < 2 and not closed.is_set():
            time.sleep(0.001)
            return []
        if made.count("goes") >= 3:
            closed.wait(120)
        began_after = closed.is_set()
        outputs = original()
        made.extend(output.request_id for output in outputs)
        if began_after:
            after.append([s.request_id for s in core.scheduler.running])
        return outputs

    monkeypatch.setattr(core, "step", step)

    async def run() -> None:
        one, other = prompts_of(20, 17)
        beside = asyncio.create_task(collect(service, other, LONG, request_id="stays"))
        stream = service.engine.generate(one, LONG, request_id="goes")
        for _ in range(3):
            await anext(stream)
        await stream.aclose()  # pyrefly: ignore[missing-attribute]
        closed.set()
        assert (await beside)[-1].outputs[0].finish_reason == "length"

    asyncio.run(run())
    assert ["stays"] in after
    assert not any("goes" in running for running in after[1:])


def test_streams_dropped_at_any_point_leave_nothing(service: Service) -> None:
    several = dataclasses.replace(LONG, temperature=1.0, seed=1, n=3)

    async def run() -> None:
        prompts = prompts_of(30, 9, 17)
        for count in range(8):
            params = (LONG, several, dataclasses.replace(LONG, output_kind=DELTA))
            async with asyncio.TaskGroup() as group:
                for prompt, one in zip(prompts, params, strict=True):
                    group.create_task(drop_after(service, prompt, one, count))
        for turns in range(12):  # cancelled while the prompt is computed, or before
            tasks = [asyncio.create_task(collect(service, p, LONG)) for p in prompts]
            for _ in range(turns):
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(result, asyncio.CancelledError):  # it was done before
                    assert isinstance(result, list), result
                    assert result[-1].finished

    asyncio.run(run())
    service.wait_idle()
    assert service.free_pages == service.pages


def test_a_request_gets_nothing_of_an_earlier_one_of_its_name(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, begun = service.core, threading.Event()
    original, ended = core.step, threading.Event()

    def step() -> Any:
        if outputs := original():
            ended.set()
            begun.wait(120)
        return outputs

    async def run() -> None:
        one, other = prompts_of(6, 7)
        alone = await service.engine.embed(other, request_id="alone")
        monkeypatch.setattr(core, "step", step)
        dropped = asyncio.create_task(service.engine.embed(one, request_id="same"))
        while not ended.is_set():
            await asyncio.sleep(0.001)
        dropped.cancel()
        await asyncio.gather(dropped, return_exceptions=True)
        again = asyncio.create_task(service.engine.embed(other, request_id="same"))
        await asyncio.sleep(0)
        begun.set()
        found = await again
        assert found.prompt_token_ids == other
        assert found.embedding == pytest.approx(alone.embedding, abs=1e-5)

    asyncio.run(run())
    service.wait_idle()


def test_embeddings_may_be_cancelled(service: Service) -> None:
    async def run() -> None:
        [prompt] = prompts_of(40)
        task = asyncio.create_task(service.engine.embed(prompt, request_id="e"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        found = await service.engine.embed(prompt, request_id="e")
        assert sum(x * x for x in found.embedding) == pytest.approx(1.0, abs=1e-5)

    asyncio.run(run())
    service.wait_idle()


def test_what_cannot_be_honoured_is_said_at_once(service: Service) -> None:
    async def run() -> None:
        for prompt, match in (([], "empty"), ([1] * 500, "maximum context"), ([9999], "outside")):
            with pytest.raises(EngineError, match=match):
                await collect(service, prompt, LONG)
        with pytest.raises(EngineError, match="enable_lora"):
            await anext(service.engine.generate([1], LONG, request_id="l", lora="none"))
        with pytest.raises(EngineError, match="sleep level 2"):
            await service.engine.sleep(2)
        stream = service.engine.generate([1, 2], LONG, request_id="same")
        await anext(stream)
        with pytest.raises(EngineError, match="in use"):
            await anext(service.engine.generate([1, 2], LONG, request_id="same"))
        await stream.aclose()  # pyrefly: ignore[missing-attribute]

    asyncio.run(run())
    assert service.engine.num_unfinished == 0


@pytest.mark.slow
def test_a_step_that_raises_ends_every_request_and_is_reported(
    doomed: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, free = doomed.core, step_when_told(doomed.engine, monkeypatch)

    async def run() -> None:
        tasks = [asyncio.create_task(collect(doomed, p, LONG)) for p in prompts_of(5, 9, 40)]
        tasks.append(asyncio.create_task(collect(doomed, [3], LONG, delay=0.5)))
        while core.scheduler.running == []:
            await asyncio.sleep(0.001)
        for name in ("forward", "decode"):
            monkeypatch.setattr(core.runner, name, _raise)
        free.set()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120)
        assert [type(result) for result in results] == [EngineDead] * 4
        assert "out of order" in str(results[0])
        for late in (
            collect(doomed, [1], LONG),
            doomed.engine.embed([1], request_id="e"),
            doomed.engine.wake(),
        ):
            with pytest.raises(EngineDead):
                await asyncio.wait_for(late, 120)

    asyncio.run(run())
    assert isinstance(doomed.engine.error(), RuntimeError)


def _raise(*_: Any) -> None:
    raise RuntimeError("out of order")


def test_a_step_that_cannot_be_compiled_is_the_engines_end() -> None:
    parts = build_engine(model(), EngineConfig(max_num_seqs=1, max_num_batched_tokens=1))
    parts.programs.announce("broken", _raise)
    engine = AsyncEngine(parts)
    engine.start()
    engine.wait_ready()
    assert isinstance(engine.error(), RuntimeError)

    async def run() -> None:
        with pytest.raises(EngineDead, match="out of order"):
            await asyncio.wait_for(engine.embed([1], request_id="e"), 120)

    asyncio.run(run())
    engine.shutdown()


def test_shutdown_does_not_wait_for_compiling() -> None:
    parts = build_engine(model(), EngineConfig(max_num_seqs=1, max_num_batched_tokens=1))
    begun, go_on = threading.Event(), threading.Event()
    for number in range(4):

        def make() -> None:
            begun.set()
            go_on.wait(120)

        parts.programs.announce(f"slow {number}", make)
    close = parts.programs.close
    parts.programs.close = lambda: (close(), go_on.set())[0]  # pyrefly: ignore[bad-assignment]
    engine = AsyncEngine(parts)
    engine.start()
    assert begun.wait(120)
    engine.shutdown()
    assert engine.error() is None
    assert not engine.readiness().ready


@pytest.mark.slow
def test_after_shutdown_requests_are_refused(
    doomed: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_when_told(doomed.engine, monkeypatch)

    async def run() -> None:
        running = asyncio.create_task(collect(doomed, [1, 2, 3], LONG))
        while doomed.core.scheduler.running == []:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(doomed.engine.shutdown)
        with pytest.raises(EngineDead, match="shut down"):
            await asyncio.wait_for(running, 120)
        for late in (
            collect(doomed, [1], LONG),
            doomed.engine.embed([1], request_id="e"),
            doomed.engine.wake(),
        ):
            with pytest.raises(EngineDead, match="shut down"):
                await asyncio.wait_for(late, 120)

    asyncio.run(run())
    assert doomed.engine.error() is None


@pytest.mark.slow
def test_shutdown_may_wait_for_what_runs(doomed: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    free = step_when_told(doomed.engine, monkeypatch)

    async def run() -> list[RequestOutput]:
        running = asyncio.create_task(collect(doomed, [1, 2, 3], LONG))
        while doomed.core.scheduler.running == []:
            await asyncio.sleep(0.001)
        ending = asyncio.create_task(asyncio.to_thread(doomed.engine.shutdown, 240.0))
        while doomed.engine._stop_at is None:
            await asyncio.sleep(0.001)
        free.set()
        await ending
        return await running

    assert len(asyncio.run(run())[-1].outputs[0].token_ids) == 80


def test_sleep_and_wake_while_requests_run_change_no_token(service: Service) -> None:
    seeded = dataclasses.replace(LONG, temperature=1.0, seed=8)
    requests = list(zip(prompts_of(12, 33, 7), (LONG, seeded, LONG), strict=True))

    async def run() -> list[list[int]]:
        return [r[-1].outputs[0].token_ids for r in await _together(service, requests)]

    async def interrupted() -> list[list[int]]:
        task = asyncio.create_task(run())
        for _ in range(4):
            await asyncio.sleep(0.02)
            await service.engine.sleep()
            assert service.engine.is_sleeping
            assert service.free_pages == service.pages
            turns = service.core.num_requests
            await asyncio.sleep(0.02)
            assert service.core.num_requests == turns, "something finished asleep"
            await service.engine.wake()
            assert not service.engine.is_sleeping
        return await task

    assert asyncio.run(interrupted()) == asyncio.run(run())


def test_a_request_may_leave_while_the_engine_sleeps(service: Service) -> None:
    async def run() -> None:
        await service.engine.sleep()
        task = asyncio.create_task(collect(service, [1, 2, 3], LONG))
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await service.engine.wake()
        assert len((await collect(service, [1, 2, 3], LONG))[-1].outputs[0].token_ids) == 80

    asyncio.run(run())


@pytest.mark.slow
def test_new_weights_while_requests_run_mark_the_tokens_they_made(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = step_when_told(service.engine, monkeypatch, free_steps=4)
    old = service.model
    changed = jax.tree.map(lambda leaf: leaf * 1.3, nnx.split(old)[1])
    [prompt] = prompts_of(11)

    async def run() -> tuple[list[RequestOutput], list[RequestOutput]]:
        params = dataclasses.replace(LONG, output_kind=DELTA)
        stream = service.engine.generate(prompt, params, request_id="across")
        across = [await anext(stream)]
        await service.engine.update_weights(changed, 7)
        free.set()
        across += [output async for output in stream]
        new = await collect(service, prompt + joined(across)[0].token_ids[:40], LONG)
        await service.engine.update_weights(old, 0)
        return across, new

    across, _ = asyncio.run(run())
    [output] = joined(across)
    switch = output.versions.index(7)
    assert switch > 0
    assert output.versions == [0] * switch + [7] * (80 - switch)
    before = asyncio.run(collect(service, prompt, LONG))[-1].outputs[0]
    assert before.token_ids[:switch] == output.token_ids[:switch]
    assert before.token_ids != output.token_ids
    assert set(before.versions) == {0}

    async def rest() -> list[int]:
        await service.engine.update_weights(changed, 8)
        head = prompt + output.token_ids[:switch]
        found = await collect(service, head, dataclasses.replace(LONG, max_tokens=80 - switch))
        await service.engine.update_weights(old, 0)
        return found[-1].outputs[0].token_ids

    assert asyncio.run(rest()) == output.token_ids[switch:]


def test_clients_of_several_event_loops(service: Service) -> None:
    prompts = prompts_of(6, 15, 22, 9)
    expected = [asyncio.run(collect(service, p, LONG))[-1].outputs for p in prompts]
    found: dict[int, Any] = {}

    def client(index: int) -> None:
        async def run() -> None:
            same = [collect(service, prompts[index], LONG) for _ in range(3)]
            found[index] = [outputs[-1].outputs for outputs in await asyncio.gather(*same)]

        asyncio.run(run())

    threads = [threading.Thread(target=client, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found[index] for index in range(4)] == [[one] * 3 for one in expected]


@pytest.mark.slow
def test_many_streams_with_random_aborts_leave_all_pages_free(service: Service) -> None:
    rng = random.Random(0)

    async def client(index: int) -> int:
        prompt = [rng.randrange(32) for _ in range(rng.randint(1, 60))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            max_tokens=rng.randint(1, 40),
            output_kind=rng.choice([DELTA, FINAL]),
            logprobs=rng.choice([None, 1]),
        )
        await asyncio.sleep(rng.random() * 0.5)
        fate = rng.random()
        if fate < 0.3:
            return await drop_after(service, prompt, params, rng.randint(0, 9))
        task = asyncio.create_task(collect(service, prompt, params))
        if fate < 0.6:
            await asyncio.sleep(rng.random() * 0.2)
            task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(result, asyncio.CancelledError):
            return 0
        assert result[-1].finished
        return 1

    async def run() -> int:
        return sum(await asyncio.wait_for(asyncio.gather(*map(client, range(64))), 600))

    assert asyncio.run(run()) > 8  # some 25 of 64 are meant to end
    service.wait_idle()
    assert service.free_pages == service.pages
    assert service.core.scheduler.has_work is False
    assert service.engine.num_unfinished == 0


async def _together(service: Service, requests: list[Any]) -> list[list[RequestOutput]]:
    return await asyncio.gather(*(collect(service, p, params) for p, params in requests))
