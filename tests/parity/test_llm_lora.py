"""Adapters of every family, several in a batch, against transformers with merged weights.

The adapters have PEFT's files and names: each linear layer but the output, which is what PEFT
calls all-linear, and each expert's projections, which transformers holds in one tensor
(the files of gpt-oss, Llama 4 and Granite do too: no adapter has a name there).
"""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.memory import let_programs_go
from tests.parity.conftest import HfModel, oracle_logits
from tests.parity.test_llm_families import (
    SERVED,
    greedy_tokens,
    tokens_of,
    untied_oracle,
)

from fornax.config.errors import ConfigError
from fornax.llm import LLM, SamplingParams

pytestmark = pytest.mark.parity
NEW = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One way to make an adapter."""

    rank: int
    config: dict[str, Any]
    scale: float
    """Of B A."""
    wanted: Callable[[str], bool] = lambda name: True
    """Which of the linear layers have one."""


KINDS = {
    "whole": Kind(4, {"lora_alpha": 6}, 1.5),
    "attention": Kind(
        3,
        {"lora_alpha": 4, "use_rslora": True},
        4 / 3**0.5,
        lambda name: "attn" in name,
    ),
    "one-layer": Kind(2, {"lora_alpha": 5}, 2.5, lambda name: ".layers.1." in name),
}


@dataclasses.dataclass(frozen=True)
class Served:
    """A model in the engine, and in transformers with each adapter merged into its weights."""

    llm: LLM
    merged: dict[str | None, HfModel]
    folder: Path

    def greedy(self, prompts: list[list[int]], names: list[str | None]) -> list[list[int]]:
        return [
            greedy_tokens(self.merged[name], prompt, NEW)
            for prompt, name in zip(prompts, names, strict=True)
        ]


WHOLE = ("gpt_oss", "llama4_text", "granitemoehybrid")


@torch.no_grad()
def linear_weights(model: HfModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights [outputs, inputs] by the name of their layer in the family's files, as views."""
    for name, module in model.named_modules():
        joined = name.endswith(("in_proj_qkvz", "in_proj_ba"))  # head by head: none has an adapter
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and not joined:
            yield name, module.weight
        fused = isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter)
        if fused and model.config.model_type not in WHOLE:  # so in files too
            leaves = ("gate_proj", "up_proj", "down_proj")
            if model.config.model_type in ("mixtral", "minimax_m2"):
                name, leaves = name.replace(".mlp.", ".block_sparse_moe."), ("w1", "w3", "w2")
            for expert, both in enumerate(module.gate_up_proj):
                weights = (*both.chunk(2), module.down_proj[expert])
                for leaf, weight in zip(leaves, weights, strict=True):
                    yield f"{name}.{expert}.{leaf}", weight


def write_adapter(folder: Path, oracle: HfModel, kind: Kind, seed: int) -> HfModel:
    """Save an adapter as PEFT does; returns the oracle with it merged."""
    torch.manual_seed(seed)
    merged = copy.deepcopy(oracle)
    tensors, targets = {}, set()
    for name, weight in linear_weights(merged):
        if not kind.wanted(name):
            continue
        outputs, inputs = weight.shape
        down = torch.randn(kind.rank, inputs) * inputs**-0.5
        up = 0.4 * torch.randn(outputs, kind.rank)
        with torch.no_grad():
            weight += kind.scale * up @ down
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
        targets.add(name.rsplit(".", 1)[-1])
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": kind.rank,
        "bias": "none",
        "target_modules": sorted(targets),
        **kind.config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


MERGED = (
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gemma4",
    "gemma4-inputs",
    "gemma4-moe",
    "glm4-moe-lite",
    "mistral4",
)
"""Models whose adapters are merged before they are served."""


@pytest.mark.parametrize("name", MERGED)
def test_the_engine_says_which_adapters_to_merge(name: str, tmp_path: Path) -> None:
    untied_oracle(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"\(serve adapters\); merge the adapter into the model"):
        LLM(tmp_path, enable_lora=True)


