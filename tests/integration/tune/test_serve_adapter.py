"""An adapter trained here: merged, kept in PEFT's format, and served beside its base."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from fornax.adapters import LoRA, is_adapted
from fornax.cli.main import main
from fornax.config.errors import ConfigError
from fornax.llm import LLM, SamplingParams
from fornax.train import convert, load_decoder, load_run, model_config, tokenizer_folder
from fornax.tune import SFTConfig, tune

PROMPT = "What follows red?"


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short LoRA run that changes what the model says."""
    folder = tmp_path_factory.mktemp("tuned") / "sft"
    config = SFTConfig(
        model=str(tiny / "model"),
        data=str(tiny / "chats.jsonl"),
        lora=LoRA(rank=4, alpha=32, rank_pattern={"mlp/down": 2}),
        max_length=64,
        batch_size=8,
        steps=12,
    )
    tune(config, folder, progress="quiet")
    return folder


def test_checkpoints_hold_adapters_only(run: Path) -> None:
    loaded = load_run(run, merge=False)
    assert is_adapted(loaded.model)
    assert loaded.config.model == model_config(run)
    stored = sum(file.stat().st_size for file in (run / "checkpoints").rglob("*") if file.is_file())
    assert tokenizer_folder(run) == run
    whole = sum(f.stat().st_size for f in Path(str(loaded.config.base)).glob("*.safetensors"))
    assert stored < 2 * whole  # of adapters thrice over: themselves and Adam's two moments


def test_merged_and_apart_it_says_the_same(run: Path, tiny: Path, tmp_path: Path) -> None:
    assert main(["convert", str(run), "--merge-lora", "--out", str(tmp_path / "hf")]) == 0
    assert main(["convert", str(run), "--out", str(tmp_path / "adapter")]) == 0
    for folder in ("hf", "adapter"):
        parity = json.loads((tmp_path / folder / "parity.json").read_text())
        assert parity["max_abs_difference"] < 1e-4
        assert parity["same_top_token"] == 1
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 8}
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    adapted = LLM(tiny / "model", enable_lora=True, max_lora_rank=4, max_loras=1, **options)
    adapted.load_lora("sft", tmp_path / "adapter")
    plain, tuned = (
        adapted.generate([PROMPT], greedy, lora=lora)[0].outputs[0].token_ids
        for lora in (None, "sft")
    )
    assert plain != tuned, "the adapter changes nothing"
    merged = LLM(tmp_path / "hf", **options).generate([PROMPT], greedy)
    assert merged[0].outputs[0].token_ids == tuned
    tokens = jnp.arange(20)[None] % 280
    np.testing.assert_allclose(
        load_decoder(tmp_path / "hf")(tokens), load_decoder(run)(tokens), atol=1e-5
    )


def test_what_cannot_be_converted_is_said(run: Path, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no adapters to merge"):
        convert(tiny / "model", tmp_path / "x", merge_lora=True)
    with pytest.raises(ConfigError, match="float32"):
        convert(run, tmp_path / "x", dtype="bfloat16")
