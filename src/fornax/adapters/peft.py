"""A decoder's adapters to and from PEFT's files.

PEFT adapts a stored tensor; where it holds several of our projections one behind the other (Phi's
qkv_proj), their adapters become one of the sum of their ranks, and one of PEFT's is shared by them.
Each expert's adapter is written under the name of its own tensor; PEFT's of a tensor of all experts
(`target_parameters`) are read.

Legend: L layers, R rank, K inputs (flattened), N outputs (flattened).
"""

import collections
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from fornax.adapters.attach import adapted_modules, attach
from fornax.adapters.config import LoRA
from fornax.adapters.module import Spec, adapter_factors
from fornax.adapters.peft_file import (
    PEFT_CONFIG,
    PEFT_PREFIX,
    PEFT_WEIGHTS,
    PeftAdapter,
    PeftModule,
    read_peft,
)
from fornax.config.errors import CheckpointError, ConfigError
from fornax.config.files import replacing_folder
from fornax.models import Decoder, abstract_decoder
from fornax.models.families.convert import family_for
from fornax.models.layout import Slot, TensorLayout, plan_layout

__all__ = ["load_peft", "save_peft"]


@dataclass(frozen=True)
class _Layer:
    """Where a stored tensor's rows belong: a projection of one layer, or of one of its experts."""

    start: int
    stop: int
    path: str
    """Of the module, such as layers/attention/q."""
    slot: Slot


def load_peft(path: str | Path, model: Decoder) -> LoRA:
    """Put an adapter that PEFT saved on a decoder, in place.

    Stacked layers share a rank and a scale: smaller ranks are filled up with zeros, and what a
    layer's scale differs is multiplied into its B. Layers that the adapter leaves out get an
    adapter that does nothing; so do experts. Dropout is left out where experts have adapters.

    Args:
        path: the folder that PEFT saved.
        model: without adapters.

    Returns:
        The config that says what was attached.

    Raises:
        ConfigError: a kind of adapter that is not supported, or another model's.
        CheckpointError: files that are missing or damaged.
    """
    layout = _layout(model)
    stored = read_peft(path, layout)
    known = {tensor.name.removesuffix(".weight"): tensor for tensor in layout}
    found: dict[str, dict[tuple[int, ...], PeftModule]] = {}
    for name, module in stored.modules.items():
        for part in _layers(known[name]):
            found.setdefault(part.path, {})[part.slot.index] = _rows(module, part)
    config = _config_of(stored, found)
    attach(model, config, rngs=nnx.Rngs(0))
    for at, module in adapted_modules(model):
        _fill(module, found[at])
    return config


def save_peft(
    model: Decoder, path: str | Path, *, base: str | Path = "", overwrite: bool = False
) -> None:
    """Write a decoder's adapters as PEFT does: adapter_config.json, adapter_model.safetensors.

    Args:
        model: with adapters.
        path: the folder to make.
        base: the base model's folder or name, which PEFT's AutoPeftModel loads.
        overwrite: replace an adapter that is there already.

    Raises:
        ConfigError: there are no adapters, or no Hugging Face family can express the model.
        CheckpointError: the folder exists, or cannot be written.
    """
    modules = dict(adapted_modules(model))
    if not modules:
        raise ConfigError("the model has no adapters; attach some, or save the whole model")
    target = Path(path)
    if (
        target.exists()
        and any(target.iterdir())
        and not (overwrite and (target / PEFT_CONFIG).is_file())
    ):
        raise CheckpointError(
            f"{target} exists"
            + ("" if not overwrite else " and is not an adapter's folder")
            + "; give another path"
            + ("" if overwrite else ", or overwrite")
        )
    layout, written = _layout(model), {}
    named = {part.path for tensor in layout for part in _layers(tensor)}
    if missing := sorted(set(modules) - named):
        raise ConfigError(
            f"the family's files hold {', '.join(missing)} in tensors that PEFT's files cannot "
            "adapt; adapt other modules (lora.targets), or merge the adapters and save the model"
        )
    arrays = {path: _host_arrays(module) for path, module in modules.items()}
    for tensor in layout:
        module = _written(model, modules, arrays, tensor)
        if module is not None:
            written[tensor.name.removesuffix(".weight")] = module
    rslora = any(module.lora.rslora for module in modules.values())
    config = _peft_config(written, [t.name for t in layout], rslora=rslora) | {
        "base_model_name_or_path": str(base) or None,
        "lora_dropout": max(_dropout(module) for module in modules.values()),
        "use_dora": any(module.lora.dora for module in modules.values()),
    }
    try:
        with replacing_folder(target) as folder:
            text = json.dumps(config, indent=2, sort_keys=True)
            (folder / PEFT_CONFIG).write_text(text + "\n", encoding="utf-8")
            save_file(_tensors(written), folder / PEFT_WEIGHTS, metadata={"format": "pt"})
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error


