"""An engine's limits in figures: what the config leaves open, from the model and the device."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from fornax.config.errors import ConfigError, EngineError
from fornax.config.host_memory import available_memory
from fornax.kernels import cache_has_codes, paged_head_layout
from fornax.llm.config import EngineConfig
from fornax.llm.devices import DeviceSpec
from fornax.models import (
    CacheHeads,
    DecoderConfig,
    cache_windows,
    keeps_states,
    page_bytes,
    state_bytes,
    takes,
)

__all__ = [
    "Limits",
    "cache_heads",
    "divide_pages",
    "draft_limits",
    "limits_without_cache",
    "pages_needed",
    "resolve_limits",
]

_LARGEST_PAGE = 64
_SMALLEST_PAGE_BYTES = 2**14
_TPU_LANES = 128
_CPU_CACHE_SHARE = 0.25
_CPU_CACHE_MOST = 4 << 30
_STATES_SHARE = 0.1
"""Of a device's memory, for states kept for prefix reuse, if their number is not given."""


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
    """Of the pages; int8 and float8_e4m3fn are codes, with a scale for each key and value."""
    cache_heads: tuple[CacheHeads, ...]
    """The heads that pages of each group hold."""
    draft_pages: int = 0
    """Pages of each group of a draft model's cache, page 0 included; 0 without one."""
    draft_heads: tuple[CacheHeads, ...] | None = None
    """The heads that these hold."""
    state_versions: int = 0
    """States of a row, so that proposed tokens can be taken back; 0 where no layer keeps any."""
    state_checkpoints: int = 0
    """States kept for prefix reuse."""
    draft_state_versions: int = 0
    """States of a row of the draft model."""

    @property
    def table_width(self) -> int:
        """Pages of the longest sequence."""
        return math.ceil(self.max_model_len / self.page_size)

    @property
    def num_state_slots(self) -> int:
        """Slots of layers' states, those of rows and those kept for prefix reuse."""
        return self.max_num_seqs * self.state_versions + self.state_checkpoints

    def page_bytes(self, model: DecoderConfig) -> tuple[int, ...]:
        """Bytes of a page of each group of `model`, on all devices together."""
        return page_bytes(model, self.page_size, self.cache_dtype, self.cache_heads)

    def pages_per_sequence(self, model: DecoderConfig) -> tuple[int, ...]:
        """Pages of each group of `model` that a sequence of full length may hold at once."""
        tokens = self.max_num_batched_tokens
        return pages_needed(model, self.max_model_len, tokens, self.page_size)

    def sequence_bytes(self, model: DecoderConfig) -> int:
        """Bytes of the cache of one sequence of full length, on all devices together."""
        pages = zip(self.pages_per_sequence(model), self.page_bytes(model), strict=True)
        return sum(need * size for need, size in pages)

    @property
    def cache_tokens(self) -> int:
        """Tokens that fit in the cache, by its first group; there is one."""
        return (self.num_pages[0] - 1) * self.page_size


def resolve_limits(
    config: EngineConfig,
    model: DecoderConfig,
    weights_dtype: jnp.dtype,
    other_bytes: int,
    target: DeviceSpec,
    draft: DecoderConfig | None = None,
) -> Limits:
    """Choose what `config` leaves open.

    Args:
      weights_dtype: of the weights.
      other_bytes: that all but the cache takes on each device; see `fornax.llm.memory`.

    Raises:
      ConfigError: limits beyond the model or against each other.
      EngineError: no memory for the cache.
    """
    limits = limits_without_cache(config, model, weights_dtype, target, draft)
    needs, sizes = limits.pages_per_sequence(model), limits.page_bytes(model)
    if draft is not None:  # one page more of every group, for all tokens
        needs = (*needs, limits.table_width)
        sizes = (*sizes, sum(draft_limits(limits, draft).page_bytes(draft)))
    seqs, page_size, windows = limits.max_num_seqs, limits.page_size, cache_windows(model)
    if not windows:
        _check_pageless(config, draft, other_bytes, target)
    if config.num_gpu_blocks_override is not None:
        pages = [config.num_gpu_blocks_override for _ in needs]
    else:
        full = seqs * sum(need * size for need, size in zip(needs, sizes, strict=True))
        pages = divide_pages(_budget(config, other_bytes, full, target), needs, sizes, seqs)
    kinds = ["full attention" if w is None else f"a window of {w}" for w in windows]
    for kind, have, need in zip([*kinds, "the draft model"], pages, needs, strict=False):
        if have < need:
            raise EngineError(
                f"the cache has room for {have * page_size} tokens of layers with {kind} "
                f"and one sequence of max_model_len={limits.max_model_len} needs "
                f"{need * page_size}{_beside(other_bytes, target)}; give kv_cache_memory_bytes "
                "(or num_gpu_blocks_override) more, or max_model_len less"
            )
    _check_room(config, pages, sizes, other_bytes, target)
    return dataclasses.replace(
        limits,
        num_pages=tuple(count + 1 for count in pages[: len(windows)]),
        draft_pages=0 if draft is None else pages[-1] + 1,
    )


