"""How the quickstart's model is tuned: adapters on pairs, then rewards for what it writes."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from fornax.adapters import LoRA
from fornax.mesh import DtypePolicy
from fornax.optim import Cosine
from fornax.rewards import RewardSpec
from fornax.tune import SFTConfig
from fornax.tune.config import GRPO, GRPOConfig, RolloutConfig, recipe

__all__ = ["REWARD", "Tuning"]

REWARD = RewardSpec(function="answers_signature", options={"docstring": "true", "partial": "true"})
"""The body parses, uses the parameters, and returns something where the docstring says so."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How long, how fast, on what."""

    max_tokens: int
    """Tokens of a prompt at most, and of a body."""
    sft_steps: int
    sft_learning_rate: float
    grpo_steps: int
    grpo_learning_rate: float
    eval_prompts: int
    """Held-out functions that are completed, at most."""
    rank: int = 16
    batch_size: int = 64
    """Completions of a step."""
    group_size: int = 8
    temperature: float = 0.7
    """Of rollouts and of the evaluations alike: the policy that is trained is the one measured."""
    repeats: int = 5
    """Evaluations of each model, for their spread."""

    def sft_config(self, model: Path, pairs: Path, *, seed: int) -> SFTConfig:
        """Supervised tuning of adapters on the pairs."""
        return SFTConfig(
            model=str(model),
            data=str(pairs / "train.jsonl"),
            eval_data=str(pairs / "eval.jsonl"),
            max_length=256,  # rows hold several pairs; no longer than the model's context
            batch_size=8,
            steps=self.sft_steps,
            seed=seed,
            lora=LoRA(rank=self.rank),
            dtypes=DtypePolicy(compute="bfloat16"),
            optim=recipe(self.sft_learning_rate),
            doctor=False,  # some 15 s a run; `fornax tune doctor` looks at these configs
        )

    def grpo_config(self, model: Path, pairs: Path, *, seed: int) -> GRPOConfig:
        """Reinforcement learning from where the supervised run ended."""
        return GRPOConfig(
            model=str(model),
            data=str(pairs / "train.jsonl"),
            max_length=2 * self.max_tokens,
            batch_size=self.batch_size,
            group_size=self.group_size,
            steps=self.grpo_steps,
            seed=seed,
            lora=LoRA(rank=self.rank),
            rollout=RolloutConfig(
                max_tokens=self.max_tokens, temperature=self.temperature, dtype="float32"
            ),
            reward=(REWARD,),
            # Neither a reference's pass nor one over the groups that teach nothing, half of them.
            algorithm=GRPO(kl_coefficient=0.0, skip_zero_advantage=True),
            dtypes=DtypePolicy(compute="bfloat16"),
            optim=dataclasses.replace(
                recipe(self.grpo_learning_rate),
                schedule=Cosine(warmup_steps=self.grpo_steps // 12),
            ),
            doctor=False,
        )
