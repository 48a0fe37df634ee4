"""Reads adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Legend: R rank, K inputs (flattened), N outputs (flattened).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fornax.config.errors import CheckpointError, EngineError
from fornax.models.layout import TensorLayout
from fornax.models.safetensors_file import StoredTensor, open_file

__all__ = ["Adapter", "Pair", "read_adapter"]

_ANY = "set it aside and train plain LoRA"
_REFUSED = {
    "use_dora": _ANY,
    "modules_to_save": "only low-rank matrices are loaded; train without whole modules",
    "lora_bias": "train without biases",
    "fan_in_fan_out": "no supported model stores its weights transposed",
    "layer_replication": "merge the adapter into a model of its own",
    "trainable_token_indices": "embeddings cannot be adapted",
    "target_parameters": "name modules in target_modules",
    "use_qalora": _ANY,
    "alora_invocation_tokens": _ANY,
    "arrow_config": _ANY,
    "use_bdlora": _ANY,
    "kasa_config": _ANY,
    "monteclora_config": _ANY,
}
"""Keys of adapter_config.json that change what an adapter computes, and what to do instead."""

_OWN_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` that leave a base model other than the published one."""

_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])\.weight")


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
    folder = Path(path)
    config = _read_config(folder)
    matrices = _matrices(folder)
    known = {tensor.name.removesuffix(".weight"): tensor for tensor in layout}
    pairs: dict[tuple[str, int], Pair] = {}
    largest = 0
    for module, parts in sorted(matrices.items()):
        down, up = _checked(folder, module, parts, known)
        largest = max(largest, rank := down.shape[0])
        if rank > max_rank:
            raise EngineError(
                f"{folder}: {module} has rank {rank}; the engine's max_lora_rank is {max_rank}, "
                "raise it"
            )
        scale = _scale(config, module, rank)
        for block in known[module].blocks:
            rows = np.asarray(up[block.start : block.stop], np.float32)
            key = (block.slot.path, block.slot.layer or 0)
            pairs[key] = Pair(np.asarray(down, np.float32).T, scale * rows.T)
    return Adapter(name, str(path), largest, pairs)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "adapter_config.json"
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}); give a folder that PEFT saved"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise EngineError(f"{file}: only adapters with peft_type LORA are supported")
    for key, remedy in _REFUSED.items():
        if config.get(key):
            raise EngineError(f"{file}: {key}={config[key]!r} is not supported; {remedy}")
    if config.get("bias", "none") != "none":
        raise EngineError(f"{file}: bias={config['bias']!r} is not supported; use bias='none'")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_OWN_BASE):
        raise EngineError(
            f"{file}: init_lora_weights={start!r} changes the base model; convert the adapter to "
            "plain LoRA when saving it"
        )
    return config


def _matrices(folder: Path) -> dict[str, dict[str, StoredTensor]]:
    """Parts A and B by module."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; save the adapter with safe_serialization")
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in open_file(file).items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise EngineError(
                f"{file}: tensor {name} is none of a linear module's lora_A or lora_B"
            )
        found.setdefault(match["module"], {})[match["part"]] = tensor
    return found


def _checked(
    folder: Path,
    module: str,
    parts: Mapping[str, StoredTensor],
    known: Mapping[str, TensorLayout],
) -> tuple[np.ndarray, np.ndarray]:
    layout = known.get(module)
    if layout is None or layout.blocks[0].slot.layer is None:
        raise EngineError(
            f"{folder}: {module} is no projection of this model's layers; only those are adapted"
        )
    if set(parts) != {"A", "B"}:
        raise EngineError(f"{folder}: {module} has lora_{''.join(parts)} only; both are needed")
    down, up = parts["A"], parts["B"]
    outputs, inputs = layout.shape
    rank = down.shape[0]
    if down.shape != (rank, inputs) or up.shape != (outputs, rank):
        raise EngineError(
            f"{folder}: {module} has lora_A {down.shape} and lora_B {up.shape}; the model's weight "
            f"is {layout.shape}"
        )
    return down.view(), up.view()


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = _matching(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _matching(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that is the module's name, or the end of it."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default