IN_CI = (
    "llama-llama3",
    "mixtral-window",
    "qwen3-moe-options",
    "gpt-oss",
    "granite-hybrid",
)
"""One of each kind of layer with adapters of its own: dense, windows, experts, states."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in IN_CI else pytest.mark.exhaustive)
        for name in SERVED
        if name not in MERGED
    ],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("adapted")
    oracle = untied_oracle(request.param)
    oracle.save_pretrained(folder / "base")
    merged: dict[str | None, HfModel] = {None: oracle}
    for seed, (name, kind) in enumerate(KINDS.items()):
        merged[name] = write_adapter(folder / name, oracle, kind, seed)
    llm = LLM(
        folder / "base",
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=4,
    )
    for name in KINDS:
        llm.load_lora(name, folder / name)
    yield Served(llm, merged, folder)
    assert llm.num_free_pages == llm.num_pages, "pages were not given back"
    torch.set_num_threads(threads)
    let_programs_go()


def prompts_of(*lengths: int) -> list[list[int]]:
    """Beyond longrope's original length, so that its factors do not change on the way."""
    rng = np.random.default_rng(lengths)
    return [rng.integers(3, 97, length).tolist() for length in lengths]


def test_each_row_of_a_batch_has_its_own_adapter(served: Served) -> None:
    """Three adapters take turns in two slots, beside rows without one."""
    names: list[str | None] = [None, "whole", "attention", "one-layer", "whole", None, "attention"]
    prompts = prompts_of(17, 25, 19, 30, 18, 22, 21)
    expected = served.greedy(prompts, names)
    assert expected != served.greedy(prompts, [None] * len(names)), "adapters change nothing"
    assert tokens_of(served.llm.generate(prompts, GREEDY, lora=names)) == expected


def test_equal_prompts_do_not_share_pages_across_adapters(served: Served) -> None:
    [prompt] = prompts_of(23)
    names: list[str | None] = [None, *KINDS]
    expected = served.greedy([prompt] * len(names), names)
    assert len({tuple(row) for row in expected}) > 2, "adapters too alike to tell"
    for name, row in zip(names, expected, strict=True):
        outputs = [served.llm.generate([prompt], GREEDY, lora=name)[0] for _ in range(2)]
        assert tokens_of(outputs) == [row, row]
        assert [output.num_cached_tokens for output in outputs] == [0, 20]


def test_log_probabilities_are_the_merged_models(served: Served) -> None:
    prompts = prompts_of(20, 27)
    names: list[str | None] = ["whole", "one-layer"]
    asked = dataclasses.replace(GREEDY, logprobs=4)
    outputs = served.llm.generate(prompts, asked, lora=names)
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        tokens = prompt + output.outputs[0].token_ids
        logits = oracle_logits(served.merged[name], np.array([tokens]))[0].astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for place, entries in enumerate(output.outputs[0].logprobs or [], start=len(prompt) - 1):
            for token, entry in entries.items():
                assert abs(entry.logprob - expected[place, token]) < 2e-4


def test_a_name_loaded_anew_is_the_new_adapter(served: Served) -> None:
    llm, [prompt] = served.llm, prompts_of(24)
    before = tokens_of(llm.generate([prompt], GREEDY, lora="whole"))
    assert before == served.greedy([prompt], ["whole"])
    llm.unload_lora("whole")
    llm.load_lora("whole", served.folder / "attention")
    [output] = llm.generate([prompt], GREEDY, lora="whole")
    assert [output.outputs[0].token_ids] == served.greedy([prompt], ["attention"])
    assert output.num_cached_tokens == 0, "pages of the old adapter were reused"
    llm.unload_lora("whole")
    llm.load_lora("whole", served.folder / "whole")
    assert tokens_of(llm.generate([prompt], GREEDY, lora="whole")) == before
