"""Adapters while serving: several in a batch, loaded and unloaded beside running requests."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.llm.helpers import SIZES, Figures, completions, prompts_of
from tests.integration.llm.streams import step_when_told
from tests.unit.llm.test_lora import RANK, merged, model_of, write_adapter

from fornax.config.errors import EngineError
from fornax.llm import LLM, RequestOutputKind, SamplingParams
from fornax.llm.async_engine import AsyncEngine
from fornax.llm.build import build_engine
from fornax.llm.config import EngineConfig
from fornax.llm.outputs import EmbeddingOutput
from fornax.models import Decoder, generate

FAMILY = "phi3"
NEW = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=45, output_kind=RequestOutputKind.DELTA)
OPTIONS = {**SIZES, "enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


@dataclasses.dataclass(frozen=True)
class Oracles:
    """Adapters a, b and c in folders, and models into which they are merged."""

    folder: Path
    models: dict[str | None, Decoder]

    def path(self, name: str) -> str:
        return str(self.folder / name)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    folder = tmp_path_factory.mktemp("adapters")
    models: dict[str | None, Decoder] = {None: model_of(FAMILY)}
    for seed, name in enumerate("abc"):
        tensors = write_adapter(folder / name, FAMILY, seed=seed, alpha=24)
        models[name] = merged(FAMILY, tensors, 24 / RANK)
    return Oracles(folder, models)


def expected_of(
    adapters: Oracles, prompts: list[list[int]], names: list[str | None]
) -> list[list[int]]:
    return [
        generate(adapters.models[name], [prompt], max_tokens=NEW, stop_tokens=())[0]
        for prompt, name in zip(prompts, names, strict=True)
    ]


@pytest.mark.slow
def test_each_request_has_its_adapter_and_nothing_is_compiled(
    adapters: Oracles,
) -> None:
    figures = Figures()
    llm = LLM(model_of(FAMILY), **OPTIONS, num_gpu_blocks_override=17, observer=figures)
    for name in "abc":
        llm.load_lora(name, adapters.path(name))
    names: list[str | None] = ["a", None, "b", "c", "a", "c", None]
    prompts = prompts_of(12, 12, 20, 3, 31, 8, 17)
    expected = expected_of(adapters, prompts, names)
    assert expected != expected_of(adapters, prompts, [None] * 7), "adapters change nothing"
    assert completions(llm.generate(prompts, GREEDY, lora=names)) == expected
    assert figures.preemptions > 0
    llm.unload_lora("b")
    with pytest.raises(EngineError, match="no adapter 'b'"):
        llm.generate(prompts, GREEDY, lora="b")
    with pytest.raises(EngineError, match="no adapter 'b'"):
        llm.unload_lora("b")
    with pytest.raises(EngineError, match="loaded already"):
        llm.load_lora("a", adapters.path("a"))
    llm.load_lora("b", adapters.path("c"))
    again = expected_of(adapters, prompts, ["c"] * 7)
    assert completions(llm.generate(prompts, GREEDY, lora="b")) == again
    assert not figures.compiled
    assert llm.num_free_pages == llm.num_pages


@pytest.mark.slow
def test_adapters_stay_through_sleep_and_new_weights(adapters: Oracles) -> None:
    llm = LLM(model_of(FAMILY), **OPTIONS)
    llm.load_lora("a", adapters.path("a"))
    [prompt] = prompts_of(14)
    before = completions(llm.generate([prompt], GREEDY, lora="a"))
    assert before == expected_of(adapters, [prompt], ["a"])
    llm.sleep()
    llm.wake()
    assert completions(llm.generate([prompt], GREEDY, lora="a")) == before
    llm.update_weights(adapters.models["b"], version=1)
    other = completions(llm.generate([prompt], GREEDY, lora="a"))
    assert other != before
    assert completions(llm.generate([prompt], GREEDY)) == expected_of(adapters, [prompt], ["b"])
    llm.update_weights(adapters.models[None], version=2)
    assert completions(llm.generate([prompt], GREEDY, lora="a")) == before


@pytest.mark.slow
def test_without_enable_lora_it_is_named() -> None:
    llm = LLM(model_of(FAMILY), **SIZES)
    with pytest.raises(EngineError, match="enable_lora"):
        llm.load_lora("a", "nowhere")
    with pytest.raises(EngineError, match="enable_lora"):
        llm.generate([[1, 2]], GREEDY, lora="a")


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    parts = build_engine(model_of(FAMILY), EngineConfig(**OPTIONS), observer=Figures())
    engine = AsyncEngine(parts)
    engine.start()
    engine.wait_ready()
    yield engine
    engine.shutdown()
    assert engine.error() is None
    pools = parts.engine.scheduler.manager.pools
    assert sum(pool.available for pool in pools) == sum(pool.num_pages - 1 for pool in pools)


async def _tokens(engine: AsyncEngine, prompt: list[int], name: str | None, request: str) -> Any:
    stream = engine.generate(prompt, LONG, request_id=request, lora=name)
    return [token async for output in stream for token in output.outputs[0].token_ids]


@pytest.mark.slow
def test_loading_and_unloading_beside_running_requests(
    engine: AsyncEngine, adapters: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(15, 9, 18)
    free = step_when_told(engine, monkeypatch, free_steps=4)

    async def run() -> None:
        for name in "ab":
            await engine.add_lora(name, adapters.path(name))
        assert set(engine.loras()) == {"a", "b"}
        running = [
            asyncio.create_task(_tokens(engine, prompt, name, str(name)))
            for prompt, name in zip(prompts, (None, "a", "b"), strict=True)
        ]
        await asyncio.sleep(0.01)
        await engine.remove_lora("b")
        free.set()
        with pytest.raises(EngineError, match="unloaded"):
            await running[2]
        await engine.add_lora("b", adapters.path("c"))
        new = await _tokens(engine, prompts[2], "b", "again")
        assert new[:NEW] == expected_of(adapters, [prompts[2]], ["c"])[0]
        assert (await running[0])[:NEW] == expected_of(adapters, prompts[:1], [None])[0]
        assert (await running[1])[:NEW] == expected_of(adapters, prompts[1:2], ["a"])[0]

    asyncio.run(run())


def test_an_adapter_may_go_while_requests_for_it_wait(
    engine: AsyncEngine, adapters: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions and embeddings, queued or not yet admitted."""
    prompts = prompts_of(20, 21, 22, 23, 24, 25)
    free = step_when_told(engine, monkeypatch)

    async def run() -> None:
        await engine.add_lora("a", adapters.path("a"))
        stays = asyncio.create_task(_tokens(engine, prompts[0], None, "stays"))
        goes = [asyncio.create_task(_tokens(engine, p, "a", f"g{len(p)}")) for p in prompts]
        goes += [
            asyncio.create_task(engine.embed(p, request_id=f"e{len(p)}", lora="a")) for p in prompts
        ]
        await asyncio.sleep(0.002)
        await engine.remove_lora("a")
        free.set()
        results = await asyncio.wait_for(asyncio.gather(*goes, return_exceptions=True), 120)
        assert {type(result) for result in results} <= {EngineError, list, EmbeddingOutput}
        assert any(isinstance(result, EngineError) for result in results[:6])
        assert len(await stays) == 44

    asyncio.run(run())
    # Admitted before, added after: as when another thread unloads in between.
    request = engine._input_processor.request([1, 2], GREEDY, request_id="late")
    request.completions[0].sequence.lora = "a"
    with pytest.raises(EngineError, match="no adapter 'a'"):
        engine._engine.add(request)


@pytest.mark.slow
def test_unloading_what_is_not_there_loses_no_tokens(engine: AsyncEngine) -> None:
    [prompt] = prompts_of(10)

    async def run() -> tuple[list[int], list[int]]:
        alone = await _tokens(engine, prompt, None, "alone")
        beside = asyncio.create_task(_tokens(engine, prompt, None, "beside"))
        for _ in range(20):
            with pytest.raises(EngineError, match="no adapter"):
                await engine.remove_lora("never")
        return alone, await asyncio.wait_for(beside, 120)

    alone, beside = asyncio.run(run())
    assert alone == beside
