"""Tuning with products in 8 bits: sft and dpo train through codes, the rest is refused by name."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tune.tiny import COLOURS, chat, save_model

from fornax.adapters import LoRA
from fornax.config.errors import ConfigError
from fornax.mesh.dtypes import DtypePolicy
from fornax.models import ExpertsConfig
from fornax.quant import QuantConfig
from fornax.train import read_metrics
from fornax.tune import SFTConfig, tune
from fornax.tune.config import (
    DistillConfig,
    GRPOConfig,
    KTOConfig,
    OnPolicy,
    PPOConfig,
    PreferenceConfig,
    RewardModelConfig,
)

INT8 = QuantConfig(scheme="int8", allow_slow=True)
SHORT: dict[str, Any] = {"batch_size": 4, "steps": 2, "max_length": 96, "doctor": False}


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fornax.train.report.write", lambda path: path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def chats(tmp_path: Path) -> str:
    lines = (json.dumps(chat(number)) + "\n" for number in range(24))
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    return str(tmp_path / "chats.jsonl")


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    lines = (
        json.dumps({"prompt": f"What follows {a}?", "chosen": f"{b} follows", "rejected": a}) + "\n"
        for a, b in itertools.pairwise(COLOURS)
    )
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    return str(tmp_path / "pairs.jsonl")


@pytest.mark.slow
def test_sft_trains_through_codes(model: Path, chats: str, tmp_path: Path) -> None:
    config = SFTConfig(model=str(model), data=chats, dtypes=DtypePolicy(compute="float32"), **SHORT)
    losses = {}
    for scheme in (None, "int8"):
        quant = QuantConfig() if scheme is None else QuantConfig(scheme=scheme, allow_slow=True)
        tune(dataclasses.replace(config, quant=quant), tmp_path / str(scheme), progress="none")
        found = read_metrics(tmp_path / str(scheme) / "metrics.jsonl")
        losses[scheme] = [row["loss"] for row in found if "loss" in row]
    assert losses["int8"] == pytest.approx(losses[None], rel=0.02)
    assert losses["int8"][0] != losses[None][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [PreferenceConfig, pytest.param(KTOConfig, marks=pytest.mark.exhaustive)]
)
def test_the_reference_multiplies_as_the_policy_does(
    kind: Any, model: Path, pairs: str, tmp_path: Path
) -> None:
    """Equal weights: the log-ratios of the first step are 0, and its loss is log 2 (DPO) or a half
    (KTO)."""
    config = kind(model=str(model), data=pairs, quant=INT8, **SHORT)
    tune(config, tmp_path / "run", progress="none")
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(
        math.log(2) if kind is PreferenceConfig else 0.5, abs=1e-5
    )
    assert first["grad_norm"] > 0


@pytest.mark.slow
def test_a_scheme_that_is_slower_is_refused(model: Path, chats: str, tmp_path: Path) -> None:
    """On a CPU the codes' products are the slower ones."""
    quant = QuantConfig(scheme="fp8")
    config = SFTConfig(model=str(model), data=chats, quant=quant, **SHORT)
    with pytest.raises(
        ConfigError, match=r"quant\.scheme=fp8: products in fp8 take .* quant.allow_slow"
    ):
        tune(config, tmp_path / "run", progress="none")


@pytest.mark.slow
def test_experts_are_refused_by_name(chats: str, tmp_path: Path) -> None:
    experts = ExpertsConfig(num_experts=4, experts_per_token=2, intermediate_size=16)
    mixture = save_model(tmp_path / "mixture", experts=experts, family="mixtral")
    config = SFTConfig(model=str(mixture), data=chats, quant=INT8, **SHORT)
    with pytest.raises(ConfigError, match=r"mixtures of experts.*train in 8 bits"):
        tune(config, tmp_path / "run", progress="none")


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (SFTConfig, {"lora": LoRA()}, "scheme=int8 and lora do not go together: .* stay floats"),
        (GRPOConfig, {}, "scheme=int8 is not for this method: completions are drawn"),
        (PPOConfig, {}, "scheme=int8 is not for this method: completions are drawn"),
        (RewardModelConfig, {}, "scheme=int8 is not for this method: reward models are scored"),
        (DistillConfig, {"teacher": "t", "on_policy": OnPolicy()}, "scheme=int8 and on_policy do"),
    ],
)
def test_a_method_without_it_says_so(kind: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kind(model="m", data="d", quant=INT8, **given)
