"""Options of reinforcement learning: rounds, steps, rewards, GRPO and PPO."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fornax.config.errors import ConfigError
from fornax.config.spikes import refuse_rewinds
from fornax.optim import OptimConfig
from fornax.rewards import RewardSpec
from fornax.tune.config.algorithms import GRPO, GroupAlgorithm, check_clip
from fornax.tune.config.base import TuneConfig, recipe
from fornax.tune.config.rollout import ConversationConfig, RolloutConfig

__all__ = [
    "AdaptiveKL",
    "AsyncConfig",
    "FixedKL",
    "GRPOConfig",
    "Importance",
    "PPOConfig",
    "RLConfig",
]


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Truncated importance sampling: weigh a token by how much likelier the trainer finds it than
    the sampler did (Yao et al. 2025)."""

    cap: float = 2.0
    """The largest weight."""
    level: Literal["token", "sequence"] = "token"
    """Whether each token has its weight, or a completion one."""

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise ConfigError(
                f"cap={self.cap} must be 1 or more: it would weigh exact samples down"
            )


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """Rounds drawn while the trainer works on those before."""

    max_staleness: int = 1
    """How many rounds are drawn ahead, and so how many rounds old the weights are that one is
    drawn with; above 1 with samplers of their own (`fornax launch --samplers`)."""

    def __post_init__(self) -> None:
        if self.max_staleness < 1:
            raise ConfigError(
                f"max_staleness={self.max_staleness} must be 1 or more: so many rounds are drawn "
                "ahead. Leave `asynchronous` out for rollouts with the newest weights"
            )