def _check_pageless(
    config: EngineConfig, draft: DecoderConfig | None, other_bytes: int, target: DeviceSpec
) -> None:
    """Refuse what says how large pages are that no layer keeps, or states that do not fit.

    Raises:
      ConfigError, EngineError: saying what to leave out or to lower.
    """
    names = ("num_gpu_blocks_override", "kv_cache_memory_bytes")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if config.kv_cache_dtype != "auto":
        given["kv_cache_dtype"] = config.kv_cache_dtype
    if given and draft is None:
        name, value = next(iter(given.items()))
        raise ConfigError(
            f"{name}={value} is for keys and values, and no layer of the model keeps any; leave it "
            "out"
        )
    if target.memory is not None and other_bytes > target.memory:
        raise EngineError(
            f"the states of max_num_seqs={config.max_num_seqs or 'the default'} sequences do not "
            f"fit{_beside(other_bytes, target)}"
        )


def _beside(other_bytes: int, target: DeviceSpec) -> str:
    if target.memory is None:
        return ""
    return (
        f": weights, adapters, sampler and steps take {other_bytes / 2**30:.2f} GiB of a device's "
        f"{target.memory / 2**30:.2f} GiB (max_num_seqs, max_num_batched_tokens, max_loras "
        "and num_state_checkpoints lower that)"
    )


def _check_room(
    config: EngineConfig,
    pages: Sequence[int],
    sizes: Sequence[int],
    other_bytes: int,
    target: DeviceSpec,
) -> None:
    """Refuse a cache that was asked for and does not fit beside the rest.

    Raises:
      EngineError: saying what to lower.
    """
    cache = sum(count * size for count, size in zip(pages, sizes, strict=True))
    cache //= config.tensor_parallel_size
    if target.memory is not None:
        room, where = target.memory - other_bytes, "a device has left after all else"
    elif target.attached:
        room, where = _host_memory(), "this machine has free"
    else:
        return
    if cache > room:
        raise EngineError(
            f"a cache of {cache / 2**30:.2f} GiB does not fit in the {max(room, 0) / 2**30:.2f} "
            f"GiB that {where}; lower kv_cache_memory_bytes or num_gpu_blocks_override, or leave "
            "them out"
        )


def draft_limits(limits: Limits, draft: DecoderConfig) -> Limits:
    """The limits of a draft model: its own pages and heads, every layer keeping all tokens."""
    assert limits.draft_heads is not None, "the limits were resolved without a draft model"
    return dataclasses.replace(
        limits,
        num_pages=(limits.draft_pages,) * len(cache_windows(draft)),
        cache_heads=limits.draft_heads,
        state_versions=limits.draft_state_versions,
        state_checkpoints=0,
    )


def limits_without_cache(
    config: EngineConfig,
    model: DecoderConfig,
    weights_dtype: jnp.dtype,
    target: DeviceSpec,
    draft: DecoderConfig | None = None,
) -> Limits:
    """The limits that do not depend on memory, with no pages; see `resolve_limits`."""
    size = config.tensor_parallel_size
    on_cpu = target.platform == "cpu"
    length = config.max_model_len or model.max_position_embeddings
    if length > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={length} is beyond the model's {model.max_position_embeddings} "
            "positions; leave it out or give less"
        )
    seqs = config.max_num_seqs or (32 if on_cpu else 256)
    chunk = (256 if model.experts is None else 512) if on_cpu else 2048
    tokens = config.max_num_batched_tokens or max(chunk, seqs)
    if tokens < seqs:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is below max_num_seqs={seqs}: a step must hold "
            "a token of every running sequence"
        )
    dtype = _cache_dtype(config, weights_dtype)
    heads = cache_heads(model, target.platform, size, dtype)
    page_size = config.block_size or _page_size(target.platform, heads, size, dtype)
    if model.attention_chunk is not None and model.attention_chunk % page_size:
        raise ConfigError(
            f"block_size={page_size} does not divide the model's chunks of "
            f"{model.attention_chunk} positions; use one that does"
        )
    versions = 1 + config.num_drafts
    return Limits(
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        page_size=page_size,
        num_pages=(0,) * len(cache_windows(model)),
        cache_dtype=dtype,
        cache_heads=heads,
        draft_heads=None if draft is None else cache_heads(draft, target.platform, size, dtype),
        state_versions=versions if keeps_states(model) else 0,
        state_checkpoints=_state_checkpoints(config, model, weights_dtype, seqs, target),
        draft_state_versions=versions if draft is not None and keeps_states(draft) else 0,
    )


