"""What an engine is: limits, memory, parallelism, speculation. Names are those of `vllm serve`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fornax.config.errors import ConfigError

__all__ = ["MTP", "DraftModel", "EngineConfig", "LogprobsMode", "NGram", "Speculation"]

LogprobsMode = Literal["raw_logprobs", "scaled_logprobs", "processed_logprobs"]
"""The values of `EngineConfig.logprobs_mode`."""


@dataclass(frozen=True, kw_only=True)
class NGram:
    """Propose what followed the sequence's last tokens when they occurred before."""

    type: Literal["ngram"] = "ngram"
    num_speculative_tokens: int = 4
    """Tokens proposed at a time, at most."""
    prompt_lookup_max: int = 4
    """Longest run of last tokens that is looked for; longer runs are tried first."""
    prompt_lookup_min: int = 2
    """Shortest run of last tokens that is looked for."""

    def __post_init__(self) -> None:
        _at_least(1, num_speculative_tokens=self.num_speculative_tokens)
        _at_least(1, prompt_lookup_min=self.prompt_lookup_min)
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ConfigError(
                f"prompt_lookup_max={self.prompt_lookup_max} must be prompt_lookup_min="
                f"{self.prompt_lookup_min} or more"
            )


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """Propose what a smaller model of the same vocabulary samples."""

    type: Literal["draft_model"] = "draft_model"
    model: Path
    """Hugging Face directory of the draft model, or its name on the Hub."""
    num_speculative_tokens: int = 4
    """Tokens proposed at a time."""

    def __post_init__(self) -> None:
        _at_least(1, num_speculative_tokens=self.num_speculative_tokens)


@dataclass(frozen=True, kw_only=True)
class MTP:
    """Propose by the model's own module for multi-token prediction, the first where it has several,
    run again on what it proposed for each further token."""

    type: Literal["mtp"] = "mtp"
    num_speculative_tokens: int = 1
    """Tokens proposed at a time, at most; the module is trained for one."""

    def __post_init__(self) -> None:
        _at_least(1, num_speculative_tokens=self.num_speculative_tokens)


Speculation = NGram | DraftModel | MTP

