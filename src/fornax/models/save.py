"""Writing a Hugging Face directory that transformers loads, whole or not at all."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from fornax.config.errors import CheckpointError
from fornax.config.files import replacing_folder
from fornax.gguf import is_gguf, write_tokenizer
from fornax.models.config import DecoderConfig
from fornax.models.decoder import Decoder
from fornax.models.families.convert import config_to_hf, family_for
from fornax.models.layout import TensorLayout, flat_variables, plan_copies, plan_layout

__all__ = ["save_pretrained"]

_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def save_pretrained(
    model: Decoder,
    path: str | Path,
    tokenizer_dir: str | Path | None = None,
    *,
    max_shard_bytes: int = 4 * 2**30,
    overwrite: bool = False,
) -> None:
    """Write config.json, generation_config.json, safetensors and tokenizer files.

    Everything is written beside `path` and moved there in one step; an interrupted or failed call
    leaves what was there before. Peak memory is the model's plus one file of weights.

    Args:
      model: the decoder; its parameters must all be addressable from this process.
      path: directory to make.
      tokenizer_dir: directory whose tokenizer files are copied, or a GGUF file with one.
      max_shard_bytes: size above which the weights go into several files with an index.
      overwrite: replace a model's directory that is there already.

    Raises:
      ConfigError: when no Hugging Face family can express the model.
      CheckpointError: when the directory exists, cannot be written, or there is no tokenizer in
        `tokenizer_dir`.
    """
    target = Path(path).resolve()
    _check_target(target, overwrite)
    hf_config = config_to_hf(model.config)
    family = family_for(model.config)
    layout = plan_layout(model, family.names)
    if family.mtp is not None:
        by_name = {tensor.name: tensor for tensor in layout}
        copies = plan_copies(layout, model.config, family.mtp)
        layout += [replace(by_name[of], name=name) for name, of in copies.items()]
    values = _values(model)
    hf_config["torch_dtype"] = np.dtype(model.embed.embedding[...].dtype).name
    try:
        with replacing_folder(target) as folder:
            _write_json(folder / "config.json", hf_config)
            _write_json(folder / "generation_config.json", _generation_config(model.config))
            if tokenizer_dir is not None:
                _copy_tokenizer(Path(tokenizer_dir), folder)
            _write_weights(folder, layout, values, max_shard_bytes)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {target}: {error.strerror or error}; nothing was changed there"
        ) from error


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(
            f"{target} exists; give another path, or overwrite=True (--overwrite on the command "
            "line)"
        )
    if not (target / "config.json").is_file():
        raise CheckpointError(
            f"{target} is not a model's directory (it has no config.json), and overwriting would "
            "delete it; give another path"
        )


def _values(model: Decoder) -> dict[str, jax.Array]:
    values = {path: variable.get_value() for path, variable in flat_variables(model).items()}
    for path, value in values.items():
        if not value.is_fully_addressable:
            raise CheckpointError(
                f"{path} is spread over other processes; save a checkpoint and convert "
                "it in one process with `fornax convert`"
            )
    return values


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _generation_config(config: DecoderConfig) -> dict[str, object]:
    eos = config.eos_token_ids
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": (eos[0] if len(eos) == 1 else list(eos)) if eos else None,
        "pad_token_id": config.pad_token_id,
    }
    return {key: value for key, value in ids.items() if value is not None}


def _copy_tokenizer(source: Path, folder: Path) -> None:
    if is_gguf(source):
        write_tokenizer(source, folder)
        return
    found = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise CheckpointError(
            f"{source} has no tokenizer files; expected some of {', '.join(_TOKENIZER_FILES)}"
        )
    for name in found:
        shutil.copyfile(source / name, folder / name)


def _write_weights(
    folder: Path,
    layout: list[TensorLayout],
    values: dict[str, jax.Array],
    max_shard_bytes: int,
) -> None:
    shards = _shards(layout, values, max_shard_bytes)
    places: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {tensor.name: _stored(tensor, values) for tensor in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, name))
        total += sum(array.nbytes for array in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(folder / "model.safetensors.index.json", index)


def _shards(
    layout: list[TensorLayout], values: dict[str, jax.Array], limit: int
) -> list[list[TensorLayout]]:
    shards: list[list[TensorLayout]] = []
    size = limit + 1
    for tensor in layout:
        width = values[tensor.blocks[0].slot.path].dtype.itemsize
        bytes_ = int(np.prod(tensor.shape)) * width
        if size + bytes_ > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += bytes_
    return shards


def _stored(tensor: TensorLayout, values: dict[str, jax.Array]) -> np.ndarray:
    whole = np.empty(tensor.shape, values[tensor.blocks[0].slot.path].dtype)
    for block in tensor.blocks:
        slot = block.slot
        index = tuple(number for number in (slot.layer, slot.expert) if number is not None)
        part = slot.to_stored(np.asarray(values[slot.path][index]))
        if len(tensor.blocks) == 1:
            return part
        block.put(whole, part)
    return whole
