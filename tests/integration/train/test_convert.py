"""Runs to Hugging Face directories and back, with the logits of both measured; `init_from` both."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fornax.checkpoint import Checkpointer
from fornax.config import ConfigError, from_mapping
from fornax.models import (
    DecoderConfig,
    create_decoder,
    load_pretrained,
    num_parameters,
    save_pretrained,
)
from fornax.optim import EMA
from fornax.train import (
    EvalConfig,
    TrainConfig,
    convert,
    load_decoder,
    load_run,
    read_metrics,
    train,
)


@pytest.fixture(scope="module")
def config(settings: dict[str, Any]) -> TrainConfig:
    small = {**settings, "steps": 4, "save_every": 2, "eval": {}}
    return from_mapping(TrainConfig, small)


@pytest.fixture(scope="module")
def run_dir(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "run"
    train(config, path, progress="none")
    return path


def logits(model: Any) -> np.ndarray:
    tokens = np.arange(40, dtype=np.int32)[None]
    return np.asarray(jax.jit(lambda tokens: model(tokens))(tokens))


@pytest.mark.slow
def test_a_run_goes_to_hugging_face_and_back_unchanged(run_dir: Path, tmp_path: Path):
    there = convert(run_dir, tmp_path / "hf")
    assert (there.prompts, there.max_abs_difference, there.same_top_token) == ("text", 0.0, 1.0)
    assert there.tokens > 100
    assert there.max_abs_logit > 0
    written = json.loads((tmp_path / "hf" / "parity.json").read_text())
    assert written == dataclasses.asdict(there)
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    back = convert(tmp_path / "hf", tmp_path / "run")
    assert back.max_abs_difference == 0.0
    original = logits(load_run(run_dir).model)
    np.testing.assert_array_equal(original, logits(load_pretrained(tmp_path / "hf")))
    np.testing.assert_array_equal(original, logits(load_run(tmp_path / "run").model))


@pytest.mark.slow
def test_an_earlier_step_can_be_converted(run_dir: Path, tmp_path: Path):
    assert Checkpointer(run_dir / "checkpoints").all_steps() == [2, 4]
    convert(run_dir, tmp_path / "early", step=2)
    early = logits(load_pretrained(tmp_path / "early"))
    np.testing.assert_array_equal(early, logits(load_run(run_dir, step=2).model))
    assert np.abs(early - logits(load_run(run_dir).model)).max() > 0


@pytest.mark.slow
def test_another_dtype_is_measured_not_assumed(run_dir: Path, tmp_path: Path):
    parity = convert(run_dir, tmp_path / "hf", dtype="bfloat16")
    assert parity.dtype == "bfloat16"
    assert 0 < parity.max_abs_difference < 0.05
    model = load_pretrained(tmp_path / "hf")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model.output_weights())} == {"bfloat16"}


@pytest.mark.slow
def test_float16_is_converted_once_a_dtype_is_chosen(tmp_path: Path):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_layers": 1}
    save_pretrained(create_decoder(DecoderConfig(**sizes, num_heads=2)), tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    save_file({name: x.astype(np.float16) for name, x in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match="stored as float16; say which dtype"):
        convert(tmp_path / "hf", tmp_path / "run")
    convert(tmp_path / "hf", tmp_path / "run", dtype="bfloat16")
    wanted = load_pretrained(tmp_path / "hf", "bfloat16").embed.embedding.get_value()
    found = load_run(tmp_path / "run").model.embed.embedding.get_value()
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


def test_what_is_neither_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"neither a run directory .* nor a Hugging Face"):
        convert(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "hugging face", "converted run"])
def test_training_starts_from_given_weights(
    config: TrainConfig, run_dir: Path, tmp_path: Path, kind: str
):
    source = run_dir
    if kind != "run":
        convert(run_dir, source := tmp_path / "hf")
    if kind == "converted run":
        convert(tmp_path / "hf", source := tmp_path / "converted")
    warm = dataclasses.replace(
        config, model=None, init_from=str(source), steps=1, eval=EvalConfig(every=1)
    )
    train(warm, tmp_path / "warm", progress="none")
    [record] = read_metrics(tmp_path / "warm" / "metrics.jsonl")
    cold = read_metrics(run_dir / "metrics.jsonl")
    assert record["loss"] < cold[0]["loss"] - 0.01  # the first batch again, better known now
    taken = load_run(tmp_path / "warm").config.model
    assert taken is not None
    assert config.model is not None
    assert num_parameters(taken) == num_parameters(config.model)
    moved = np.abs(logits(load_decoder(tmp_path / "warm")) - logits(load_decoder(run_dir)))
    assert 0 < moved.max() < 1.0


def test_a_model_that_is_not_that_of_the_weights_is_refused(
    config: TrainConfig, run_dir: Path, tmp_path: Path
):
    assert config.model is not None
    other = dataclasses.replace(config.model, num_layers=3)
    wrong = dataclasses.replace(config, model=other, init_from=str(run_dir))
    with pytest.raises(ConfigError, match=r"model.num_layers: 2 -> 3"):
        train(wrong, tmp_path / "run", progress="none")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.exhaustive
def test_averaged_parameters_are_what_is_converted(
    config: TrainConfig, run_dir: Path, tmp_path: Path
):
    averaged = dataclasses.replace(
        config, optim=dataclasses.replace(config.optim, ema=EMA(decay=0.9))
    )
    train(averaged, tmp_path / "run", progress="none")
    convert(tmp_path / "run", tmp_path / "hf")
    found = logits(load_pretrained(tmp_path / "hf"))
    np.testing.assert_array_equal(found, logits(load_run(tmp_path / "run").model))
    assert np.abs(found - logits(load_run(run_dir).model)).max() > 0