def _state_checkpoints(
    config: EngineConfig,
    model: DecoderConfig,
    dtype: jnp.dtype,
    seqs: int,
    target: DeviceSpec,
) -> int:
    """States kept for prefix reuse: two for each sequence, in a share of a device's memory."""
    given = config.num_state_checkpoints
    if not keeps_states(model):
        if given is not None:
            raise ConfigError(
                f"num_state_checkpoints={given} is for models with linear layers, and this one has "
                "none: it reuses pages alone; leave it out"
            )
        return 0
    if not config.enable_prefix_caching or not takes(model, "prefix reuse"):
        return 0
    memory = target.memory
    if memory is None and target.attached:
        memory = _host_memory()
    if given is not None or memory is None:
        return given or 2 * seqs
    room = int(_STATES_SHARE * memory) * config.tensor_parallel_size
    return max(1, min(2 * seqs, room // state_bytes(model, dtype)))


def _page_size(platform: str, heads: tuple[CacheHeads, ...], shards: int, dtype: jnp.dtype) -> int:
    """16 tokens; on TPU more where a device's share of a page in one layer would be small: each is
    fetched by itself, which takes as long as 8 KiB of it. The scales of codes fill its lanes."""
    size = 16
    if platform == "tpu" and heads:
        slot = min(own.token_bytes(dtype) for own in heads) // shards
        scales = math.gcd(*(own.parts * own.count // shards for own in heads))
        lanes = _TPU_LANES if cache_has_codes(dtype) else 1
        while size < _LARGEST_PAGE and (
            size * slot < _SMALLEST_PAGE_BYTES or size * scales % lanes
        ):
            size *= 2
    return size


def _cache_dtype(config: EngineConfig, weights_dtype: jnp.dtype) -> jnp.dtype:
    if config.kv_cache_dtype == "fp8":
        return jnp.dtype(jnp.float8_e4m3fn)
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


def cache_heads(
    model: DecoderConfig, platform: str, tensor_parallel_size: int, dtype: jnp.dtype
) -> tuple[CacheHeads, ...]:
    """The heads that the cache holds in each group: one for each device at least, and on TPU in
    rows that fill its lanes."""

    def held(own: CacheHeads) -> CacheHeads:
        own = own._replace(count=max(own.count, tensor_parallel_size))
        if platform != "tpu":
            return own
        count = own.count // tensor_parallel_size
        shared = own.parts == 1
        width, joined = paged_head_layout(own.width, count, dtype.name, shared=shared)
        return own._replace(width=width, joined=joined)

    return tuple(held(own) for own in CacheHeads.of(model))


def _budget(config: EngineConfig, other_bytes: int, wanted: int, target: DeviceSpec) -> int:
    """Bytes for the cache on all devices together."""
    shards = config.tensor_parallel_size
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes * shards
    if target.memory is not None:
        free = int(target.memory * config.gpu_memory_utilization) - other_bytes
        return max(free, 0) * shards
    return min(wanted, _CPU_CACHE_MOST, int(_CPU_CACHE_SHARE * _host_memory()))


def _host_memory() -> int:
    """Bytes of memory that are free on this machine."""
    return available_memory() or 8 << 30


def divide_pages(budget: int, needs: Sequence[int], sizes: Sequence[int], seqs: int) -> list[int]:
    """Pages of each group: as many full sequences as fit, in the proportion that they need.

    Args:
      budget: bytes on all devices together.
      needs: pages of each group that a sequence needs.
      sizes: bytes of a page of each group.
      seqs: sequences that pages are wanted for, at most.
    """
    per_sequence = sum(math.prod(pair) for pair in zip(needs, sizes, strict=True))
    share = min(budget / per_sequence, float(seqs)) if per_sequence else float(seqs)
    return [max(int(share * need), min(need, 1)) for need in needs]
