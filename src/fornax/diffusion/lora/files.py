"""Adapters of a denoiser in the files of diffusers and PEFT, read, written and merged.

A file names a module of theirs, which may hold several of ours one after another (a gated MLP's
two halves): those become one adapter of the sum of their ranks, and one of a file is cut for them.
B is written times alpha / rank, so that a reader without support for alpha is right too.

Legend: R rank, K inputs (flattened), N outputs (flattened), L layers of a stack.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from fornax.adapters.attach import adapted_modules
from fornax.adapters.module import Spec, adapter_factors
from fornax.checkpoint.safetensors_file import open_file
from fornax.config.errors import CheckpointError, ConfigError
from fornax.config.files import replacing_folder
from fornax.config.suggest import first_few, similar
from fornax.diffusion.models.components import COMPONENTS
from fornax.diffusion.models.keys import Slot, Tensor, plan
from fornax.diffusion.models.original import original_unet_keys
from fornax.diffusion.models.unet import UNetConfig
from fornax.models.kernel_layout import layout_of

__all__ = ["LORA_FILE", "Adapter", "merge_lora", "read_lora", "save_lora"]

LORA_FILE = "pytorch_lora_weights.safetensors"
"""What diffusers calls it."""
_PEFT_CONFIG, _PEFT_FILE = "adapter_config.json", "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_METADATA = "lora_adapter_metadata"
_PARTS = {
    "lora_A": "A",
    "lora_B": "B",
    "lora.down": "A",
    "lora.up": "B",
    "lora_down": "A",
    "lora_up": "B",
    "alpha": "alpha",
}
_NAME = re.compile(
    r"(.+)\.(?:(lora_A|lora_B|lora[._]down|lora[._]up)\.(?:default\.)?weight|(alpha))"
)
_KOHYA = re.compile(r"lora_(?:unet|transformer)_(.+)")
"""Names of kohya-ss/sd-scripts and trainers like it: "_" stands for "."."""
_ORIGINAL = ("input_blocks_", "middle_block_", "output_blocks_")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter of a denoiser in our layout."""

    name: str
    """Where it came from."""
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """A module's path to A transposed, float32 [*stack, *inputs, R], and B transposed and scaled,
    float32 [*stack, R, *outputs]."""


def save_lora(denoiser: Any, folder: str | Path, prefix: str) -> None:
    """Write a denoiser's adapters as diffusers reads them, and as PEFT does.

    Args:
      denoiser: with adapters that have no magnitudes (DoRA).
      folder: to make: `pytorch_lora_weights.safetensors` for `load_lora_weights`, and
        `adapter_config.json` with `adapter_model.safetensors` for PEFT. One that is there is
        replaced.
      prefix: the denoiser's name in a pipeline, `unet` or `transformer`.

    Raises:
      ConfigError: there are no adapters, or one of a module that is in no file.
      CheckpointError: the folder cannot be written.
    """
    modules = dict(adapted_modules(denoiser))
    if not modules:
        raise ConfigError("the denoiser has no adapters; attach some, or save the whole model")
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    written: set[str] = set()
    for tensor in _tensors(denoiser.config):
        pieces = [_piece(slot, modules.get(_owner(slot))) for slot in tensor.slots]
        if any(piece is not None for piece in pieces):
            found[tensor.name.removesuffix(".weight")] = _joined(tensor, pieces)
            written |= {_owner(slot) for slot in tensor.slots}
    if missing := sorted(set(modules) - written):
        raise ConfigError(f"{', '.join(missing)} is in no file of diffusers; leave it unadapted")
    ranks = {name: len(down) for name, (down, _) in found.items()}
    usual = max(set(ranks.values()), key=list(ranks.values()).count)
    pattern = {name: rank for name, rank in ranks.items() if rank != usual}
    config = {
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": sorted(found),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
    }
    arrays = {
        f"{name}.lora_{letter}.weight": part
        for name, pair in found.items()
        for letter, part in zip("AB", pair, strict=True)
    }
    said = json.dumps({f"{prefix}.{key}": value for key, value in config.items()}, sort_keys=True)
    try:
        with replacing_folder(Path(folder)) as work:
            save_file(
                {f"{prefix}.{name}": array for name, array in arrays.items()},
                work / LORA_FILE,
                metadata={"format": "pt", _METADATA: said},
            )
            save_file(
                {f"{_PEFT_PREFIX}{name}": array for name, array in arrays.items()},
                work / _PEFT_FILE,
                metadata={"format": "pt"},
            )
            peft = {"peft_type": "LORA", "inference_mode": True, **config}
            (work / _PEFT_CONFIG).write_text(json.dumps(peft, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder}: {error.strerror or error}; nothing was changed there"
        ) from error


