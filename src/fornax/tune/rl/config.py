"""What a user may say about reinforcement learning: rollouts, rewards, steps. No JAX here."""

from dataclasses import dataclass, field
from typing import Literal

from fornax.config.errors import ConfigError
from fornax.optim import OptimConfig
from fornax.rewards import RewardSpec
from fornax.tune.config import TuneConfig, recipe
from fornax.tune.rl.algorithms import GRPO, GroupAlgorithm, check_clip
from fornax.tune.rl.kl import AdaptiveKL, FixedKL
from fornax.tune.rollout import ConversationConfig, SampleSettings

__all__ = ["AsyncConfig", "GRPOConfig", "Importance", "PPOConfig", "RLConfig", "RolloutConfig"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are drawn."""

    max_tokens: int = 256
    """Tokens of a completion at most."""
    min_tokens: int = 0
    """Tokens before which none may end."""
    temperature: float = 1.0
    """Divides the logits, of the sampler and of the trained log-probabilities alike."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this probability; below 1 the sampler's distribution is not
    the trained one, which `mismatch_kl` shows."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely, as a share of the likeliest."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""
    tensor_parallel_size: int | None = None
    """Devices that each layer of an engine is divided over; null takes the trainer's `mesh.tensor`,
    and 1 on CPU."""
    data_parallel_size: int | None = None
    """Engines that draw side by side, each with all the weights; null takes as many as the
    trainer's devices hold, and 1 on CPU, whose devices share its cores."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the weights that are drawn with; null takes `dtypes.compute`, to which the trainer
    rounds its own."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the cache; auto is the weights'."""
    max_num_seqs: int | None = None
    """Completions an engine works on at once; null takes its part of a round, 256 at most."""
    max_num_batched_tokens: int | None = None
    """Tokens of a step of an engine, at most; null takes twice `max_num_seqs`, 64 at least."""
    kv_cache_memory_bytes: int | None = None
    """Memory of an engine's cache, on each of its devices; null takes what `max_num_seqs` full
    sequences need, within `gpu_memory_utilization`."""
    gpu_memory_utilization: float = 0.3
    """Share of an accelerator's memory for the engine's weights and cache, beside the trainer's
    parameters, optimizer and activations."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.temperature <= 0:
            raise ConfigError(
                f"temperature={self.temperature} draws the same completion every time, which "
                "teaches nothing; use one above 0, such as 1.0"
            )
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens} must be 1 or more")
        for name in (
            "tensor_parallel_size",
            "data_parallel_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory_bytes",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more, or null")
        if not 0 < self.gpu_memory_utilization < 1:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and below "
                "1: the trainer needs the rest"
            )
        self.settings(1)

    def settings(self, group_size: int) -> SampleSettings:
        """For `group_size` completions of a prompt."""
        return SampleSettings(
            n=group_size,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
        )


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Truncated importance sampling: weigh a token by how much likelier the trainer finds it than
    the sampler did (Yao et al. 2025)."""

    cap: float = 2.0
    """The largest weight."""
    level: Literal["token", "sequence"] = "token"
    """Whether each token has its weight, or a completion one."""

    def __post_init__(self) -> None:
        """Check the number."""
        if self.cap < 1:
            raise ConfigError(
                f"cap={self.cap} must be 1 or more: it would weigh exact samples down"
            )


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """One round drawn while the trainer works on the one before."""

    max_staleness: int = 1
    """How many rounds old the weights are that one is drawn with: 1."""

    def __post_init__(self) -> None:
        """Check the number."""
        if self.max_staleness != 1:
            raise ConfigError(
                f"max_staleness={self.max_staleness} must be 1: one round is drawn ahead, so its "
                "weights are never older. Leave `asynchronous` out for rollouts with the newest "
                "weights"
            )


@dataclass(frozen=True, kw_only=True)
class RLConfig(TuneConfig):
    """What GRPO and PPO share.

    A round draws `batch_size * mini_batches` completions, judges them, and trains on them in
    `mini_batches * rollout_epochs` optimizer steps of `batch_size` completions.
    """

    batch_size: int = 64
    """Completions of one optimizer step."""
    group_size: int = 8
    """Completions of one prompt."""
    optim: OptimConfig = field(default_factory=lambda: recipe(1e-5))
    """Optimizer, schedule, clipping; whole models take up to 1e-5, adapters up to ten times as
    much."""
    mini_batches: int = 1
    """Parts that a round is divided into, an optimizer step each."""
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
    asynchronous: AsyncConfig | None = None
    """Draw the next round while this one is trained on, which needs `importance`; null draws with
    the newest weights."""

    def __post_init__(self) -> None:
        """Check combinations."""
        super().__post_init__()
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
                f"max_length={self.max_length}; lower it, or raise max_length"
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
        """Check combinations."""
        super().__post_init__()
        if self.group_size == 1 and self.algorithm.baseline != "none":
            raise ConfigError(
                f"group_size=1 with baseline={self.algorithm.baseline}: a completion compared with "
                "itself always has advantage 0, and nothing is learned; use 4 or more, or "
                "algorithm.type=reinforce_plus_plus"
            )
        if self.group_size == 1 and self.algorithm.dynamic_sampling:
            raise ConfigError("dynamic_sampling needs a group_size above 1: it compares rewards")
        buffer = self.algorithm.overlong_buffer(self.rollout.max_tokens)
        if buffer > self.rollout.max_tokens:
            raise ConfigError(
                f"algorithm.overlong_tokens={buffer} is more than rollout.max_tokens="
                f"{self.rollout.max_tokens}"
            )


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RLConfig):
    """`fornax tune ppo`: a value function says how much of a reward was to be expected."""

    group_size: int = 1
    """Completions of one prompt."""
    mini_batches: int = 1
    """Parts that a round is divided into, an optimizer step each."""
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
        """Check numbers and combinations."""
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
