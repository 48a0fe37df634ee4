"""The table of methods: the config and the task of each, imported when it is asked for."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fornax.train import Task
    from fornax.tune.config import TuneConfig

__all__ = ["METHODS", "Method", "method_of"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to tune a model."""

    name: str
    """What it is called after `fornax tune`."""
    summary: str
    """What it does, in a line."""
    config: str
    """module:class of its config, a `TuneConfig`."""
    task: str
    """module:function: (config, origin, run directory) to its `train.Task`. It reads and checks the
    data."""
    example: str
    """What a user types after `fornax tune`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Flags that stand for keys of another name."""

    @property
    def within(self) -> str:
        """The summary inside a sentence."""
        first, rest = self.summary[:1], self.summary[1:]
        return self.summary if rest[:1].isupper() else first.lower() + rest

    def config_class(self) -> "type[TuneConfig]":
        """The config's class."""
        return _find(self.config)

    def make(self) -> "Callable[..., Task]":
        """The function that makes the task."""
        return _find(self.task)


def _find(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _table(*methods: Method) -> dict[str, Method]:
    return {method.name: method for method in methods}


METHODS: Mapping[str, Method] = _table(
    Method(
        name="sft",
        summary="Supervised fine-tuning on conversations, or prompts with completions",
        config="fornax.tune.config:SFTConfig",
        task="fornax.tune.tasks.sft:make",
        example="sft --model DIR --data chats.jsonl --lora.rank 16 --out runs/sft",
    ),
    Method(
        name="dpo",
        summary="Preferences between two answers: DPO, IPO, SimPO, ORPO, CPO",
        config="fornax.tune.config:PreferenceConfig",
        task="fornax.tune.tasks.preference:make",
        example="dpo --model DIR --data pairs.jsonl --out runs/dpo",
    ),
    Method(
        name="kto",
        summary="Preferences from answers labelled good or bad: KTO",
        config="fornax.tune.config:KTOConfig",
        task="fornax.tune.tasks.kto:make",
        example="kto --model DIR --data labelled.jsonl --lora.rank 16 --out runs/kto",
    ),
    Method(
        name="reward",
        summary="Train a reward model that scores the better of two answers higher",
        config="fornax.tune.config:RewardModelConfig",
        task="fornax.tune.tasks.reward_model:make",
        example="reward --model DIR --data pairs.jsonl --out runs/reward",
    ),
    Method(
        name="grpo",
        summary="RL from rewards: GRPO and its variants",
        config="fornax.tune.config:GRPOConfig",
        task="fornax.tune.tasks.grpo:make",
        example="grpo --model DIR --data prompts.jsonl --reward file.py:score --out runs/grpo",
    ),
    Method(
        name="ppo",
        summary="RL from rewards with a learned value function: PPO",
        config="fornax.tune.config:PPOConfig",
        task="fornax.tune.tasks.ppo:make",
        example="ppo --model DIR --data prompts.jsonl --reward file.py:score --out runs/ppo",
    ),
    Method(
        name="distill",
        summary="Distillation: match a teacher's next-token distributions",
        config="fornax.tune.config:DistillConfig",
        task="fornax.tune.tasks.distill:make",
        example="distill --teacher DIR --student DIR --data text.jsonl --out runs/distill",
        aliases={"student": "model"},
    ),
)


def method_of(config: "TuneConfig") -> Method:
    """The method that a config is of.

    Raises:
      TypeError: when it is of none.
    """
    for method in METHODS.values():
        if method.config_class() is type(config):
            return method
    name = type(config).__qualname__
    raise TypeError(f"{name} is the config of no method; those are {', '.join(METHODS)}")
