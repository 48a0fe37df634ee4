"""Options of rollouts: sampling, engines, conversations with environments and tools."""

from dataclasses import dataclass
from typing import Literal

from fornax.config.errors import ConfigError
from fornax.tune.rollout import Limits, SampleSettings

__all__ = ["ConversationConfig", "RolloutConfig"]


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
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = "auto"
    """Type of the cache; auto is the weights'. Of 8 bits, int8 or fp8, samplers draw from slightly
    other distributions than the trainer's, which the reported difference shows."""
    shards: int | None = None
    """Parts in which a round's prompts are drawn, each in one engine by itself: bits depend on it,
    and not on how many samplers there are. null takes one batch that conversations join as they
    come, with samplers of their own 8 parts."""
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
            "shards",
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
class ConversationConfig:
    """What the model talks with."""

    environment: str = ""
    """FILE.py:NAME or MODULE:NAME of a class, made again for each completion; empty: tools
    alone."""
    tools: tuple[str, ...] = ()
    """FILE.py:NAME or MODULE:NAME of functions that the model may call, each run in a process."""
    tool_parser: str | None = None
    """How the model writes calls: hermes, llama3_json, mistral, pythonic, …; needed with tools."""
    tool_seconds: float = 5.0
    """The longest a call may take."""
    tool_workers: int = 2
    """Processes that run tools."""
    max_turns: int = 8
    """Turns of the model, at most."""
    max_failed: float = 0.25
    """Share of a round's conversations that may fail (the environment raises, say) and are left out
    of the loss; more end the run, with the reason."""

    def __post_init__(self) -> None:
        if bool(self.environment) == bool(self.tools):
            raise ConfigError(
                "a conversation takes an environment or tools, one of the two; an environment may "
                "run tools of its own with ToolPool"
            )
        if self.tools and self.tool_parser is None:
            raise ConfigError(
                "tools need tool_parser, the way the model writes its calls, such as hermes"
            )
        if not 0 <= self.max_failed <= 1:
            raise ConfigError(
                f"max_failed={self.max_failed} is a share of conversations and must lie in [0, 1]"
            )
        Limits(max_turns=self.max_turns)
