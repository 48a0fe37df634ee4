"""An adapter trained here: merged, kept in PEFT's format, and served beside its base."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from tests.unit.tune.tiny import save_chats, save_model

from fornax.adapters import LoRA, LoRAParam, attach, is_adapted
from fornax.checkpoint import Checkpointer
from fornax.cli.main import main
from fornax.config import dump_yaml
from fornax.config.errors import ConfigError
from fornax.llm import LLM, SamplingParams
from fornax.models import ExpertsConfig
from fornax.train import (
    RunDirectory,
    convert,
    load_decoder,
    load_run,
    model_config,
    tokenizer_folder,
)
from fornax.tune import SFTConfig

PROMPT = "What follows red?"


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, state):
    return nnx.merge(graphdef, state)(np.arange(20)[None] + 40)


def logits(model) -> np.ndarray:
    return np.asarray(forward(*nnx.split(model)))


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `fornax tune sft` leaves behind, with adapters far from their start."""
    lora = LoRA(rank=4, alpha=8, rank_pattern={"mlp/down": 2})
    return save_run(tiny, tmp_path_factory.mktemp("tuned") / "sft", lora)


def save_run(tiny: Path, path: Path, lora: LoRA) -> Path:
    """A run directory of adapters on the tiny model."""
    directory = RunDirectory(path)
    config = SFTConfig(model=str(tiny / "model"), data="none.jsonl", lora=lora, steps=1)
    model = load_decoder(tiny / "model")
    attach(model, lora, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: (np.asarray(x) + 0.2 * rng.normal(size=x.shape)).astype(np.float32),
        nnx.to_pure_dict(nnx.state(model, LoRAParam)),
    )
    directory.create()
    directory.save_config(dump_yaml(config))
    with Checkpointer(directory.checkpoints, config.checkpoint) as checkpointer:
        # A head that gives values is next to the adapters after PPO.
        state = {"params": {**params, "value_head": {"kernel": np.ones((32,), np.float32)}}}
        checkpointer.save(1, state=state, config_yaml=dump_yaml(config), force=True)
    return directory.path


def test_a_run_of_adapters_is_a_model(run: Path, tiny: Path) -> None:
    """Everything that reads a model reads it: its config, its tokenizer, its weights merged."""
    assert model_config(run) == model_config(tiny / "model")
    assert tokenizer_folder(run) == tiny / "model"
    apart, whole = load_run(run, merge=False), load_decoder(run)
    assert is_adapted(apart.model)
    assert not is_adapted(whole)
    np.testing.assert_allclose(logits(apart.model), logits(whole), atol=1e-5)
    assert np.abs(logits(whole) - logits(load_decoder(tiny / "model"))).max() > 0.1


def test_merged_and_apart_it_says_the_same(run: Path, tiny: Path, tmp_path: Path) -> None:
    assert main(["convert", str(run), "--merge-lora", "--out", str(tmp_path / "hf")]) == 0
    assert main(["convert", str(run), "--out", str(tmp_path / "adapter")]) == 0
    for folder in ("hf", "adapter"):
        parity = json.loads((tmp_path / folder / "parity.json").read_text())
        assert parity["max_abs_difference"] < 1e-4
        assert parity["same_top_token"] == 1
    np.testing.assert_array_equal(logits(load_decoder(tmp_path / "hf")), logits(load_decoder(run)))


@pytest.mark.slow
def test_an_adapter_apart_from_a_base_in_few_bits_says_how_far_it_is(
    tiny: Path, tmp_path: Path
) -> None:
    run = save_run(tiny, tmp_path / "run", LoRA(rank=2, targets=("mlp/*",), quantize="nf4"))
    assert convert(run, tmp_path / "hf", merge_lora=True).max_abs_difference < 1e-4
    apart = logits(load_run(run, merge=False).model) - logits(load_decoder(run))
    assert np.abs(apart).max() > 1e-2
    assert convert(run, tmp_path / "adapter").max_abs_difference > 1e-2


def served(base: Path, run: Path, folder: Path) -> tuple[list[int], list[int], list[int]]:
    """Greedy tokens of the base, of the run's adapter beside it, and of the two merged."""
    convert(run, folder / "hf", merge_lora=True)
    convert(run, folder / "adapter")
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 8}
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    adapted = LLM(base, enable_lora=True, max_lora_rank=4, max_loras=1, **options)
    adapted.load_lora("sft", folder / "adapter")
    names = [None, "sft"]
    both = adapted.generate([PROMPT] * 2, greedy, lora=names)
    plain, tuned = (output.outputs[0].token_ids for output in both)
    merged = LLM(folder / "hf", **options).generate([PROMPT], greedy)
    return plain, tuned, merged[0].outputs[0].token_ids


@pytest.mark.exhaustive
def test_the_adapter_serves_beside_its_base(run: Path, tiny: Path, tmp_path: Path) -> None:
    plain, tuned, merged = served(tiny / "model", run, tmp_path)
    assert plain != tuned, "the adapter changes nothing"
    assert merged == tuned


@pytest.mark.exhaustive
def test_adapters_of_experts_are_trained_by_the_command_and_served(tmp_path: Path) -> None:
    experts = ExpertsConfig(num_experts=4, experts_per_token=2, intermediate_size=24)
    base = save_model(tmp_path, family="qwen3_moe", qk_norm="head", experts=experts)
    save_chats(tmp_path / "chats.jsonl")
    words = [
        "tune", "sft", "--model", base, "--data", tmp_path / "chats.jsonl", "--lora.rank", "4",
        "--max-length", "64", "--batch-size", "4", "--steps", "25", "--optim.learning-rate", "0.02",
        "--log.tensorboard=false", "--no-doctor", "--out", tmp_path / "run",
    ]  # fmt: skip
    assert main([str(word) for word in words]) == 0
    trained = nnx.state(load_run(tmp_path / "run", merge=False).model, LoRAParam)
    moved = nnx.to_pure_dict(trained)["layers"]["experts"]["down"]["lora_b"]
    assert np.all(np.any(np.asarray(moved) != 0, axis=(2, 3))), "an expert was not trained"
    plain, tuned, merged = served(base, tmp_path / "run", tmp_path)
    assert plain != tuned, "the adapter changes nothing"
    assert merged == tuned


def test_what_cannot_be_converted_is_said(run: Path, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no adapters to merge"):
        convert(tiny / "model", tmp_path / "x", merge_lora=True)
    with pytest.raises(ConfigError, match="float32"):
        convert(run, tmp_path / "x", dtype="bfloat16")
    (tiny / "model").rename(tiny / "moved")
    try:
        with pytest.raises(ConfigError, match=f"began at the model {tiny}/model, which is not"):
            load_decoder(run)
    finally:
        (tiny / "moved").rename(tiny / "model")