def read_lora(path: str | Path, denoiser: Any, prefix: str) -> Adapter:
    """Read an adapter and check that it fits a denoiser.

    Args:
      path: a safetensors file as diffusers or kohya-ss/sd-scripts writes it, or a folder that
        holds one of diffusers, or that PEFT saved.
      denoiser: of what it is an adapter; abstract is enough.
      prefix: the denoiser's name in its pipeline.

    Raises:
      ConfigError: another model's, or a kind that is not supported.
      CheckpointError: no such file, or a damaged one.
    """
    file, peft = _file(Path(path))
    modules = _stored(file, prefix, denoiser.config)
    config = _config(file, peft, prefix)
    known = {tensor.name.removesuffix(".weight"): tensor for tensor in _tensors(denoiser.config)}
    layers: dict[str, dict[int | None, tuple[np.ndarray, np.ndarray]]] = {}
    for name, parts in sorted(modules.items()):
        tensor = known.get(name)
        if tensor is None or not all(slot.inputs for slot in tensor.slots):
            near = similar(name, [n for n, t in known.items() if t.slots[0].inputs])
            raise ConfigError(
                f"{file}: {name} is not a linear layer of {denoiser.config.class_name}"
                + (f"; near it is {near[0]}" if near else "")
                + "; take an adapter of this model, of its linear layers alone"
            )
        down, up = _checked(file, name, parts, tensor)
        scale = _scale(config, name, parts, len(down))
        for slot, (a, b) in zip(tensor.slots, _cut(tensor, down, up * scale), strict=True):
            layers.setdefault(_owner(slot), {})[slot.layer] = (
                _of_inputs(slot, len(down)).from_stored(a),
                _of_outputs(slot, len(down)).from_stored(b),
            )
    stacks = {_owner(s): s.layer is not None for t in known.values() for s in t.slots}
    counts: dict[str, int] = {}
    for slot in (slot for tensor in known.values() for slot in tensor.slots):
        counts[_owner(slot)] = counts.get(_owner(slot), 0) + 1
    return Adapter(
        name=str(path),
        pairs={
            owner: _stacked(found, counts[owner]) if stacks[owner] else found[None]
            for owner, found in layers.items()
        },
    )


def merge_lora(denoiser: nnx.Module, adapter: Adapter, scale: float = 1.0) -> None:
    """Add an adapter to a denoiser's weights, in place.

    Args:
      denoiser: of which it is.
      adapter: from `read_lora`.
      scale: of its product.
    """
    modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(denoiser)}
    for path, (down, up) in adapter.pairs.items():
        module: Any = modules[path]
        layout, kernel = layout_of(module), module.kernel.get_value()
        assert layout is not None, "only linear layers are read"
        whole = kernel.astype(jnp.float32) + scale * layout.product(
            jnp.asarray(down), jnp.asarray(up)
        )
        module.kernel = nnx.Param(whole.astype(kernel.dtype), **module.kernel.get_metadata())


def _abstract(config: Any) -> nnx.Module:
    """A denoiser of a config, of shapes."""
    make = functools.partial(
        COMPONENTS[config.class_name].make, config, dtype=jnp.float32, compute_dtype=jnp.float32
    )
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))


@functools.cache
def _tensors(config: Any) -> list[Tensor]:
    """The tensors of the files of a denoiser that are weights of our modules' kernels."""
    return [
        tensor
        for tensor in plan(_abstract(config), COMPONENTS[config.class_name].keys(config))
        if tensor.slots[0].path.endswith("/kernel")
    ]


def _owner(slot: Slot) -> str:
    return slot.path.removesuffix("/kernel")


def _of_inputs(slot: Slot, rank: int) -> Slot:
    """A slot as A's: its outputs are the rank."""
    key = slot.key
    plain = dataclasses.replace(key, order=(), patch=() if key.of_outputs else key.patch)
    return dataclasses.replace(slot, shape=(*slot.shape[: slot.inputs], rank), key=plain)