def _layout(model: Decoder) -> list[TensorLayout]:
    plain = abstract_decoder(model.config)
    return plan_layout(plain, family_for(model.config).names)


def _layers(tensor: TensorLayout) -> Iterable[_Layer]:
    for block in tensor.blocks:
        if block.slot.layer is not None and block.slot.num_inputs and block.groups == 1:
            path = block.slot.path.removesuffix("/kernel")
            yield _Layer(block.start, block.stop, path, block.slot)


def _rows(module: PeftModule, part: _Layer) -> PeftModule:
    rows = slice(part.start, part.stop)
    magnitude = None if module.magnitude_N is None else module.magnitude_N[rows]
    return PeftModule(
        down_RK=module.down_RK,
        up_NR=module.up_NR[rows],
        magnitude_N=magnitude,
        scale=module.scale,
    )


_Found = Mapping[str, Mapping[tuple[int, ...], PeftModule]]
"""Adapters by path and place in the stack of kernels."""


def _config_of(stored: PeftAdapter, found: _Found) -> LoRA:
    rslora = bool(stored.config.get("use_rslora"))
    of_experts = any(len(index) > 1 for layers in found.values() for index in layers)
    ranks, alphas = {}, {}
    for path, layers in found.items():
        ranks[path] = max(len(module.down_RK) for module in layers.values())
        scale = next(iter(layers.values())).scale
        alphas[path] = _plain(scale * _divisor(ranks[path], rslora=rslora))
    rank, alpha = _commonest(ranks.values()), _commonest(alphas.values())
    return LoRA(
        rank=rank,
        alpha=alpha,
        targets=tuple(found),
        dropout=0.0 if of_experts else float(stored.config.get("lora_dropout") or 0.0),
        dora=stored.dora,
        rslora=rslora,
        rank_pattern={path: r for path, r in ranks.items() if r != rank},
        alpha_pattern={path: a for path, a in alphas.items() if a != alpha},
    )


def _commonest(values: Iterable[object]) -> Any:
    return collections.Counter(values).most_common(1)[0][0]


def _fill(module: Any, layers: Mapping[tuple[int, ...], PeftModule]) -> None:
    spec: Spec = module.lora
    a, b = (np.array(v.get_value()) for v in (module.lora_a, module.lora_b))
    magnitude = np.array(module.lora_magnitude.get_value()) if spec.dora else None
    for index, found in layers.items():
        rank = len(found.down_RK)
        whole = np.zeros((found.down_RK.shape[1], spec.rank), np.float32)
        whole[:, :rank] = found.down_RK.T
        a[index] = whole.reshape(a[index].shape)
        whole = np.zeros((spec.rank, len(found.up_NR)), np.float32)
        whole[:rank] = found.up_NR.T * np.float32(found.scale / spec.scale)
        b[index] = whole.reshape(b[index].shape)
        if magnitude is not None and found.magnitude_N is not None:
            magnitude[index] = found.magnitude_N.reshape(magnitude[index].shape)
    _set(module.lora_a, a)
    _set(module.lora_b, b)
    if magnitude is not None:
        _set(module.lora_magnitude, magnitude)


def _set(variable: Any, value: np.ndarray) -> None:
    variable.set_value(jax.device_put(value, variable.get_value().sharding))


_HostArrays = Mapping[str, np.ndarray]
"""An adapter's arrays by name, float32: copied once, for a model has thousands of experts."""


def _host_arrays(module: Any) -> _HostArrays:
    found = dict(zip(("lora_a", "lora_b"), adapter_factors(module), strict=True))
    if module.lora.dora:
        found["lora_magnitude"] = module.lora_magnitude.get_value()
    return {name: np.asarray(value, np.float32) for name, value in found.items()}


