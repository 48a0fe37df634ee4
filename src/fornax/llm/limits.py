"""An engine's limits in figures: what the config leaves open, from the model and the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from fornax.config.errors import ConfigError, EngineError
from fornax.llm.config import EngineConfig
from fornax.llm.target import Target, attached
from fornax.models import DecoderConfig, cache_windows, page_bytes

__all__ = ["Limits", "cache_shards", "divide_pages", "pages_needed", "resolve_limits"]

_CPU_CACHE_SHARE = 0.25
_CPU_CACHE_MOST = 4 << 30


@dataclass(frozen=True)
class Limits:
    """Sizes of an engine, all resolved."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: tuple[int, ...]
    """Pages of each group of `cache_windows`, page 0, which is never given out, included."""
    cache_dtype: jnp.dtype

    @property
    def table_width(self) -> int:
        """Pages of the longest sequence."""
        return math.ceil(self.max_model_len / self.page_size)

    @property
    def cache_tokens(self) -> int:
        """Tokens that fit in the cache, by its first group."""
        return (self.num_pages[0] - 1) * self.page_size


def resolve_limits(
    config: EngineConfig,
    model: DecoderConfig,
    weights_dtype: jnp.dtype,
    weight_bytes: int,
    target: Target | None = None,
) -> Limits:
    """Choose what `config` leaves open.

    Args:
      config: the engine's.
      model: the model's.
      weights_dtype: of the weights.
      weight_bytes: that the weights take on each device.
      target: what the engine is made for; None for this process's devices.

    Raises:
      ConfigError: limits beyond the model or against each other.
      EngineError: no memory for the cache.
    """
    target = target or attached()
    on_cpu = target.platform == "cpu"
    length = config.max_model_len or model.max_position_embeddings
    if length > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={length} is beyond the model's {model.max_position_embeddings} "
            "positions; leave it out or give less"
        )
    seqs = config.max_num_seqs or (32 if on_cpu else 256)
    tokens = config.max_num_batched_tokens or max(512 if on_cpu else 2048, seqs)
    if tokens < seqs:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is below max_num_seqs={seqs}: a step must hold "
            "a token of every running sequence"
        )
    dtype = _cache_dtype(config, weights_dtype)
    sizes = page_bytes(model, config.block_size, dtype)
    needs = pages_needed(model, length, tokens, config.block_size)
    full = seqs * sum(need * size for need, size in zip(needs, sizes, strict=True))
    budget = _budget(config, model, weight_bytes, full, target)
    if config.num_gpu_blocks_override is not None:
        pages = [config.num_gpu_blocks_override for _ in needs]
    else:
        pages = divide_pages(budget, needs, sizes, seqs)
    for window, have, need in zip(cache_windows(model), pages, needs, strict=True):
        if have < need:
            kind = "full attention" if window is None else f"a window of {window}"
            raise EngineError(
                f"the cache has room for {have * config.block_size} tokens of layers with {kind} "
                f"and one sequence of max_model_len={length} needs {need * config.block_size}; "
                "give kv_cache_memory_bytes (or num_gpu_blocks_override) more, or max_model_len "
                "less"
            )
    return Limits(
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        page_size=config.block_size,
        num_pages=tuple(count + 1 for count in pages),
        cache_dtype=dtype,
    )


def _cache_dtype(config: EngineConfig, weights_dtype: jnp.dtype) -> jnp.dtype:
    if config.kv_cache_dtype != "auto":
        return jnp.dtype(config.kv_cache_dtype)
    full = weights_dtype == jnp.float32 and config.quantization is None
    return jnp.dtype(jnp.float32 if full else jnp.bfloat16)


def pages_needed(model: DecoderConfig, length: int, tokens: int, page_size: int) -> tuple[int, ...]:
    """Pages of each group that one sequence of `length` tokens may hold at once.

    A window's layers hold the window, and what a step of `tokens` tokens adds to it.
    """
    kept = [
        length if window is None else min(length, window + tokens + page_size)
        for window in cache_windows(model)
    ]
    return tuple(math.ceil(tokens / page_size) for tokens in kept)


def cache_shards(model: DecoderConfig, tensor_parallel_size: int) -> int:
    """How many devices share the cache: all, or it is whole on each if its heads do not divide."""
    return 1 if model.kv_heads % tensor_parallel_size else tensor_parallel_size


def _budget(
    config: EngineConfig, model: DecoderConfig, weight_bytes: int, wanted: int, target: Target
) -> int:
    """Bytes for the cache on all devices together, each part of it counted once."""
    shards = cache_shards(model, config.tensor_parallel_size)
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes * shards
    if target.memory is not None:
        free = int(target.memory * config.gpu_memory_utilization) - weight_bytes
        return max(free, 0) * shards
    return min(wanted, _CPU_CACHE_MOST, int(_CPU_CACHE_SHARE * _host_memory()))


def _host_memory() -> int:
    """Bytes of memory that are free on this machine."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 8 << 30


def divide_pages(budget: int, needs: Sequence[int], sizes: Sequence[int], seqs: int) -> list[int]:
    """Pages of each group: as many full sequences as fit, in the proportion that they need.

    Args:
      budget: bytes on all devices together.
      needs: pages of each group that a sequence needs.
      sizes: bytes of a page of each group.
      seqs: sequences that pages are wanted for, at most.
    """
    per_sequence = sum(math.prod(pair) for pair in zip(needs, sizes, strict=True))
    share = min(budget / per_sequence, float(seqs)) if per_sequence else 0.0
    return [max(int(share * need), min(need, 1)) for need in needs]
