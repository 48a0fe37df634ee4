"""A run with modules for multi-token prediction: its metrics, its checkpoints, its files."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from fornax.config import ConfigError, from_mapping
from fornax.models import stored_modules
from fornax.train import TrainConfig, convert, load_decoder, read_metrics, train

MODEL = {
    "num_mtp_modules": 1,
    "family": "glm4_moe",
    "mlp_pattern": ["mlp", "experts"],
    "experts": {
        "num_experts": 4,
        "experts_per_token": 2,
        "intermediate_size": 16,
        "score": "sigmoid",
        "normalize_eps": 1e-20,
        "selection_bias": True,
        "bias_update_rate": 0.01,
        "shared_intermediate_size": 16,
    },
}


@pytest.mark.exhaustive
def test_modules_are_trained_kept_and_taken_along_where_asked(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    changes = {"steps": 4, "eval": {"every": 4, "batches": 1}, "mtp_weight": 0.3}
    config = from_mapping(
        TrainConfig, {**settings, **changes, "model": {**settings["model"], **MODEL}}
    )
    run, plain, whole = tmp_path / "run", tmp_path / "plain", tmp_path / "whole"
    train(config, run, progress="none")
    records = read_metrics(run / "metrics.jsonl")
    losses = [each["mtp_loss"] for each in records if "mtp_loss" in each]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    last = records[-1]
    assert {"mtp_accuracy", "cross_entropy", "eval/mtp_loss", "eval/mtp_accuracy"} <= last.keys()
    extra = 0.3 * last["mtp_loss"]
    assert last["loss"] == pytest.approx(last["cross_entropy"] + extra, rel=0.05)

    model = load_decoder(run, mtp=True)
    assert load_decoder(run).mtp is None
    left, kept = convert(run, plain), convert(run, whole, mtp=True)
    assert (left.modules_left_out, stored_modules(plain)) == (1, 0)
    assert (kept.modules_left_out, stored_modules(whole)) == (0, 1)
    assert kept.max_abs_difference == left.max_abs_difference == 0
    convert(whole, tmp_path / "again", mtp=True)
    for path in (whole, tmp_path / "again"):
        found = load_decoder(path, mtp=True)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(model))
    with pytest.raises(ConfigError, match="has no modules that predict further tokens"):
        load_decoder(plain, mtp=True)

    more = {**changes, "steps": 2, "model": None, "init_from": str(whole), "eval": {}}
    train(from_mapping(TrainConfig, {**settings, **more}), tmp_path / "more", progress="none")
    first = read_metrics(tmp_path / "more" / "metrics.jsonl")[0]
    assert first["mtp_loss"] < losses[0]
    train(
        from_mapping(TrainConfig, {**settings, **more, "mtp_weight": None}),
        tmp_path / "without",
        progress="none",
    )
    assert "mtp_loss" not in read_metrics(tmp_path / "without" / "metrics.jsonl")[0]
