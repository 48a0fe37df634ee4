"""What the configs of reinforcement learning accept, and what they refuse with which words."""

from typing import Any

import pytest

from fornax.config import ConfigError, dump_yaml, from_yaml, load
from fornax.tune.config import AdaptiveKL, GRPOConfig, PPOConfig
from fornax.tune.rl.credit import KLController

NEEDED = ("--model", "m", "--data", "d.jsonl", "--reward", "r.py:score")


def grpo(*words: str) -> GRPOConfig:
    return load(GRPOConfig, overrides=[*NEEDED, *words])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", {"scale": "group", "aggregation": "sequence_mean", "kl_coefficient": 0.04}),
        (
            "dapo",
            {
                "clip_high": 0.28,
                "aggregation": "token_mean",
                "dynamic_sampling": True,
                "kl_coefficient": 0.0,
                "overlong_tokens": None,
            },
        ),
        ("dr_grpo", {"scale": "none", "aggregation": "constant"}),
        ("gspo", {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
        ("rloo", {"baseline": "leave_one_out", "scale": "none", "kl_in": "reward"}),
        ("reinforce_plus_plus", {"baseline": "none", "scale": "batch", "kl_in": "reward"}),
    ],
)
def test_a_variant_is_a_preset_of_options(name: str, expected: dict[str, Any]) -> None:
    algorithm = grpo("--algorithm.type", name).algorithm
    assert {key: getattr(algorithm, key) for key in expected} == expected
    changed = grpo("--algorithm.type", name, "--algorithm.clip-high", "0.5").algorithm
    assert (changed.type, changed.clip_high) == (name, 0.5)


def test_the_config_is_the_same_after_yaml() -> None:
    config = grpo("--algorithm.type", "dapo", "--importance.cap", "3", "--lora.rank", "4")
    assert from_yaml(GRPOConfig, dump_yaml(config), source="test") == config


def test_numbers_of_a_round() -> None:
    config = grpo("--batch-size", "32", "--mini-batches", "2", "--rollout-epochs", "3")
    assert (config.completions, config.prompts, config.steps_per_round) == (64, 8, 6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--group-size", "1"), "advantage 0"),
        (("--spikes.window", "64"), "reinforcement learning draws its batches from the model"),
        (("--batch-size", "12"), "do not divide into groups of group_size=8"),
        (("--rollout.max-tokens", "1024"), "leaves no room for a prompt"),
        (("--rollout.temperature", "0"), "teaches nothing"),
        (("--rollout.top-p", "0"), "top_p=0"),
        (("--lora.rank", "4", "--lora.dropout", "0.1"), "away from 1"),
        (("--eval-data", "e.jsonl"), "fornax eval"),
        (("--virtual-shards", "2"), "leave it out"),
        (("--importance.cap", "0.5"), "1 or more"),
        (("--asynchronous.max-staleness", "0"), "Leave `asynchronous` out"),
        (("--asynchronous.max-staleness", "1"), "--importance.cap 2"),
        (("--algorithm.clip-low", "1.5"), "never negative"),
        (("--algorithm.clip-dual", "1"), "above 1"),
        (("--algorithm.baseline", "none"), "without centring"),
        (("--algorithm.baseline", "leave_one_out"), "constant factor"),
        (("--algorithm.overlong-tokens", "300"), "more than rollout.max_tokens"),
        (("--algorithm.dynamic-sampling", "--algorithm.max-resamples", "0"), "more prompts"),
        (("--algorithm.skip-zero-advantage",), "kl_coefficient=0.04 would change the loss"),
        (
            (
                "--algorithm.type=dapo",
                "--algorithm.skip-zero-advantage",
                "--entropy-coefficient=0.1",
            ),
            "entropy_coefficient=0.1 would change the loss",
        ),
        (
            ("--algorithm.type=dapo", "--algorithm.skip-zero-advantage", "--mini-batches=2"),
            "with 2 steps a round",
        ),
    ],
)
def test_refusals_name_the_value_and_the_cure(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grpo(*words)


def test_a_run_needs_a_reward_or_an_environment() -> None:
    words = [*NEEDED[:4], "--algorithm.type", "grpo"]
    with pytest.raises(ConfigError, match="name a function of yours"):
        load(GRPOConfig, overrides=words)
    tools = ["--conversation.tools", "t.py:add", "--conversation.tool-parser", "hermes"]
    with pytest.raises(ConfigError, match="name a function of yours"):
        load(GRPOConfig, overrides=[*words, *tools])
    alone = load(GRPOConfig, overrides=[*words, "--conversation.environment", "e.py:Game"])
    assert alone.reward == ()


def test_reinforce_plus_plus_takes_groups_of_one() -> None:
    assert grpo("--algorithm.type", "reinforce_plus_plus", "--group-size", "1").prompts == 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gae-lambda", "1.5"), r"\[0, 1\]"),
        (("--value-clip", "0"), "value_clip=0"),
        (("--kl.type", "adaptive", "--kl.target", "0"), "target=0"),
    ],
)
def test_ppo_refusals(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(PPOConfig, overrides=[*NEEDED, *words])


def test_the_adaptive_coefficient_follows_its_target_and_resumes() -> None:
    config = AdaptiveKL(coefficient=0.1, target=2.0, horizon=100)
    controller = KLController(config=config)
    used = controller.update({"kl_reference_sum": 2.2, "rollout_completions": 10.0})
    assert used == {"kl_coefficient": 0.1}
    assert controller.coefficient == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    controller.update({"kl_reference_sum": 50.0, "rollout_completions": 10.0})
    assert controller.coefficient == pytest.approx(0.101 * (1 + 0.2 * 10 / 100))
    other = KLController(config=config)
    other.restore(controller.state())
    assert other.coefficient == controller.coefficient
    controller.update({"kl_reference_sum": 0.0, "rollout_completions": 10.0})
    assert controller.coefficient == pytest.approx(other.coefficient * 0.98)
