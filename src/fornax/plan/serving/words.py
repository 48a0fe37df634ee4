"""The sentences that every form of a serving plan has."""

from collections.abc import Mapping

from fornax.plan.report.words import count, nbytes
from fornax.plan.serving.data import MemoryReport, ServePlan

__all__ = ["BOUNDS", "LIMITS", "facts_of", "parts_of", "verdicts"]

BOUNDS: Mapping[str, str] = {
    "weights": "reading weights",
    "cache": "reading the cache",
    "compute": "arithmetic",
    "exchange": "links between chips",
    "sampling": "choosing tokens",
}
"""What a step waits for most."""

LIMITS: Mapping[str, str] = {
    "latency": "latency",
    "cache": "the cache",
    "max_num_seqs": "max_num_seqs",
}
"""Why a batch is no larger."""


def parts_of(memory: MemoryReport) -> list[tuple[str, int]]:
    """What memory goes to."""
    return [
        ("weights", memory.weights),
        ("cache", memory.cache),
        ("sampler and hidden states", memory.sampler),
        ("temporaries", memory.temporaries),
        ("programs", memory.code),
    ]


def facts_of(plan: ServePlan) -> list[str]:
    """What would run."""
    engine = plan.engine
    each = (
        "1 device" if engine.tensor_parallel_size == 1 else f"{engine.tensor_parallel_size} devices"
    )
    side = f", {engine.engines} engines side by side" if engine.engines > 1 else ""
    return [
        f"{count(plan.parameters)} parameters in {engine.dtype}, computed in "
        f"{engine.compute_dtype}, cache in {engine.cache_dtype}; each layer divided over {each}"
        f"{side}",
        f"at most {engine.max_num_seqs:,} sequences of {engine.max_model_len:,} tokens, steps of "
        f"at most {engine.max_num_batched_tokens:,} tokens; kernel {engine.attention}",
        f"as: {engine.command}",
    ]


def verdicts(plan: ServePlan) -> list[str]:
    """Fit and room, one sentence each."""
    memory = plan.memory
    share = f"{nbytes(memory.total)} of {nbytes(memory.usable)} usable"
    fit = (
        f"fits: {share}"
        if memory.fits
        else (f"DOES NOT FIT: {share}, {nbytes(memory.total - memory.usable)} too much")
    )
    return [
        fit,
        f"cache: {nbytes(memory.bytes_per_token)} a token and chip, "
        f"{nbytes(memory.bytes_per_sequence)} a sequence of {plan.engine.max_model_len:,} tokens; "
        f"the engine's holds {memory.cache_tokens:,} tokens, {memory.sequences:.1f} such sequences",
        f"the largest cache that would fit: {nbytes(memory.most_cache)}, "
        f"{memory.most_tokens:,} tokens, {memory.most_sequences:.1f} such sequences",
    ]
