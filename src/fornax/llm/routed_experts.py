"""Which experts the tokens of sequences took, kept on the host beside the cache.

A token is routed once, in the step that computes it; a sequence that finds its beginning in the
prefix cache never computes it. So experts are kept by page as keys and values are, and of each
running sequence too, for its pages may be given to others before its results are read.

Legend: T tokens of a step, L layers with experts, k experts per token.
"""

from collections.abc import Sequence as Items
from typing import NamedTuple

import jax
import numpy as np

from fornax.config.errors import ConfigError
from fornax.llm.limits import Limits
from fornax.llm.scheduler_output import SchedulerOutput
from fornax.llm.sequence import Sequence, Status
from fornax.models import DecoderConfig, cache_windows, routed_experts_dtype

__all__ = ["Places", "RoutedExperts", "check_routes", "describe_routed_experts"]


class Places(NamedTuple):
    """Where an entry's tokens, and perhaps those before them, lie."""

    first: int
    """The first of the tokens: the entry's own, or 0 where those before are not known yet."""
    slots: np.ndarray
    """int64: the slot of each token from `first` to the entry's last."""


def check_routes(model: DecoderConfig) -> None:
    """Refuse models whose experts cannot be returned.

    Raises:
      ConfigError: no layer has experts, or none keeps the keys of all tokens.
    """
    if model.experts is None:
        raise ConfigError(
            "enable_return_routed_experts=True, and this model has no experts; leave it out"
        )
    if None not in cache_windows(model):
        raise ConfigError(
            "enable_return_routed_experts=True needs a layer with full attention: what slides "
            "forgets the pages that experts are kept by. Leave it out"
        )


def describe_routed_experts(model: DecoderConfig) -> jax.ShapeDtypeStruct:
    """What is kept of a token: [L, k]."""
    experts = model.experts
    assert experts is not None, "only models with experts return any"
    shape = (model.num_expert_layers, experts.experts_per_token)
    return jax.ShapeDtypeStruct(shape, routed_experts_dtype(experts))


class RoutedExperts:
    """The experts that tokens took; a sequence that is recomputed has the newest."""

    def __init__(self, model: DecoderConfig, limits: Limits) -> None:
        """Know nothing yet.

        Raises:
          ConfigError: see `check_routes`.
        """
        check_routes(model)
        self._group = cache_windows(model).index(None)
        self._size = limits.page_size
        experts = describe_routed_experts(model)
        self._shape, self._dtype = experts.shape, experts.dtype
        pages = limits.num_pages[self._group]
        self._pages = np.zeros((pages, self._size, *self._shape), self._dtype)
        self._rows: dict[int, np.ndarray] = {}
        """By sequence: [most tokens, L, k]."""
        self._started: set[int] = set()
        """Sequences that got a row, and whose first step since is still to be planned."""

    def places(self, plan: SchedulerOutput) -> list[Places]:
        """Where the tokens of a plan lie, for `take`; before the next is made."""
        self._started |= {sequence.id for sequence in plan.started}
        found = []
        for entry in plan.entries:
            sequence = entry.sequence
            first = 0 if sequence.id in self._started else entry.start
            self._started.discard(sequence.id)
            tokens, low = np.arange(first, entry.stop), first // self._size
            pages = sequence.pages[self._group][low : (entry.stop - 1) // self._size + 1]
            page = np.array(pages)[tokens // self._size - low]
            found.append(Places(first, page * self._size + tokens % self._size))
        return found

    def take(self, plan: SchedulerOutput, places: Items[Places], experts: jax.Array) -> None:
        """Keep what a call returned, [T, L, k], or of several steps [K, T, L, k]; waits for the
        device. Calls in the order of their plans."""
        rows = np.asarray(experts)
        if rows.ndim == 4:
            rows = rows[: plan.steps].swapaxes(0, 1).reshape(-1, *self._shape)
        for copy in plan.copies:
            if copy.group == self._group:
                self._pages[copy.target] = self._pages[copy.source]
        slots = self._pages.reshape(-1, *self._shape)
        at = 0
        for entry, (first, slots_S) in zip(plan.entries, places, strict=True):
            count = entry.stop - entry.start
            slots[slots_S[entry.start - first :]] = rows[at : at + count]
            at += count
            own = self._of(entry.sequence)
            if own is not None:
                own[first : entry.stop] = slots[slots_S]
        for sample in plan.samples:
            parent = plan.entries[sample.entry].sequence
            own, known = self._of(sample.sequence), self._of(parent)
            if own is not None and known is not None and sample.sequence is not parent:
                own[: parent.num_prompt] = known[: parent.num_prompt]

    def of(self, sequence: Sequence) -> np.ndarray:
        """[tokens - 1, L, k]: of all its tokens but the last, which was sampled and not read."""
        return self._rows[sequence.id][: len(sequence.tokens) - 1].copy()

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a sequence; what its pages hold stays."""
        self._rows.pop(sequence.id, None)
        self._started.discard(sequence.id)

    def _of(self, sequence: Sequence) -> np.ndarray | None:
        """The sequence's own rows, to be written; None where nobody will ask for them."""
        if sequence.pooling or sequence.status is Status.FINISHED:
            return None
        if sequence.id not in self._rows:
            self._rows[sequence.id] = np.empty((sequence.max_len, *self._shape), self._dtype)
        return self._rows[sequence.id]
