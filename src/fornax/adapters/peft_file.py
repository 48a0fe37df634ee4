"""Reading adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

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

from fornax.checkpoint.safetensors_file import StoredTensor, open_file
from fornax.config.errors import CheckpointError, ConfigError
from fornax.models.layout import TensorLayout

__all__ = ["PEFT_CONFIG", "PEFT_PREFIX", "PEFT_WEIGHTS", "PeftAdapter", "PeftModule", "read_peft"]

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."

_ANY = "set it aside and train plain LoRA"
_REFUSED = {
    "modules_to_save": "only low-rank matrices are loaded; train without whole modules",
    "lora_bias": "train without biases",
    "fan_in_fan_out": "no supported model stores its weights transposed",
    "layer_replication": "merge the adapter into a model of its own",
    "trainable_token_indices": "embeddings cannot be adapted",
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

_FUSED = re.compile(r"(?P<layer>(.+\.)?layers\.\d+)\.(.+\.)?experts(\.base_layer)?")
"""Modules that hold all experts' weights in two tensors, which PEFT adapts by `target_parameters`;
of two adapters on one module the inner one has `base_layer` in its name."""

_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB]\.weight|magnitude_vector(\.weight)?)")


@dataclass(frozen=True, kw_only=True)
class PeftModule:
    """An adapter's arrays of one stored linear layer."""

    down_RK: np.ndarray
    """A, float32."""
    up_NR: np.ndarray
    """B, float32, not scaled."""
    magnitude_N: np.ndarray | None
    """DoRA's magnitudes, float32."""
    scale: float
    """What B A is multiplied by."""


@dataclass(frozen=True, kw_only=True)
class PeftAdapter:
    """An adapter as it is stored."""

    folder: Path
    config: Mapping[str, Any]
    """adapter_config.json."""
    modules: Mapping[str, PeftModule]
    """By name of the stored layer, such as model.layers.0.self_attn.q_proj."""

    @property
    def dora(self) -> bool:
        """Whether it is a DoRA adapter."""
        return bool(self.config.get("use_dora"))


def read_peft(
    path: str | Path, layout: list[TensorLayout], *, refused: Mapping[str, str] | None = None
) -> PeftAdapter:
    """Read an adapter and check that it fits a model.

    Args:
        path: the folder that PEFT saved.
        layout: of the model's tensors.
        refused: keys of the config that the caller does not support, and what to do instead.

    Raises:
        ConfigError: a kind of adapter that is not supported, or another model's.
        CheckpointError: files that are missing or damaged.
    """
    folder = Path(path)
    config = _read_config(folder, {**_REFUSED, **(refused or {})})
    known = {tensor.name.removesuffix(".weight"): tensor for tensor in layout}
    modules: dict[str, PeftModule] = {}
    for name, parts in sorted(_parts(folder).items()):
        fused = _FUSED.fullmatch(name)
        experts = {} if fused is None else _experts(layout, fused["layer"])
        if experts:
            modules |= _of_experts(folder, config, name, parts, experts)
        else:
            modules[name] = _module(folder, config, name, parts, known)
    if not modules:
        raise CheckpointError(f"{folder / PEFT_WEIGHTS} holds no adapter; save it again")
    return PeftAdapter(folder=folder, config=config, modules=modules)


def _read_config(folder: Path, refused: Mapping[str, str]) -> dict[str, object]:
    file = folder / PEFT_CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}); give a folder that PEFT saved"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ConfigError(f"{file}: only adapters with peft_type LORA are supported")
    for key, remedy in refused.items():
        if config.get(key):
            raise ConfigError(f"{file}: {key}={config[key]!r} is not supported; {remedy}")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{file}: bias={config['bias']!r} is not supported; use bias='none'")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_OWN_BASE):
        raise ConfigError(
            f"{file}: init_lora_weights={start!r} changes the base model; convert the adapter to "
            "plain LoRA when saving it"
        )
    return config


def _parts(folder: Path) -> dict[str, dict[str, StoredTensor]]:
    """Parts A, B and m by module."""
    file = folder / PEFT_WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; save the adapter with safe_serialization")
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in open_file(file).items():
        match = _NAME.fullmatch(name.removeprefix(PEFT_PREFIX))
        if match is None:
            raise ConfigError(
                f"{file}: tensor {name} is none of a linear module's lora_A or lora_B"
            )
        found.setdefault(match["module"], {})[match["part"][0]] = tensor
    return found


