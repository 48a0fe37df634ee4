"""A reward model trained on chats rewards the answers to chats, in GRPO and PPO."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tune.tiny import COLOURS

pytestmark = pytest.mark.slow


def asked(colour: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What follows {colour}?"}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def write(file: Path, lines: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.exhaustive
def test_a_reward_model_of_chats_rewards_grpo_and_ppo(
    finish: Callable[..., str], tiny: Path, tmp_path: Path
) -> None:
    pairs = [
        {"prompt": asked(c), "chosen": said("green follows"), "rejected": said("pink")}
        for c in COLOURS
    ]
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": asked(c)} for c in COLOURS])
    common = ["--model", tiny / "model", "--max-length", "64", "--log.no-tensorboard"]
    common += ["--steps", "2", "--batch-size", "4", "--no-doctor", "--progress", "lines"]
    words = ["--data", write(tmp_path / "pairs.jsonl", pairs), "--out", tmp_path / "reward"]
    finish("tune", "reward", *common, *words)
    words = ["--data", prompts, "--reward-model", tmp_path / "reward", "--rollout.max-tokens", "6"]
    for method in ("grpo", "ppo"):
        out = tmp_path / method
        finish("tune", method, *common, *words, "--group-size", "4", "--out", out)
        samples = [json.loads(x) for x in (out / "samples.jsonl").read_text().splitlines()]
        rewards = [sample["rewards"]["reward_model"] for sample in samples]
        assert all(reward is not None for reward in rewards), method
        assert [s["reward"] for s in samples] == pytest.approx(rewards)
        assert len({round(reward, 6) for reward in rewards}) > 1
