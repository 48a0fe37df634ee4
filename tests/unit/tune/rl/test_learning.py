"""Each algorithm raises the reward of a toy: completions made of one token, from five seeds."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.tune.rl.toy import ADAPTED, BASE, Run

from fornax.adapters import LoRA
from fornax.tune.config import (
    DAPO,
    GRPO,
    GSPO,
    RLOO,
    AdaptiveKL,
    AsyncConfig,
    DrGRPO,
    Importance,
    PPOConfig,
    ReinforcePlusPlus,
)

ROUNDS = 8
LEARN = dataclasses.replace(
    BASE,
    batch_size=32,
    mini_batches=1,
    group_size=8,
    max_length=256,
    rollout_epochs=1,
    importance=None,
)


def ppo(**changes: Any) -> PPOConfig:
    kept = {f.name: getattr(LEARN, f.name) for f in dataclasses.fields(LEARN) if f.init}
    del kept["algorithm"]
    return PPOConfig(**{**kept, "group_size": 1, "rollout_epochs": 2, **changes})


def rises(
    config: Any, out: Path, programs: Any = None, rounds: int = ROUNDS, **changes: Any
) -> None:
    """Train from five seeds with one compiled step; the reward at the end is above the start's."""
    for seed in range(5):
        seeded = dataclasses.replace(config, seed=seed)
        run = Run(seeded, out / str(seed), programs=programs, **changes)
        programs = run.programs
        rewards = [run.train()["reward"] for _ in range(rounds * config.steps_per_round)]
        run.stream.close()
        rewards = rewards[:: config.steps_per_round]
        assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, (seed, rewards)
    assert programs is not None
    assert programs.compilations == 1


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(GRPO(), id="grpo", marks=pytest.mark.slow),
        pytest.param(DAPO(overlong_tokens=0), id="dapo", marks=pytest.mark.exhaustive),
        pytest.param(DrGRPO(), id="dr_grpo", marks=pytest.mark.exhaustive),
        pytest.param(GSPO(), id="gspo", marks=pytest.mark.exhaustive),
        pytest.param(RLOO(), id="rloo", marks=pytest.mark.exhaustive),
        pytest.param(ReinforcePlusPlus(), id="reinforce_plus_plus", marks=pytest.mark.exhaustive),
    ],
)
def test_the_reward_rises(tmp_path: Path, algorithm: Any) -> None:
    rises(dataclasses.replace(LEARN, algorithm=algorithm), tmp_path)


@pytest.mark.slow
def test_several_steps_on_a_rollout_raise_the_reward(base: Run, tmp_path: Path) -> None:
    rises(BASE, tmp_path, base.programs)


@pytest.mark.slow
def test_ppo_raises_the_reward(tmp_path: Path) -> None:
    kl = AdaptiveKL(coefficient=0.02)
    rises(ppo(kl=kl), tmp_path)


@pytest.mark.slow
def test_adapters_raise_the_reward_one_step_off(tmp_path: Path) -> None:
    optim = dataclasses.replace(LEARN.optim, learning_rate=0.05)
    config = dataclasses.replace(
        LEARN,
        lora=LoRA(rank=2),
        optim=optim,
        asynchronous=AsyncConfig(),
        importance=Importance(),
        algorithm=DrGRPO(),
    )
    rises(config, tmp_path, rounds=12, **ADAPTED)
