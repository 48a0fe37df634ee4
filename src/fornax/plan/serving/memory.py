"""What an engine takes of a chip's memory, and how much cache there could be."""

from fornax.llm.limits import divide_pages, pages_needed
from fornax.models import cache_layers, cache_windows
from fornax.plan.serving.engine import Engine
from fornax.plan.serving_facts import CacheGroup, MemoryReport


def memory_of(engine: Engine, temporaries: int, code: int) -> MemoryReport:
    """The memory of one chip.

    Args:
      engine: as shapes.
      temporaries: bytes of one device, of the program that needs most.
      code: bytes of one device, of all programs.
    """
    each = engine.topology.chip.devices  # engines fill a chip: its devices hold the same
    usable = int(engine.topology.chip.usable_bytes)
    account = engine.account
    weights = (account.weights + account.adapters + account.draft_weights) * each
    cache = (account.cache + account.draft_cache) * each
    sampler, states = account.sampler * each, account.states * each
    temporaries, code = temporaries * each, code * each
    free = max(0, usable - weights - sampler - states - temporaries - code)
    model = engine.model.config
    needs, sizes = engine.limits.pages_per_sequence(model), engine.page_bytes
    draft = engine.draft_page_bytes
    all_needs, all_sizes = (*needs, engine.limits.table_width), (*sizes, draft)
    per_sequence = sum(need * size for need, size in zip(all_needs, all_sizes, strict=True)) * each
    most = divide_pages(free // each, all_needs, all_sizes, 1 << 40)
    fits = free >= per_sequence
    page_size, rows = engine.limits.page_size, float(engine.limits.max_num_seqs)
    groups = tuple(
        CacheGroup(
            window=window,
            layers=layers,
            bytes_per_token=size * each // page_size,
            pages_per_sequence=need,
            pages=pages - 1,
        )
        for window, layers, size, need, pages in zip(
            cache_windows(model),
            cache_layers(model),
            sizes,
            needs,
            engine.limits.num_pages,
            strict=True,
        )
    )
    return MemoryReport(
        usable=usable,
        weights=weights,
        cache=cache,
        sampler=sampler,
        states=states,
        temporaries=temporaries,
        code=code,
        bytes_per_token=sum(group.bytes_per_token for group in groups),
        bytes_per_sequence=per_sequence,
        groups=groups,
        cache_tokens=engine.limits.cache_tokens if groups else 0,
        sequences=min((group.pages / group.pages_per_sequence for group in groups), default=rows),
        most_cache=free,
        most_tokens=most[0] * page_size if fits and groups else 0,
        most_sequences=(free / per_sequence if per_sequence else rows) if fits else 0.0,
    )


def cache_holds(engine: Engine, context: int) -> int:
    """Sequences of `context` tokens that the engine's cache holds, `max_num_seqs` at most."""
    limits = engine.limits
    needs = pages_needed(engine.model.config, context, 1, limits.page_size)
    room = [
        (pages - 1) // need for pages, need in zip(limits.num_pages, needs, strict=True) if need
    ]
    return min([limits.max_num_seqs, *room])