def _of_outputs(slot: Slot, rank: int) -> Slot:
    """A slot as B's: its inputs are the rank. Behind a convolution's A it has axes of size 1."""
    key = slot.key
    plain = dataclasses.replace(
        key,
        patch=key.patch if key.of_outputs else (),
        unfolded=False,
        trailing=len(key.patch) if key.unfolded else key.trailing,
    )
    shape = (rank, *slot.shape[slot.inputs :])
    return dataclasses.replace(slot, shape=shape, inputs=1, key=plain)


def _piece(slot: Slot, module: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """A [R, K] and scaled B [N, R] of a slot, as they are stored."""
    if module is None:
        return None
    spec: Spec = module.lora
    a, b = (np.asarray(part, np.float32) for part in adapter_factors(module))
    if slot.layer is not None:
        a, b = a[slot.layer], b[slot.layer]
    down = _of_inputs(slot, spec.rank).to_stored(a)
    return down, _of_outputs(slot, spec.rank).to_stored(b * spec.scale)


def _joined(
    tensor: Tensor, pieces: Sequence[tuple[np.ndarray, np.ndarray] | None]
) -> tuple[np.ndarray, np.ndarray]:
    """One adapter of a tensor of several slots: ranks one after another."""
    if len(pieces) == 1:
        assert pieces[0] is not None, "asked for where there is one"
        return pieces[0]
    rank = sum(len(piece[0]) for piece in pieces if piece is not None)
    outputs, inputs = tensor.shape[:2]
    # Those of a convolution have further axes (Sana's MLP).
    a, b = next(piece for piece in pieces if piece is not None)
    down = np.zeros((rank, inputs, *a.shape[2:]), np.float32)
    up = np.zeros((outputs, rank, *b.shape[2:]), np.float32)
    row = place = 0
    for slot, piece in zip(tensor.slots, pieces, strict=True):
        width = slot.stored_shape[tensor.axis]
        if piece is not None:
            ranks = slice(row, row + len(piece[0]))
            here = slice(place, place + width)
            down[ranks, here if tensor.axis else slice(None)] = piece[0]
            up[slice(None) if tensor.axis else here, ranks] = piece[1]
            row = ranks.stop
        place += width
    return down, up


def _cut(tensor: Tensor, down: np.ndarray, up: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """What a tensor's adapter is for each of its slots."""
    if len(tensor.slots) == 1:
        return [(down, up)]
    ends = np.cumsum([slot.stored_shape[tensor.axis] for slot in tensor.slots])[:-1]
    if tensor.axis:
        return [(piece, up) for piece in np.split(down, ends, 1)]
    return [(down, piece) for piece in np.split(up, ends, 0)]


def _stacked(
    found: Mapping[Any, tuple[np.ndarray, np.ndarray]], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a stack: layers that have none do nothing, smaller ranks are filled up."""
    rank = max(a.shape[-1] for a, _ in found.values())
    a, b = next(iter(found.values()))
    down = np.zeros((count, *a.shape[:-1], rank), np.float32)
    up = np.zeros((count, rank, *b.shape[1:]), np.float32)
    for layer, (a, b) in found.items():
        down[layer, ..., : a.shape[-1]] = a
        up[layer, : len(b)] = b
    return down, up


def _file(path: Path) -> tuple[Path, Path | None]:
    """The file of an adapter, and PEFT's config where there is one."""
    path = path.expanduser()
    if path.is_dir():
        if (path / LORA_FILE).is_file():
            return path / LORA_FILE, None
        if (path / _PEFT_FILE).is_file() and (path / _PEFT_CONFIG).is_file():
            return path / _PEFT_FILE, path / _PEFT_CONFIG
        raise CheckpointError(
            f"{path} holds neither {LORA_FILE} nor {_PEFT_CONFIG} with {_PEFT_FILE}; name the file "
            "of an adapter"
        )
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; name the file or folder of an adapter")
    return path, None


@functools.cache
def _flat(config: Any) -> Mapping[str, str]:
    """The names of `_tensors` by those with "_" for "."."""
    names = [tensor.name.removesuffix(".weight") for tensor in _tensors(config)]
    return {name.replace(".", "_"): name for name in names}


@functools.cache
def _flat_original(config: UNetConfig) -> Mapping[str, str]:
    """`_flat` by the names of the original code."""
    theirs = plan(_abstract(config), original_unet_keys(config))
    places = {(t.slots[0].path, t.slots[0].layer): t.name for t in theirs}
    return {
        places[t.slots[0].path, t.slots[0].layer].removesuffix(".weight").replace(".", "_"): (
            t.name.removesuffix(".weight")
        )
        for t in _tensors(config)
    }


def _stored(file: Path, prefix: str, config: Any) -> dict[str, dict[str, np.ndarray]]:
    """Parts A, B and perhaps alpha by module."""
    found: dict[str, dict[str, np.ndarray]] = {}
    tensors = open_file(file)
    names: Mapping[str, str] = {}
    if any(_KOHYA.match(name) for name in tensors):
        names = _flat(config)
        original = any(m[1].startswith(_ORIGINAL) for m in map(_KOHYA.match, tensors) if m)
        if original and isinstance(config, UNetConfig):
            names = {**names, **_flat_original(config)}
    for name, tensor in tensors.items():
        own = name.removeprefix(_PEFT_PREFIX).removeprefix(f"{prefix}.")
        match = _NAME.fullmatch(own)
        if own.startswith(("text_encoder", "lora_te", "unet.", "transformer.")) or match is None:
            raise ConfigError(
                f"{file}: {name} is not an A, B or alpha of a linear layer of the {prefix}; only "
                f"plain LoRA of the {prefix} is read: take an adapter of that alone"
            )
        module, kohya = match[1], _KOHYA.fullmatch(match[1])
        if kohya and kohya[1] not in names:
            raise ConfigError(
                f"{file}: {name} names no linear layer of {config.class_name}; take an adapter of "
                "this model, or load the file with diffusers' load_lora_weights and write it with "
                "save_lora_weights"
            )
        parts = found.setdefault(names[kohya[1]] if kohya else module, {})
        part = _PARTS[match[2] or match[3]]
        if part in parts:
            raise ConfigError(
                f"{file}: {name} is there under another name too; keep one of the two adapters"
            )
        array = np.asarray(tensor.view(), np.float32)
        if not np.isfinite(array).all() or (part == "alpha" and array.size != 1):
            raise CheckpointError(
                f"{file}: {name}, {array.shape}, is not finite, or an alpha of several numbers; "
                "save the adapter again"
            )
        parts[part] = array
    if not found:
        raise CheckpointError(f"{file} holds no adapter; save it again")
    return found


def _config(file: Path, peft: Path | None, prefix: str) -> Mapping[str, Any]:
    """What files say of ranks and alphas beside the arrays; empty where they say nothing."""
    try:
        if peft is not None:
            config = json.loads(peft.read_text(encoding="utf-8"))
        else:
            with safe_open(file, "numpy") as stream:
                said = json.loads((stream.metadata() or {}).get(_METADATA, "{}"))
            start = f"{prefix}."
            config = {k.removeprefix(start): v for k, v in said.items() if k.startswith(start)}
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{peft or file}: what it says of alphas is damaged: {error}"
        ) from error
    for key in ("use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save"):
        if config.get(key):
            raise ConfigError(
                f"{peft or file}: {key}={config[key]!r} is not supported; train plain LoRA"
            )
    return config


def _scale(
    config: Mapping[str, Any], name: str, parts: Mapping[str, np.ndarray], rank: int
) -> float:
    if "alpha" in parts:
        return parts["alpha"].item() / rank
    if "lora_alpha" not in config:
        return 1.0
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern.removeprefix('^')})", name):
            alpha = value
            break
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _checked(
    file: Path, name: str, parts: Mapping[str, np.ndarray], tensor: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a stored module, of the shapes that the model has."""
    if not {"A", "B"} <= set(parts):
        raise ConfigError(f"{file}: {name} has {first_few(sorted(parts))}; A and B are needed")
    down, up, shape = parts["A"], parts["B"], tensor.shape
    rank = len(down)
    if down.shape[1:] != shape[1:] or up.shape[:2] != (shape[0], rank):
        raise ConfigError(
            f"{file}: {name} has A {down.shape} and B {up.shape}, and the model's weight is "
            f"{shape}; take an adapter of this model"
        )
    return down, up
