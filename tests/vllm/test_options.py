"""What else vLLM offers over Fornax's worker: adapters, grammars, devices, sleep; and what not."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.vllm.conftest import SIZES, Pair, prompts_of, start, stop
from tests.vllm.models import CONFIGS, make
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

import fornax.llm
import vllm

GREEDY = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
PROMPTS = prompts_of(3, 33, 17, 25, 1, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    outputs = fornax.llm.LLM(folder, **SIZES).generate(PROMPTS, fornax.llm.SamplingParams(**GREEDY))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def lora_pair(folder: Path) -> Iterator[Pair]:
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    theirs = start(folder, **options, structured_outputs_config={"backend": "guidance"})
    yield Pair("llama", folder, theirs, fornax.llm.LLM(folder, **SIZES, **options))
    stop(theirs)


def write_adapter(folder: Path, seed: int) -> Path:
    """An adapter of all layers' query and down projections, as PEFT saves it."""
    config, rng, tensors = CONFIGS["llama"], np.random.default_rng(seed), {}
    widths = {
        "self_attn.q_proj": (config.hidden_size, config.num_heads * config.head_width),
        "mlp.down_proj": (config.intermediate_size, config.hidden_size),
    }
    for layer in range(config.num_layers):
        for name, (inputs, outputs) in widths.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = rng.normal(size=(4, inputs)).astype(np.float32)
            up = 0.3 * rng.normal(size=(outputs, 4))
            tensors[f"{at}.lora_B.weight"] = up.astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def test_adapters_in_one_batch(lora_pair: Pair, expected: list[list[int]], tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / str(seed), seed) for seed in (1, 2)]
    requests = [LoRARequest(f"a{i}", i, str(path)) for i, path in enumerate(folders, start=1)]
    turn = [None, *requests] * 2
    found = lora_pair.tokens(PROMPTS, GREEDY, lora_request=turn)
    for request in requests:
        lora_pair.ours.load_lora(request.lora_name, request.lora_path)
    names = [None if request is None else request.lora_name for request in turn]
    assert found == lora_pair.our_tokens(PROMPTS, GREEDY, lora=names)
    assert [f == e for f, e in zip(found, expected, strict=True)] == [True, False, False] * 2
    assert lora_pair.worker.list_loras() == {1, 2}
    assert lora_pair.worker.remove_lora(1)
    assert not lora_pair.worker.remove_lora(1)
    assert lora_pair.worker.list_loras() == {2}
    assert lora_pair.worker._programs.late == []


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [({"choice": ["fox", "lazy dog"]}, "fox|lazy dog"), ({"regex": r"[0-9]{3}-[a-c]+x"}, None)],
)
def test_grammars_constrain_each_request_of_its_own(
    lora_pair: Pair, expected: list[list[int]], constraint: dict[str, Any], pattern: str | None
) -> None:
    wanted = {"temperature": 1.0, "seed": 3, "max_tokens": 60}
    wanted["structured_outputs"] = StructuredOutputsParams(**constraint)
    each = [GREEDY, wanted, GREEDY, wanted]
    outputs = lora_pair.outputs(PROMPTS[:4], each)
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [expected[0], expected[2]]
    for i in (1, 3):
        completion = outputs[i].outputs[0]
        assert re.fullmatch(pattern or constraint["regex"], completion.text), completion.text
        assert completion.finish_reason == "stop"


def test_sleep_gives_the_cache_back(lora_pair: Pair, expected: list[list[int]]) -> None:
    lora_pair.theirs.llm_engine.sleep(1)
    assert lora_pair.worker._runner.executor.kv is None
    lora_pair.theirs.llm_engine.wake_up()
    assert lora_pair.tokens(PROMPTS, GREEDY) == expected


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprob_token_ids": [3]}, "logprob_token_ids"),
        ({"extra_args": {"a": 1}}, "extra_args"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused_by_name(
    lora_pair: Pair, expected: list[list[int]], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        lora_pair.tokens(PROMPTS[:1], {**GREEDY, **params})
    assert lora_pair.tokens(PROMPTS[:1], GREEDY) == expected[:1]


def test_logits_that_are_not_finite_are_reported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's own worker does: the request continues, and counts as corrupted."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][:] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    theirs = start(tmp_path)
    worker = theirs.llm_engine.model_executor.driver_worker.worker
    seen: list[Any] = []
    sample = worker.sample_tokens

    def record(grammar_output: Any) -> Any:
        seen.append(sample(grammar_output))
        return seen[-1]

    monkeypatch.setattr(worker, "sample_tokens", record)
    theirs.generate({"prompt_token_ids": [3, 4]}, vllm.SamplingParams(**GREEDY), use_tqdm=False)
    assert len(seen) == GREEDY["max_tokens"]
    assert all(list((output.num_nans_in_logits or {}).values()) == [1] for output in seen)
    stop(theirs)


def test_tensor_parallel_over_devices_of_one_worker(
    folder: Path, expected: list[list[int]]
) -> None:
    """Eight virtual devices are there; one process drives two of them."""
    theirs = start(folder, tensor_parallel_size=2)
    each = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = theirs.generate(each, vllm.SamplingParams(**GREEDY), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    runner = theirs.llm_engine.model_executor.driver_worker.worker._runner
    assert len(runner.executor.kv[0].sharding.device_set) == 2
    stop(theirs)


def test_bfloat16_when_asked_for(folder: Path) -> None:
    theirs = start(folder, dtype="bfloat16")
    ours = fornax.llm.LLM(folder, **SIZES, dtype="bfloat16")
    pair = Pair("llama", folder, theirs, ours)
    assert pair.tokens(PROMPTS, GREEDY) == pair.our_tokens(PROMPTS, GREEDY)
    assert pair.worker._limits.cache_dtype == "bfloat16"
    stop(theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 must be 1"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config is not supported",
        ),
        ({"logprobs_mode": "processed_logits"}, "logprobs_mode=processed_logits"),
        ({"load_format": "dummy"}, "load_format=dummy"),
        ({"runner": "pooling"}, "runner=pooling"),
        ({"hf_overrides": {"rope_theta": 5.0}}, "hf_overrides is not supported"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds is not supported"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_worker_cannot_do_is_refused_at_the_start(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        start(folder, **options)
