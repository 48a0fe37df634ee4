"""An engine's limits in figures: what the config leaves open, from the model and the device."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError, EngineError
from fornax.llm.config import EngineConfig
from fornax.models import DecoderConfig, cache_windows, page_bytes

__all__ = ["Limits", "resolve_limits"]

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
    config: EngineConfig, model: DecoderConfig, weights_dtype: jnp.dtype, weight_bytes: int
) -> Limits:
    """Choose what `config` leaves open.

    Args:
      config: the engine's.
      model: the model's.
      weights_dtype: of the weights.
      weight_bytes: that the weights take on each device.

    Raises:
      ConfigError: limits beyond the model or against each other.
      EngineError: no memory for the cache.
    """
    on_cpu = jax.default_backend() == "cpu"
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
    needs = [
        _pages_needed(window, length, tokens, config.block_size) for window in cache_windows(model)
    ]
    full = seqs * sum(need * size for need, size in zip(needs, sizes, strict=True))
    budget = _budget(config, weight_bytes, full)
    if config.num_gpu_blocks_override is not None:
        pages = [config.num_gpu_blocks_override for _ in needs]
    else:
        pages = _divide(budget, needs, sizes, seqs)
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


def _pages_needed(window: int | None, length: int, tokens: int, page_size: int) -> int:
    """Pages that one sequence of full length may hold at once."""
    if window is not None:
        length = min(length, window + tokens + page_size)
    return math.ceil(length / page_size)


def _budget(config: EngineConfig, weight_bytes: int, wanted: int) -> int:
    """Bytes for the cache on each device."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes * config.tensor_parallel_size
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        free = int(stats["bytes_limit"] * config.gpu_memory_utilization) - weight_bytes
        return max(free, 0) * config.tensor_parallel_size
    return min(wanted, _CPU_CACHE_MOST, int(_CPU_CACHE_SHARE * _host_memory()))


def _host_memory() -> int:
    """Bytes of memory that are free on this machine."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 8 << 30


def _divide(budget: int, needs: list[int], sizes: tuple[int, ...], seqs: int) -> list[int]:
    """Pages of each group: as many full sequences as fit, in the proportion that they need."""
    per_sequence = sum(math.prod(pair) for pair in zip(needs, sizes, strict=True))
    share = min(budget / per_sequence, float(seqs)) if per_sequence else 0.0
    return [max(int(share * need), min(need, 1)) for need in needs]
