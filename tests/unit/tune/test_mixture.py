"""Whole runs of tuning on a mixture: its router frozen or trained, adapters, replay.

Legend: L layers with experts, E experts.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.tune import mixture
from tests.unit.tune.tiny import REWARD, save_chats, save_model

from fornax.adapters import LoRA
from fornax.config.errors import ConfigError
from fornax.models import load_pretrained
from fornax.train import load_decoder
from fornax.train.config import LogConfig
from fornax.tune import SFTConfig, read_origin, tune
from fornax.tune.config import DPO, GRPOConfig, PreferenceConfig, RolloutConfig
from fornax.tune.policy import policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixture")
    names = ("family", "qk_norm", "tie_embeddings", "mlp_pattern", "experts", "num_layers")
    save_model(made, **{name: getattr(mixture.CONFIG, name) for name in names})
    save_chats(made / "chats.jsonl")
    asked = [{"prompt": "What follows red?", "bonus": 0.01 * i} for i in range(6)]
    (made / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    pairs = [{"prompt": "Say", "chosen": " yes", "rejected": f" no {i}"} for i in range(8)]
    (made / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pairs))
    (made / "my_rewards.py").write_text(REWARD)
    return made


def options(folder: Path, data: str, **more: Any) -> dict[str, Any]:
    return {
        "model": str(folder / "model"),
        "data": str(folder / data),
        "max_length": 64,
        "batch_size": 8,
        "steps": 2,
        "log": LogConfig(tensorboard=False),
        **more,
    }


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_frozen_router_is_none_of_what_is_trained(folder: Path) -> None:
    config = SFTConfig(**options(folder, "chats.jsonl"))
    origin = read_origin(config)
    all_of_it = policy(config, origin).trained_parameters
    frozen = policy(dataclasses.replace(config, freeze_router=True), origin)
    assert all_of_it - frozen.trained_parameters == 2 * 32 * 8
    named = LoRA(targets=("experts/router",))
    with pytest.raises(ConfigError, match=r"lora.targets adapts layers/experts/router"):
        policy(dataclasses.replace(config, freeze_router=True, lora=named), origin)
    dense = dataclasses.replace(origin.model_config, experts=None, mlp_pattern=None)
    without = dataclasses.replace(origin, model_config=dense)
    with pytest.raises(ConfigError, match="freeze_router=True, and this model has no experts"):
        policy(dataclasses.replace(config, freeze_router=True), without)


@pytest.mark.exhaustive
def test_sft_leaves_a_frozen_router_as_it_was(folder: Path, tmp_path: Path) -> None:
    config = SFTConfig(**options(folder, "chats.jsonl", freeze_router=True))
    tune(config, tmp_path / "run", progress="none")
    base, tuned = load_pretrained(folder / "model"), load_decoder(tmp_path / "run")
    experts, before = tuned.layers.experts, base.layers.experts
    np.testing.assert_array_equal(experts.router.kernel[...], before.router.kernel[...])
    assert np.abs(experts.gate.kernel[...] - before.gate.kernel[...]).max() > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("lora", [None, LoRA(rank=2), LoRA(rank=2, experts="shared")])
def test_dpo_and_grpo_with_replay_run_from_files(
    folder: Path, tmp_path: Path, lora: LoRA | None
) -> None:
    """The doctor looks at each first."""
    dpo = PreferenceConfig(**options(folder, "pairs.jsonl", lora=lora, loss=DPO()))
    grpo = GRPOConfig(
        **options(folder, "prompts.jsonl", lora=lora, routing_replay=True),
        reward=(f"{folder / 'my_rewards.py'}:score",),
        group_size=4,
        rollout=RolloutConfig(max_tokens=8),
    )
    for config in (dpo, grpo):
        out = tmp_path / type(config).__name__
        tune(config, out, progress="none")
        found = lines(out)[-1]
        assert {"balance_loss", "router_z_loss", "router_entropy"} <= found.keys()
        assert found["expert_load_max"] >= 1 >= found["expert_load_min"]
        assert load_decoder(out).config.experts == mixture.EXPERTS
    assert all(abs(line["mismatch_kl"]) < 1e-6 for line in lines(tmp_path / "GRPOConfig"))
