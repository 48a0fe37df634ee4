"""Every kind of request at once, aborted, preempted, and beside commands: each result is the same
as alone, and nothing is left behind."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.integration.llm.helpers import Figures
from tests.integration.llm.streams import Service, collect, drop_after, joined, make_service, model

from fornax.config.errors import EngineError
from fornax.llm import RequestOutput, RequestOutputKind, SamplingParams
from fornax.llm.config import NGram
from fornax.llm.sampling_params import StructuredOutputsParams
from fornax.models.families.convert import family_for
from fornax.models.layout import plan_layout

CLIENTS, TURNS, CASES = 12, 14, 30
Case = tuple[list[int], SamplingParams]
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
SPECULATION = NGram(prompt_lookup_min=1, num_speculative_tokens=3)


@pytest.fixture(
    scope="module",
    params=[None, pytest.param(SPECULATION, marks=pytest.mark.exhaustive)],
    ids=["plain", "ngram"],
)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    figures = Figures()
    options = {**OPTIONS, "speculative_config": request.param}
    service = make_service(figures, **options, num_gpu_blocks_override=42)
    yield service
    service.engine.shutdown()
    assert service.engine.error() is None
    assert figures.preemptions > 0, "the cache was large enough for all"
    assert not figures.compiled, "a program was compiled after the engine was ready"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders 0, 1 and 2."""
    folder = tmp_path_factory.mktemp("storm")
    layout = plan_layout(model(), family_for(model().config).names)
    for number in range(3):
        rng, tensors = np.random.default_rng(number), {}
        for tensor in layout:
            name = tensor.name.removesuffix(".weight")
            if name.endswith("_proj"):
                for part, shape in (("A", (4, tensor.shape[1])), ("B", (tensor.shape[0], 4))):
                    key = f"base_model.model.{name}.lora_{part}.weight"
                    tensors[key] = 0.3 * rng.normal(size=shape).astype(np.float32)
        at = folder / str(number)
        at.mkdir()
        save_file(tensors, at / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
        (at / "adapter_config.json").write_text(json.dumps(config))
    return folder


def draw_params(rng: random.Random) -> SamplingParams:
    """Any mixture of what a request may ask for."""
    options: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 20, 50])}
    options["temperature"] = rng.choice([0.0, 1.0])
    if options["temperature"]:
        options |= {"seed": rng.randrange(3), "n": rng.choice([1, 1, 2, 3])}
    sometimes: dict[str, Any] = {
        "logprobs": rng.choice([0, 3]),
        "prompt_logprobs": rng.choice([0, 2]),
        "stop": ["e", "th"],
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "min_tokens": 1,
        "bad_words": ["a", "the"],
        "structured_outputs": StructuredOutputsParams(regex="[a-d]{3,40}"),
        "top_k": 5,
        "ignore_eos": True,
        "stream_interval": 3,
    }
    options |= {name: value for name, value in sometimes.items() if rng.random() < 0.2}
    return SamplingParams(output_kind=rng.choice(list(RequestOutputKind)), **options)


def draw_cases(rng: random.Random) -> list[Case]:
    """Prompts, some of which begin alike."""
    prompts = [[rng.randrange(300) for _ in range(rng.randint(1, 100))] for _ in range(10)]
    for _ in range(4):
        begin = prompts[0][: rng.randint(1, len(prompts[0]))]
        prompts.append(begin + [rng.randrange(300) for _ in range(9)])
    return [(rng.choice(prompts), draw_params(rng)) for _ in range(CASES)]


def result_of(outputs: list[RequestOutput], params: SamplingParams) -> Any:
    """What a client knows at the end, but for how it came."""
    last, scores = outputs[-1], outputs[-1].prompt_logprobs
    completions = last.outputs
    if params.output_kind is RequestOutputKind.DELTA:
        completions, scores = joined(outputs), outputs[0].prompt_logprobs
    return (
        [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in completions],
        [
            None if c.logprobs is None else [_rounded(each) for each in c.logprobs]
            for c in completions
        ],
        None if scores is None else [None if e is None else _rounded(e) for e in scores],
    )


def _rounded(entries: Any) -> list[Any]:
    return [(token, pytest.approx(entry.logprob, abs=1e-4)) for token, entry in entries.items()]


class Storm:
    """Clients and an administrator, all drawing from one generator."""

    def __init__(self, service: Service, adapters: Path, cases: list[Case], rng: random.Random):
        self.service, self.adapters, self.cases, self.rng = service, adapters, cases, rng
        self.alone: list[Any] = []
        self.compared = 0

    async def run(self) -> None:
        for prompt, params in self.cases:
            self.alone.append(result_of(await collect(self.service, prompt, params), params))
        commands = asyncio.create_task(self._command())
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client())
        commands.cancel()
        await asyncio.gather(commands, return_exceptions=True)
        await self.service.engine.wake()

    async def _client(self) -> None:
        for _ in range(TURNS):
            index = self.rng.randrange(len(self.cases))
            prompt, params = self.cases[index]
            kind = self.rng.random()
            loras = list(self.service.engine.loras())
            if kind < 0.3:
                await drop_after(self.service, prompt, params, self.rng.randint(0, 6))
            elif kind < 0.5 and loras:
                await self._with_adapter(prompt, params, self.rng.choice(loras))
            else:
                outputs = await collect(self.service, prompt, params)
                assert result_of(outputs, params) == self.alone[index]
                self.compared += 1

    async def _with_adapter(self, prompt: list[int], params: SamplingParams, name: str) -> None:
        try:
            if self.rng.random() < 0.3:
                await self.service.engine.embed(
                    prompt, request_id=f"e{self.rng.random()}", lora=name
                )
            else:
                await collect(self.service, prompt, params, lora=name)
        except EngineError as error:
            if "adapter" not in str(error):
                raise

    async def _command(self) -> None:
        engine = self.service.engine
        for version in range(10_000):
            await asyncio.sleep(self.rng.random() * 0.05)
            name, kind = str(self.rng.randrange(3)), self.rng.random()
            try:
                if kind < 0.3:
                    await engine.add_lora(name, str(self.adapters / name))
                elif kind < 0.55:
                    await engine.remove_lora(name)
                elif kind < 0.7:
                    await engine.sleep()
                    await engine.wake()
                elif kind < 0.85:
                    await engine.update_weights(self.service.model, version)
                else:
                    await engine.reset_prefix_cache()
            except EngineError as error:
                if "adapter" not in str(error):
                    raise


@pytest.mark.slow
def test_whatever_runs_beside_it_a_request_gets_the_same(service: Service, adapters: Path) -> None:
    rng = random.Random(5)
    storm = Storm(service, adapters, draw_cases(rng), rng)
    asyncio.run(asyncio.wait_for(storm.run(), 240))
    assert storm.compared > CLIENTS * TURNS / 3
    service.wait_idle()
    assert service.free_pages == service.pages
    assert service.engine.num_unfinished == 0
    core = service.core
    assert [core._owner, core._requests, core._failed] == [{}, {}, {}]
