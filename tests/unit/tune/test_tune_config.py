"""Configs of tuning: what they refuse, and how the length of a run follows from the data."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.tune.tiny import save_model

from fornax.adapters import LoRA
from fornax.config import ConfigError, dump_yaml, from_yaml, load
from fornax.train import EvalConfig, PostTraining, Task
from fornax.tune import METHODS, SFTConfig, TuneConfig, method_of, read_origin
from fornax.tune.config import recipe
from fornax.tune.policy import fit_to_model, policy
from fornax.tune.splits import with_steps

CONFIG = SFTConfig(model="model", data="data.jsonl")


def task(per_epoch: float | None) -> Task:
    def nothing(*args: object) -> None:
        raise AssertionError("not called here")

    return Task(
        build=nothing, loss=nothing, batches=nothing, post=PostTraining(steps_per_epoch=per_epoch)
    )  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(
    ("given", "per_epoch", "steps"),
    [
        ({}, 7.0, 7),
        ({"epochs": 3.0}, 7.0, 21),
        ({"epochs": 0.5}, 7.0, 4),
        ({"epochs": 0.1}, 0.5, 1),
        ({"epochs": 3.0}, 0.1, 1),
        ({"steps": 5}, 7.0, 5),
        ({"steps": 5}, None, 5),
        ({"steps": 21, "epochs": 3.0}, 7.0, 21),
    ],
)
def test_steps_are_given_or_counted(given: dict, per_epoch: float | None, steps: int):
    resolved = with_steps(dataclasses.replace(CONFIG, **given), task(per_epoch))
    assert resolved.steps == steps
    assert with_steps(resolved, task(per_epoch)) == resolved


@pytest.mark.parametrize(
    ("lora", "rate", "said"),
    [
        (None, 1e-4, "learning_rate=0.0001 is one for adapters"),
        (None, 1e-5, ""),
        (LoRA(rank=2), 1e-6, "learning_rate=1e-06 is one for whole models"),
        (LoRA(rank=2), 1e-4, ""),
    ],
)
def test_a_rate_for_the_other_kind_of_training_is_named(
    tmp_path: Path, lora: LoRA | None, rate: float, said: str
):
    model = str(save_model(tmp_path))
    config = dataclasses.replace(CONFIG, model=model, lora=lora, optim=recipe(rate))
    text = policy(config, read_origin(config)).text
    assert said in text
    assert ("--optim.learning-rate" in text) == bool(said)


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_reinforcement_begins_at_a_rate_for_both_kinds(tmp_path: Path, lora: LoRA | None):
    model = str(save_model(tmp_path))
    settings: dict = {"model": model, "data": "d", "max_length": 512, "reward": ("math",)}
    for name in ("grpo", "ppo"):
        config = METHODS[name].config_class()(**settings, lora=lora)
        assert policy(config, read_origin(config)).caution == ""


def test_two_lengths_that_disagree_are_refused():
    with pytest.raises(ConfigError, match=r"steps=5 and epochs=3, which are 21 steps"):
        with_steps(dataclasses.replace(CONFIG, steps=5, epochs=3.0), task(7.0))
    with pytest.raises(ConfigError, match="--steps"):
        with_steps(CONFIG, task(None))


def test_what_is_held_back_is_evaluated_once_a_pass():
    config = dataclasses.replace(CONFIG, eval_share=0.1, epochs=3.0)
    assert with_steps(config, task(7.0)).eval.every == 7
    assert with_steps(dataclasses.replace(config, epochs=0.5), task(7.0)).eval.every == 4
    often = dataclasses.replace(config, eval=EvalConfig(every=2))
    assert with_steps(often, task(7.0)).eval.every == 2
    assert with_steps(CONFIG, task(7.0)).eval.every is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 1}, "max_length=1"),
        ({"epochs": 0.0}, "epochs=0"),
        ({"steps": 0}, "steps=0"),
        ({"eval_share": 1.0}, "eval_share=1"),
        ({"eval_share": 0.1, "eval_data": "more"}, "keep one of them"),
        ({"eval": EvalConfig(every=3)}, "eval_data"),
        ({"virtual_shards": 3}, "does not divide batch_size=8"),
        ({"remat": "names"}, "names"),
        ({"neftune_alpha": 0.0}, "neftune_alpha"),
        ({"z_loss": -1.0}, "z_loss"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_one_key_of_adapters_calls_them_into_being_and_a_config_loads_back():
    words = ["--model=m", "--data=d", "--lora.rank", "8", "--lora.targets", "attention/q"]
    config = load(SFTConfig, overrides=words)
    assert config.lora is not None
    assert (config.lora.rank, config.lora.targets) == (8, ("attention/q",))
    assert load(SFTConfig, overrides=words[:2]).lora is None
    assert from_yaml(SFTConfig, dump_yaml(config)) == config


def test_every_method_has_a_config_that_is_found_again():
    for name, method in METHODS.items():
        cls = method.config_class()
        assert issubclass(cls, TuneConfig), name
        assert callable(method.make()), name
        assert cls.__doc__
    assert method_of(CONFIG).name == "sft"
    with pytest.raises(TypeError, match="no method"):
        method_of(TuneConfig(model="m", data="d"))


def test_importing_the_package_brings_no_jax():
    code = "import sys, fornax.tune, fornax.tune.methods; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_is_read_with_its_ends_and_template(tmp_path: Path):
    model = save_model(tmp_path)
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    given = tmp_path / "mine.jinja"
    given.write_text("{{ messages[0]['content'] }}")
    config = dataclasses.replace(CONFIG, model=str(model))
    origin = read_origin(config)
    assert origin.eos_ids == (origin.tokenizer.eos_id, 7)
    messages = [{"role": "user", "content": "x"}]
    assert origin.template is not None
    assert origin.template.render(messages).startswith("<|begin|>user")
    changed = read_origin(dataclasses.replace(config, template=str(given)))
    assert changed.template is not None
    assert changed.template.render(messages) == "x"
    settled = fit_to_model(dataclasses.replace(config, model=os.path.relpath(model)), origin)
    assert (settled.max_length, settled.model) == (128, str(model.resolve()))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_origin(dataclasses.replace(config, template=str(tmp_path / "none")))
    whole = policy(config, origin)
    assert whole.adapted == ()
    assert whole.trained_parameters == whole.parameters
    packed = policy(dataclasses.replace(config, lora=LoRA(rank=2, quantize="nf4")), origin)
    assert packed.parameters == whole.parameters + packed.trained_parameters
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        read_origin(config)
