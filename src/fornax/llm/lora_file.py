"""Adapters in PEFT's format as the engine's slots take them.

Legend: R rank, K inputs (flattened), N outputs (flattened).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fornax.adapters.peft_file import read_peft
from fornax.config.errors import ConfigError, EngineError
from fornax.models.layout import TensorLayout

__all__ = ["Adapter", "Pair", "read_adapter"]

_REFUSED = {"use_dora": "merge it into the model and serve that, or train plain LoRA"}
"""What slots cannot hold: a DoRA's magnitudes belong to the base's weights."""


@dataclass(frozen=True)
class Pair:
    """An adapter's matrices of one projection in one layer, in our layout."""

    down_KR: np.ndarray
    up_RN: np.ndarray
    """Scaled."""


@dataclass(frozen=True)
class Adapter:
    """An adapter in the host's memory."""

    name: str
    path: str
    rank: int
    """The largest of its matrices."""
    pairs: Mapping[tuple[str, int], Pair]
    """By parameter, such as layers/attention/q/kernel, and layer."""


def read_adapter(
    name: str, path: str | Path, layout: list[TensorLayout], *, max_rank: int
) -> Adapter:
    """Read and check an adapter.

    Args:
        name: what requests will call it.
        path: its folder.
        layout: of the model's tensors.
        max_rank: that a slot has room for.

    Raises:
        EngineError: a kind of adapter that is not supported, another model's, or too large a rank.
        CheckpointError: files that are missing or damaged.
    """
    try:
        stored = read_peft(path, layout, refused=_REFUSED)
    except ConfigError as error:
        raise EngineError(str(error)) from error
    known = {tensor.name.removesuffix(".weight"): tensor for tensor in layout}
    pairs: dict[tuple[str, int], Pair] = {}
    largest = 0
    for module, found in stored.modules.items():
        largest = max(largest, rank := len(found.down_RK))
        if rank > max_rank:
            raise EngineError(
                f"{stored.folder}: {module} has rank {rank}; the engine's max_lora_rank is "
                f"{max_rank}, raise it"
            )
        for block in known[module].blocks:
            rows = found.up_NR[block.start : block.stop]
            key = (block.slot.path, block.slot.layer or 0)
            pairs[key] = Pair(found.down_RK.T, found.scale * rows.T)
    return Adapter(name, str(path), largest, pairs)
