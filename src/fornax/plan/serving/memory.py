"""What an engine takes of a chip's memory, and how much cache there could be."""

import math
from typing import Any

import jax

from fornax.llm.limits import divide_pages, pages_needed
from fornax.plan.serving.data import CacheGroup, MemoryReport
from fornax.plan.serving.layout import Engine
from fornax.plan.serving.work import Amounts

__all__ = ["cache_holds", "guessed_temporaries", "memory_of"]

_LIVE_LOGITS = 9
"""Copies of the logits in float32 that choosing tokens has alive, by what XLA makes of it."""


def memory_of(engine: Engine, temporaries: int, code: int) -> MemoryReport:
    """The memory of one chip.

    Args:
      engine: as shapes.
      temporaries: bytes of one device, of the program that needs most.
      code: bytes of one device, of all programs.
    """
    each = engine.topology.chip.devices  # engines fill a chip: its devices hold the same
    usable = int(engine.topology.chip.usable_bytes)
    weights = engine.weights.nbytes * each
    cache = local_bytes(engine.arrays.kv) * each
    sampler = kept_bytes(engine) * each
    temporaries, code = temporaries * each, code * each
    free = max(0, usable - weights - sampler - temporaries - code)
    needs, sizes = engine.pages_per_sequence, engine.page_bytes
    per_sequence = sum(need * size for need, size in zip(needs, sizes, strict=True)) * each
    most = divide_pages(free // each, needs, sizes, 1 << 40)
    fits = free >= per_sequence
    page_size = engine.limits.page_size
    kinds = engine.model.config.layer_kinds()
    groups = tuple(
        CacheGroup(
            window=window,
            layers=sum(kind.window == window for kind in kinds),
            bytes_per_token=size * each // page_size,
            pages_per_sequence=need,
            pages=pages - 1,
        )
        for window, size, need, pages in zip(
            engine.windows, sizes, needs, engine.limits.num_pages, strict=True
        )
    )
    return MemoryReport(
        usable=usable,
        weights=weights,
        cache=cache,
        sampler=sampler,
        temporaries=temporaries,
        code=code,
        bytes_per_token=sum(group.bytes_per_token for group in groups),
        bytes_per_sequence=per_sequence,
        groups=groups,
        cache_tokens=engine.limits.cache_tokens,
        sequences=min(
            group.pages / group.pages_per_sequence for group in groups if group.pages_per_sequence
        ),
        most_cache=free,
        most_tokens=most[0] * page_size if fits else 0,
        most_sequences=free / per_sequence if fits else 0.0,
    )


def kept_bytes(engine: Engine) -> int:
    """Bytes of one device that an engine keeps besides weights and cache."""
    arrays = engine.arrays
    return local_bytes((arrays.tables, arrays.hidden, arrays.sampler, arrays.masks))


def local_bytes(tree: Any) -> int:
    """Bytes of arrays on one device, unpadded."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def guessed_temporaries(engine: Engine, amounts: Amounts) -> int:
    """Bytes of one device that the largest step needs, where it was not compiled.

    The activations of one layer of the largest step, or the logits of the largest choice.
    """
    model, size = engine.model.config, engine.devices
    width = engine.weights.placement.compute_dtype.itemsize
    heads = (2 * model.num_heads + 2 * model.kv_heads) * model.head_width // size
    row = 4 * model.hidden_size + 3 * model.intermediate_size // size + heads
    step = engine.sizes.steps[-1] * row * width
    choice = _LIVE_LOGITS * 4 * engine.sizes.samples[-1] * model.vocab_size
    return max(step, choice)


def cache_holds(engine: Engine, context: int) -> int:
    """Sequences of `context` tokens that the engine's cache holds, `max_num_seqs` at most."""
    limits = engine.limits
    needs = pages_needed(engine.model.config, context, 1, limits.page_size)
    room = [
        (pages - 1) // need for pages, need in zip(limits.num_pages, needs, strict=True) if need
    ]
    return min([limits.max_num_seqs, *room])
