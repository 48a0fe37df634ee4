"""Distillation and preferences as runs of the one trainer, and the reward of letters."""

import json
from pathlib import Path

import numpy as np
import pytest

from fornax.config import from_mapping
from fornax.config.errors import ConfigError
from fornax.diffusion.config import DiffusionConfig, DiffusionTuneConfig
from fornax.diffusion.letters import LETTERS, Letters
from fornax.diffusion.letters.dataset import STYLES
from fornax.diffusion.load import load_run
from fornax.diffusion.methods import FlowGRPO
from fornax.diffusion.rollouts import Groups, letters_reward
from fornax.diffusion.run import train
from fornax.diffusion.tuning import tune

TEACHER = {
    "data": {"type": "letters", "count": 64, "holdout": 8},
    "model": {"type": "dit", "num_layers": 1, "num_heads": 2, "head_dim": 16, "patch": 4},
    "text": {"type": "words", "width": 16, "length": 4},
    "objective": {"prediction": "data"},
    "batch_size": 4,
    "steps": 2,
    "save_every": None,
    "sample": {"every": None, "steps": 2},
}
METHODS = {
    "consistency": {"type": "consistency", "levels": 4},
    "dmd2": {"type": "dmd2", "steps": 2},
    "flow-grpo": {"type": "flow-grpo", "steps": 3, "group": 2, "kl": 0.1},
}


def config(**changes) -> DiffusionTuneConfig:
    said = {name: TEACHER[name] for name in TEACHER if name not in ("model", "text", "objective")}
    return from_mapping(DiffusionTuneConfig, {**said, **changes})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    train(from_mapping(DiffusionConfig, TEACHER), folder, progress="none")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_from_a_run_and_its_result_is_a_run(name, teacher, tmp_path):
    result = tune(
        config(method=METHODS[name], model=str(teacher)), tmp_path / "run", progress="none"
    )
    assert result.step == 2
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in metrics.splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps
    assert all(np.isfinite(line["loss"]) for line in steps)
    if name == "flow-grpo":  # what is drawn is what is learnt from: the step is on-policy
        assert all(line["ratio"] == pytest.approx(1, abs=1e-3) for line in steps)
        assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    found = load_run(tmp_path / "run")
    before = load_run(teacher)
    images = found.draw(["bold serif R"], steps=2, guidance=1.0, sampler="lcm")
    assert images.shape == (1, 16, 16, 1)
    assert not np.array_equal(
        images, before.draw(["bold serif R"], steps=2, guidance=1.0, sampler="lcm")
    )


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [False, True])
def test_prompts_of_held_out_pairs_are_drawn_where_they_are_asked_for(held_out, teacher):
    method = {**METHODS["flow-grpo"], "held_out": held_out}
    groups = Groups(config(method=method), from_mapping(FlowGRPO, method), load_run(teacher))
    pairs = Letters(held_out=True).pairs
    unseen = {f"{STYLES[style]} {LETTERS[letter]}" for letter, style in pairs}
    share = np.mean([prompt in unseen for prompt in groups.prompts(0, 1000)])
    assert share == (pytest.approx(26 / 208, abs=0.05) if held_out else 0)


def test_the_reward_counts_letter_and_style():
    letters = Letters(count=40)
    reward = letters_reward(letters)
    images = np.stack([letters[i].image for i in range(40)])
    prompts = [letters[i].prompt for i in range(40)]
    assert reward(images, prompts).mean() > 1.9
    other = ["italic serif Q" if p != "italic serif Q" else "sans A" for p in prompts]
    assert reward(images, other).mean() < 0.5
    assert reward(np.zeros_like(images), prompts).max() == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": {"type": "dmd2"}, "lora": {"rank": 2}}, "lora"),
        ({"method": {"type": "flow-grpo", "eta": 0.0}}, r"method\.eta"),
    ],
)
def test_methods_that_cannot_be_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        config(**changes)