@dataclass(frozen=True, kw_only=True)
class RLConfig(TuneConfig):
    """What GRPO and PPO share.

    A round draws `batch_size * mini_batches` completions, scores them, and trains on them in
    `mini_batches * rollout_epochs` optimizer steps of `batch_size` completions.
    """

    without_qat: ClassVar[str] = "completions are drawn by float weights, another policy"
    without_scheme: ClassVar[str] = "completions are drawn by products of floats, another policy"
    batch_size: int = 64
    """Completions of one optimizer step."""
    group_size: int = 8
    """Completions of one prompt."""
    optim: OptimConfig = field(default_factory=lambda: recipe(1e-5))
    """Optimizer, schedule, clipping; whole models take up to 1e-5, adapters up to ten times as
    much."""
    mini_batches: int = 1
    """Components that a round is divided into, an optimizer step each."""
    rollout_epochs: int = 1
    """Times a round is trained on."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How completions are drawn."""
    reward: tuple[str | RewardSpec, ...] = ()
    """Reward functions: `file.py:function`, the name of a built-in verifier, or a mapping with
    weight and time limit."""
    conversation: ConversationConfig | None = None
    """Let the model talk with an environment, or use tools; null: it answers once."""
    reward_workers: int = 2
    """Processes that reward functions run in."""
    reward_model: str | None = None
    """Run directory of `fornax tune reward`, whose score is a reward too; null has none."""
    reward_model_weight: float = 1.0
    """What the total multiplies the reward model's score with."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; entropy is reported in any case."""
    importance: Importance | None = None
    """Correct for differences between sampler and trainer; null only reports them."""
    routing_replay: bool = False
    """Let each token take the experts in training that it took where it was drawn (R3, Ma et al.
    2025), with the trainer's own weights for them; for models with experts."""
    asynchronous: AsyncConfig | None = None
    """Draw the next rounds while this one is trained on, which needs `importance`; null draws with
    the newest weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_rewinds(self.spikes, "reinforcement learning")
        for name in ("group_size", "mini_batches", "rollout_epochs", "reward_workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.completions % self.group_size:
            raise ConfigError(
                f"batch_size={self.batch_size} x mini_batches={self.mini_batches} completions do "
                f"not divide into groups of group_size={self.group_size}; use a multiple of it"
            )
        if self.rollout.max_tokens >= self.max_length:
            raise ConfigError(
                f"rollout.max_tokens={self.rollout.max_tokens} leaves no room for a prompt in "
                f"max_length={self.max_length}, which is at most the model's positions; use fewer, "
                f"such as --rollout.max-tokens {max(1, self.max_length // 2)}, or raise max_length"
            )
        plays = self.conversation is not None and self.conversation.environment
        if not (self.reward or self.reward_model or plays):
            raise ConfigError(
                "no reward says what a good completion is; name a function of yours with "
                "--reward my_rewards.py:score, a built-in verifier such as --reward math, or a "
                "reward model with --reward-model DIR"
            )
        if self.evaluates:
            raise ConfigError(
                "reinforcement learning evaluates nothing between its steps: the reward of every "
                "step is reported. Leave eval_data and eval_share out, and use `fornax eval` on "
                "held-out prompts"
            )
        if self.asynchronous is not None and self.importance is None:
            raise ConfigError(
                "asynchronous draws with weights that are a round old, and without importance the "
                "loss takes them for the newest: weigh tokens by how much likelier the trainer "
                "finds them, with --importance.cap 2"
            )
        if self.virtual_shards is not None:
            raise ConfigError(
                f"virtual_shards={self.virtual_shards} divides files of examples; prompts are "
                "drawn one after the other: leave it out"
            )
        if self.lora is not None and self.lora.dropout:
            raise ConfigError(
                f"lora.dropout={self.lora.dropout} would train another policy than the one that "
                "is sampled from: importance ratios would start away from 1; use 0"
            )

    @property
    def completions(self) -> int:
        """Completions of a round."""
        return self.batch_size * self.mini_batches

    @property
    def prompts(self) -> int:
        """Prompts of a round."""
        return self.completions // self.group_size

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps of a round."""
        return self.mini_batches * self.rollout_epochs


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(RLConfig):
    """`fornax tune grpo`: rewards of a group's completions are compared with each other."""

    algorithm: GroupAlgorithm = field(default_factory=GRPO)
    """The variant, as a set of options."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size == 1 and self.algorithm.baseline != "none":
            raise ConfigError(
                f"group_size=1 with baseline={self.algorithm.baseline}: a completion compared with "
                "itself always has advantage 0, and nothing is learned; use 4 or more, or "
                "algorithm.type=reinforce_plus_plus"
            )
        if self.group_size == 1 and self.algorithm.dynamic_sampling:
            raise ConfigError("dynamic_sampling needs a group_size above 1: it compares rewards")
        self._check_skipping()
        buffer = self.algorithm.overlong_buffer(self.rollout.max_tokens)
        if buffer > self.rollout.max_tokens:
            raise ConfigError(
                f"algorithm.overlong_tokens={buffer} is more than rollout.max_tokens="
                f"{self.rollout.max_tokens}"
            )

    def _check_skipping(self) -> None:
        """A completion without advantage may be left out if no other term gives it a gradient."""
        others = {
            "algorithm.kl_coefficient": self.algorithm.kl_coefficient,
            "entropy_coefficient": self.entropy_coefficient,
        }
        for name, value in others.items():
            if self.algorithm.skip_zero_advantage and value:
                raise ConfigError(
                    f"algorithm.skip_zero_advantage with {name}={value} would change the loss: "
                    "that term has a gradient where the advantage is 0; set one of them to 0"
                )
        if self.algorithm.skip_zero_advantage and self.steps_per_round > 1:
            raise ConfigError(
                f"algorithm.skip_zero_advantage with {self.steps_per_round} steps a round: the "
                "pass that scores a round packs all completions; use mini_batches=1 and "
                "rollout_epochs=1, or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class FixedKL:
    """The same coefficient in every round."""

    type: Literal["fixed"] = "fixed"
    coefficient: float = 0.05
    """What a token's divergence from the reference takes off its reward; 0 keeps no reference."""

    def __post_init__(self) -> None:
        if self.coefficient < 0:
            raise ConfigError(f"coefficient={self.coefficient} must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """A coefficient that leads the divergence to a target (Ziegler et al. 2019)."""

    type: Literal["adaptive"] = "adaptive"
    coefficient: float = 0.2
    """At the start."""
    target: float = 6.0
    """Divergence of a completion, in nats summed over its tokens, that is aimed at."""
    horizon: int = 10000
    """Completions in which the coefficient follows an error of the target's size."""

    def __post_init__(self) -> None:
        for name in ("coefficient", "target", "horizon"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RLConfig):
    """`fornax tune ppo`: a value function says how much of a reward was to be expected."""

    group_size: int = 1
    """Completions of one prompt."""
    mini_batches: int = 1
    """Components that a round is divided into, an optimizer step each."""
    rollout_epochs: int = 4
    """Times a round is trained on."""
    clip_low: float | None = 0.2
    """The ratio counts down to 1 - this; null does not clip."""
    clip_high: float | None = 0.2
    """The ratio counts up to 1 + this; null does not clip."""
    clip_dual: float | None = None
    """With a negative advantage the ratio counts up to this, above 1; null: without limit."""
    gamma: float = 1.0
    """Discount of what comes a token later."""
    gae_lambda: float = 0.95
    """Weight of longer returns in the advantages (Schulman et al. 2016)."""
    kl: FixedKL | AdaptiveKL = field(default_factory=FixedKL)
    """What a token's divergence from the reference takes off its reward."""
    value_coefficient: float = 0.1
    """Weight of the value function's loss."""
    value_clip: float | None = 0.2
    """A value's loss counts it at most this far from what it was before the round; null does not
    clip."""
    value_gradient: Literal["shared", "head"] = "shared"
    """Whether the value's loss also trains the policy's layers, or its head alone."""
    whiten_rewards: bool = False
    """Divide the rewards of a round's tokens by their standard deviation."""
    whiten_advantages: bool = True
    """Centre and scale the advantages of a round's tokens."""
    truncated_penalty: float = 0.0
    """Taken off the reward of a completion that ran out of tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clip(self.clip_low, self.clip_high, self.clip_dual)
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} must lie in [0, 1]")
        for name in ("value_coefficient", "truncated_penalty"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more")
        if self.value_clip is not None and self.value_clip <= 0:
            raise ConfigError(f"value_clip={self.value_clip} must be above 0, or null")
