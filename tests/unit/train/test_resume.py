"""A changed config: every difference named, what is harmless let through, typos caught."""

import dataclasses

import pytest

from fornax.config import ConfigError, dump_yaml
from fornax.models import DecoderConfig, ExpertsConfig
from fornax.optim import Linear, OptimConfig
from fornax.train.config import EvalConfig, LogConfig, ProfileConfig, TrainConfig
from fornax.train.resume import HARMLESS, check_changes, known_keys

BASE = TrainConfig(seq_len=64)
SAVED = dump_yaml(BASE)


def test_the_same_config_has_no_changes():
    assert check_changes(SAVED, BASE) == []


def test_harmless_changes_pass_and_are_told():
    config = dataclasses.replace(
        BASE,
        log=LogConfig(every=7),
        eval=EvalConfig(every=5),
        save_every=3,
        profile=ProfileConfig(steps="2..3"),
    )
    assert {c.path for c in check_changes(SAVED, config)} == {
        "log.every", "eval.every", "save_every", "profile.steps",
    }  # fmt: skip


def test_every_other_change_is_listed_with_old_and_new():
    config = dataclasses.replace(
        BASE, steps=2000, optim=OptimConfig(learning_rate=1e-3), log=LogConfig(every=2)
    )
    with pytest.raises(ConfigError) as caught:
        check_changes(SAVED, config)
    message = str(caught.value)
    assert "steps: 1000 -> 2000, optim.learning_rate: 0.0003 -> 0.001." in message
    assert "--accept-changes steps optim.learning_rate" in message
    assert "log.every" not in message


@pytest.mark.parametrize("pattern", ["optim.schedule.*", "optim.schedule", "optim", "optim.*"])
def test_accepted_patterns_cover_what_lies_under_them(pattern: str):
    config = dataclasses.replace(BASE, optim=OptimConfig(schedule=Linear(warmup_steps=5)))
    changes = check_changes(SAVED, config, [pattern])
    assert "optim.schedule.type" in {c.path for c in changes}


def test_accepting_one_change_does_not_accept_another():
    config = dataclasses.replace(BASE, steps=2000, seq_len=128)
    with pytest.raises(ConfigError, match=r"another config: seq_len: 64 -> 128\. Use"):
        check_changes(SAVED, config, ["steps"])


def test_a_pattern_of_no_key_is_a_typo():
    with pytest.raises(
        ConfigError, match=r"optim.shedule.type is not a key .*optim.schedule.type\?"
    ):
        check_changes(SAVED, BASE, ["optim.shedule.type"])


def test_accepting_a_key_that_did_not_change_is_no_mistake():
    """The same command must work again after the change was saved."""
    assert check_changes(SAVED, BASE, ["steps"]) == []


def test_a_config_of_another_version_says_what_to_do():
    with pytest.raises(ConfigError, match=r"does not load with this version .*init_from"):
        check_changes(SAVED + "no_such_key: 1\n", BASE)


@pytest.mark.parametrize("pattern", HARMLESS)
def test_every_harmless_pattern_names_keys_that_exist(pattern: str):
    prefix = pattern.removesuffix("*").rstrip(".")
    experts = ExpertsConfig(num_experts=2, experts_per_token=1, intermediate_size=8)
    config = dataclasses.replace(BASE, model=DecoderConfig(experts=experts))
    assert any(key == prefix or key.startswith(prefix + ".") for key in known_keys(config))