def _written(
    model: Decoder,
    modules: Mapping[str, Any],
    arrays: Mapping[str, _HostArrays],
    tensor: TensorLayout,
) -> PeftModule | None:
    """The adapter of a stored tensor; None where none of its projections has one."""
    parts = list(_layers(tensor))
    own = [modules[part.path] for part in parts if part.path in modules]
    if not own:
        return None
    scale = own[0].lora.scale
    rank = sum(module.lora.rank for module in own)
    outputs, inputs = tensor.shape
    down_RK, up_NR = np.zeros((rank, inputs), np.float32), np.zeros((outputs, rank), np.float32)
    magnitude_N = np.zeros(outputs, np.float32) if own[0].lora.dora else None
    at = 0
    for part in parts:
        rows = slice(part.start, part.stop)
        module = modules.get(part.path)
        if module is None:
            if magnitude_N is not None:  # its own norm, so that nothing is turned there
                kernel = np.asarray(
                    _module_at(model, part.path).kernel.get_value()[part.slot.index]
                )
                stored = part.slot.to_stored(kernel.astype(np.float32))
                magnitude_N[rows] = np.linalg.norm(stored, axis=1)
            continue
        spec: Spec = module.lora
        columns = slice(at, at := at + spec.rank)
        a, b = (arrays[part.path][name][part.slot.index] for name in ("lora_a", "lora_b"))
        down_RK[columns] = a.reshape(inputs, spec.rank).T
        ratio = np.float32(spec.scale / scale)
        up_NR[rows, columns] = b.reshape(spec.rank, -1).T * ratio
        if magnitude_N is not None:
            magnitude_N[rows] = arrays[part.path]["lora_magnitude"][part.slot.index].ravel()
    return PeftModule(down_RK=down_RK, up_NR=up_NR, magnitude_N=magnitude_N, scale=scale)


def _module_at(model: object, path: str) -> Any:
    for part in path.split("/"):
        model = getattr(model, part)
    return model


def _peft_config(
    written: Mapping[str, PeftModule], names: list[str], *, rslora: bool
) -> dict[str, Any]:
    """What adapter_config.json says of ranks and scales."""
    stored = {name.removesuffix(".weight") for name in names}
    sizes: dict[str, tuple[int, float]] = {}
    for name, module in written.items():
        rank = len(module.down_RK)
        sizes[name] = (rank, _plain(module.scale * _divisor(rank, rslora=rslora)))
    ends: dict[str, str] = {}
    for size in set(sizes.values()):
        own = {name for name, other in sizes.items() if other == size}
        taken = {name[at:] for name in stored - own for at in _starts(name)}
        ends |= {name: _end(name, taken) for name in own}
    ranks = {ends[name]: rank for name, (rank, _) in sizes.items()}
    alphas = {ends[name]: alpha for name, (_, alpha) in sizes.items()}
    rank, alpha = _commonest(ranks.values()), _commonest(alphas.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(set(ends.values())),
        "rank_pattern": {end: r for end, r in ranks.items() if r != rank},
        "alpha_pattern": {end: a for end, a in alphas.items() if a != alpha},
        "use_rslora": rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _dropout(module: Any) -> float:
    return module.lora_dropout.rate if module.lora.dropout else 0.0


def _divisor(rank: int, *, rslora: bool) -> float:
    """What an alpha is divided by to give the scale."""
    return math.sqrt(rank) if rslora else rank


def _plain(number: float) -> float | int:
    """The number without what rounding a root has left in its last digits."""
    number = round(number, 9)
    return int(number) if number.is_integer() else number


def _end(name: str, taken: Collection[str]) -> str:
    """The shortest end of a layer's name that no layer of another size, or without one, has."""
    ends = (name[at:] for at in reversed(_starts(name)))
    return next((end for end in ends if end not in taken), name)


def _starts(name: str) -> list[int]:
    """Where the parts of a name begin."""
    return [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]


def _tensors(written: Mapping[str, PeftModule]) -> dict[str, np.ndarray]:
    tensors = {}
    for name, module in written.items():
        start = f"{PEFT_PREFIX}{name}"
        tensors[f"{start}.lora_A.weight"] = np.ascontiguousarray(module.down_RK)
        tensors[f"{start}.lora_B.weight"] = np.ascontiguousarray(module.up_NR)
        if module.magnitude_N is not None:
            tensors[f"{start}.lora_magnitude_vector"] = module.magnitude_N
    return tensors