Quantization = Literal["int8", "int4", "fp8", "mxfp4"]
KVCacheDtype = Literal["auto", "float32", "bfloat16", "int8", "fp8"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and choices of an engine; what is None is chosen from the model and the device."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and products; auto keeps the stored one. On CPU sums are in float32."""
    quantization: Quantization | None = None
    """Weights of few bits, rounded to the nearest when they are loaded (CPU). int8, int4: integers
    with a scale for 64 inputs of an output, multiplied with activations in 8 bits. fp8: e4m3 with a
    scale for an output; mxfp4: e2m1 with a power of two for 32 inputs; both with activations in
    bfloat16. The output projection of int4 is in int8, of mxfp4 in fp8. None: as the files are; on
    one CPU the codes of quantized files are multiplied as they are, where products take them."""
    seed: int = 0
    """Seed of requests that bring none."""

    max_model_len: int | None = None
    """Tokens of a sequence, prompt and output, at most; None: what the model is made for."""
    max_num_seqs: int | None = None
    """Sequences that run at once; None: 32 on CPU, 256 elsewhere."""
    max_num_batched_tokens: int | None = None
    """Tokens of a step, at most; None: on CPU 256, or 512 for models with experts, whose products
    want more rows; 2048 elsewhere."""
    max_num_partial_prefills: int = 2
    """Prompts that share a step's room for prefill, so that a short one passes a long one."""
    long_prefill_token_threshold: int = 0
    """Tokens of one prompt in a step, at most; 0: no limit of its own."""
    inter_token_latency_target: float | None = None
    """Seconds between the tokens of a sequence while prompts of others are read beside it: as many
    of their tokens share a step as the last steps' times allow, 32 at least. None: what
    `max_num_batched_tokens` leaves."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Who goes first: who came first, or the lowest `priority`."""

    block_size: int | None = None
    """Tokens of a cache page; None: 16, and on TPU up to 256 where sequences are many and long."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Type of the cache; auto: bfloat16 when the weights are not float32, else float32. int8, fp8
    (e4m3): 8 bits a number and a scale for each token's key and value of a head, about twice as
    many tokens as bfloat16 in the same memory; rounded when they are written."""
    kv_cache_memory_bytes: int | None = None
    """Memory of the cache, a draft model's included; None: what `max_num_seqs` full sequences need,
    up to a share of it."""
    gpu_memory_utilization: float = 0.9
    """Share of an accelerator's memory that an engine takes, if the cache's is not given."""
    num_gpu_blocks_override: int | None = None
    """Pages of the full-attention cache, whatever the memory."""
    enable_prefix_caching: bool = True
    """Whether requests share the pages of equal beginnings, and of models with linear layers the
    states kept there."""
    num_state_checkpoints: int | None = None
    """Of models with linear layers: states kept for equal beginnings; None: twice as many as
    sequences that run at once, in a tenth of a device's memory at most."""

    num_scheduler_steps: int = 4
    """Steps that one call of the device does at most, where it does nothing but decode and none of
    its requests needs the host between tokens; only as many as fit in 20 ms. 1: each token by
    itself."""
    tensor_parallel_size: int = 1
    """Devices that each layer is divided over."""
    speculative_config: Speculation | None = None
    """How tokens are proposed ahead; None: not at all."""
    enable_lora: bool = False
    """Whether adapters can be loaded."""
    max_loras: int = 4
    """Different adapters in one step, at most."""
    max_lora_rank: int = 16
    """Rank of an adapter, at most."""
    max_logprobs: int = 20
    """Log probabilities a request may ask for at each position."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """Whose log probabilities sampled tokens get. raw_logprobs: the model's own distribution.
    scaled_logprobs: after masks, biases, penalties and the temperature. processed_logprobs: after
    top-k, top-p and min-p too, the distribution that the token was drawn from. Greedy requests
    count as temperature 1. Prompt tokens always get the model's own."""
    enable_return_routed_experts: bool = False
    """Whether completions come with the experts that each of their tokens took, as routing replay
    needs them; for models with experts."""
    step_sizes: Literal["fine", "coarse"] = "fine"
    """How many sizes of steps are compiled; a step takes the time of the next larger size. fine: at
    most a third of it is padding. coarse: each is four times the last, so that half as many or
    fewer are compiled, for work that fills its batches."""
    compile_threads: int = 2
    """Threads that compile the steps."""

    @property
    def num_drafts(self) -> int:
        """Tokens proposed for a sequence at a time, at most."""
        speculation = self.speculative_config
        return 0 if speculation is None else speculation.num_speculative_tokens

    @property
    def mtp(self) -> bool:
        """Whether the model's own module proposes."""
        return isinstance(self.speculative_config, MTP)

    @property
    def draft_places(self) -> int:
        """Places of a row that a draft model has proposals for: a draft each, the one after."""
        return 1 + self.num_drafts if isinstance(self.speculative_config, DraftModel) else 0

    def __post_init__(self) -> None:
        """Check sizes and combinations."""
        optional = {
            name: getattr(self, name)
            for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size")
            if getattr(self, name) is not None
        }
        _at_least(1, **optional, max_loras=self.max_loras)
        _at_least(1, max_lora_rank=self.max_lora_rank, compile_threads=self.compile_threads)
        _at_least(1, tensor_parallel_size=self.tensor_parallel_size)
        _at_least(1, max_num_partial_prefills=self.max_num_partial_prefills)
        _at_least(1, num_scheduler_steps=self.num_scheduler_steps)
        _at_least(0, max_logprobs=self.max_logprobs)
        _at_least(0, long_prefill_token_threshold=self.long_prefill_token_threshold)
        target = self.inter_token_latency_target
        if target is not None and not 0 < target < math.inf:
            raise ConfigError(
                f"inter_token_latency_target={target} must be a number of seconds above 0, such as "
                "0.03; leave it out for none"
            )
        if self.num_state_checkpoints is not None:
            _at_least(1, num_state_checkpoints=self.num_state_checkpoints)
            if not self.enable_prefix_caching:
                raise ConfigError(
                    f"num_state_checkpoints={self.num_state_checkpoints} is for prefix caching, "
                    "which enable_prefix_caching=False leaves off; leave one of them out"
                )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0, at most 1"
            )
        if self.num_gpu_blocks_override is not None:
            _at_least(2, num_gpu_blocks_override=self.num_gpu_blocks_override)
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ConfigError(
                f"max_num_batched_tokens={tokens} is below max_num_seqs={seqs}: a step must hold "
                "a token of every running sequence"
            )
        if self.quantization is not None and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"quantization={self.quantization} runs on one device; leave out "
                f"tensor_parallel_size={self.tensor_parallel_size}"
            )


def _at_least(lowest: int, **values: int) -> None:
    for name, value in values.items():
        if value < lowest:
            raise ConfigError(f"{name}={value} must be {lowest} or more")