def _module(
    folder: Path,
    config: Mapping[str, object],
    name: str,
    parts: Mapping[str, StoredTensor],
    known: Mapping[str, TensorLayout],
) -> PeftModule:
    layout = known.get(name)
    slot = None if layout is None else layout.blocks[0].slot
    if layout is None or slot is None or slot.layer is None or not slot.num_inputs:
        raise ConfigError(
            f"{folder}: {name} is not a projection of this model's layers; only those are adapted"
        )
    if layout.blocks[0].groups > 1:
        raise ConfigError(
            f"{folder}: {name} holds several of our projections head by head, and an adapter of it "
            "is not supported; train one without it (target_modules)"
        )
    wanted = {"A", "B", "m"} if config.get("use_dora") else {"A", "B"}
    if set(parts) != wanted:
        raise ConfigError(
            f"{folder}: {name} has lora_{''.join(sorted(parts))} only; "
            f"{' and '.join(sorted(wanted))} are needed"
        )
    down, up = parts["A"], parts["B"]
    outputs, inputs = layout.shape
    rank = down.shape[0]
    if down.shape != (rank, inputs) or up.shape != (outputs, rank):
        raise ConfigError(
            f"{folder}: {name} has lora_A {down.shape} and lora_B {up.shape}; the model's weight "
            f"is {layout.shape}"
        )
    magnitude = parts.get("m")
    if magnitude is not None and math.prod(magnitude.shape) != outputs:
        raise ConfigError(
            f"{folder}: {name} has {math.prod(magnitude.shape)} magnitudes for {outputs} outputs"
        )
    return PeftModule(
        down_RK=np.asarray(down.view(), np.float32),
        up_NR=np.asarray(up.view(), np.float32),
        magnitude_N=None if magnitude is None else np.asarray(magnitude.view(), np.float32).ravel(),
        scale=_scale(config, name, rank),
    )


def _experts(layout: list[TensorLayout], layer: str) -> dict[str, dict[int, TensorLayout]]:
    """A layer's tensors of single experts, by projection: gate, up and down."""
    found: dict[str, dict[int, TensorLayout]] = {}
    for tensor in layout:
        slot = tensor.blocks[0].slot
        if slot.expert is not None and slot.num_inputs and tensor.name.startswith(f"{layer}."):
            found.setdefault(slot.path.split("/")[-2], {})[slot.expert] = tensor
    return found


def _of_experts(
    folder: Path,
    config: Mapping[str, object],
    name: str,
    parts: Mapping[str, StoredTensor],
    experts: Mapping[str, Mapping[int, TensorLayout]],
) -> dict[str, PeftModule]:
    """The adapters of single experts in one of all of them: A [E R, K], B [N, R E].

    It adapts gate and up, whose outputs lie one behind the other, or down; the shapes say which.
    """
    if set(parts) != {"A", "B"}:
        raise ConfigError(f"{folder}: {name} has lora_{''.join(sorted(parts))}; A and B are needed")
    down, up = parts["A"], parts["B"]
    for leaf, projections in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        tensors = [experts[projection] for projection in projections]
        count = len(tensors[0])
        outputs, inputs = (len(tensors) * tensors[0][0].shape[0], tensors[0][0].shape[1])
        rank = down.shape[0] // count
        if down.shape != (count * rank, inputs) or up.shape != (outputs, rank * count):
            continue
        down_ERK = np.asarray(down.view(), np.float32).reshape(count, rank, inputs)
        up_NRE = np.asarray(up.view(), np.float32).reshape(outputs, rank, count)
        scale = _scale(config, f"{name.removesuffix('.base_layer')}.{leaf}", rank)
        return {
            tensor.name.removesuffix(".weight"): PeftModule(
                down_RK=down_ERK[expert],
                up_NR=np.split(up_NRE[..., expert], len(tensors))[number],
                magnitude_N=None,
                scale=scale,
            )
            for number, of in enumerate(tensors)
            for expert, tensor in of.items()
        }
    raise ConfigError(
        f"{folder}: {name} has lora_A {down.shape} and lora_B {up.shape}, which fit neither "
        "gate_up_proj nor down_proj of this model's experts"
    )


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = _matching(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _matching(patterns: Mapping[str, object] | None, module: str, default: object) -> Any:
    """The value of the first pattern that is the module's name, or the end of it."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default
