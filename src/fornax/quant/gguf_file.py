"""A Hugging Face directory written as a GGUF file, tensor by tensor, and read back."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fornax.checkpoint.safetensors_file import FLOATS, StoredTensor, find_tensors
from fornax.config.errors import CheckpointError, ConfigError
from fornax.config.files import replacing
from fornax.config.hub import find_model
from fornax.gguf import (
    GGUFFile,
    NewTensor,
    Value,
    open_gguf,
    tokenizer_metadata,
    write_gguf,
)
from fornax.gguf import quantize as to_blocks
from fornax.gguf.blocks import BlockType
from fornax.models import DecoderConfig, config_from_hf, config_to_hf, open_pretrained, read_config
from fornax.models.families.gguf import (
    Source,
    gguf_config,
    gguf_metadata,
    gguf_sources,
    gguf_tensors,
    writable,
)
from fornax.quant.gguf_schemes import GGUFScheme

__all__ = ["GGUFReport", "quantize_gguf"]

_CHUNK = 2**18
"""Numbers rounded at a time, so that what lies between stays in caches."""
_MOST = 0.2
"""Squared error of a tensor as a share of its squares, above which it is another tensor."""
_NOT_KEPT = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"),
    *("attention_dropout", "embd_pdrop", "resid_pdrop", "router_aux_loss_coef"),
)
"""Keys of config.json that a file has with its tokenizer, or that only training reads."""


@dataclass(frozen=True, kw_only=True)
class GGUFReport:
    """What was written, measured on the file."""

    types: Mapping[str, int]
    """Tensors of each type."""
    errors: Mapping[str, float]
    """By type: squared error of its tensors as a share of their squares."""
    bytes_before: int
    """Of tensors."""
    bytes_after: int
    """Of the file."""


def quantize_gguf(source: str | Path, out: str | Path, scheme: GGUFScheme) -> GGUFReport:
    """Write a Hugging Face directory as a GGUF file, its config and tokenizer in it.

    A part of a tensor is read, rounded and written at a time. The file is read back before it takes
    its place: its config must be the directory's, and each tensor is compared.

    Args:
      source: a Hugging Face directory of a float model, or a name on the Hub.
      out: the file to make, called .gguf.
      scheme: one of `GGUF_SCHEMES`.

    Raises:
      ConfigError: a name without .gguf, an architecture, config or tokenizer that is not written.
      CheckpointError: weights that are missing, damaged or no numbers; `out` exists or cannot be
        written.
    """
    target = Path(out).expanduser().resolve()
    if target.suffix != ".gguf":
        raise ConfigError(
            f"the scheme {scheme.name} writes a GGUF file, and {target.name} does not end in .gguf"
            "; give --out a name that does"
        )
    if target.exists():
        raise CheckpointError(f"{target} exists; give another path, or delete it")
    folder = find_model(source).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"{source} is not a Hugging Face directory; only those are written as GGUF"
        )
    config = config_from_hf(read_config(folder))
    open_pretrained(folder)  # every tensor is there, and has its shape
    values = config_to_hf(config)
    row = writable(values)
    keys, factors = gguf_metadata(values)
    sources = gguf_sources(values, find_tensors(folder, FLOATS))
    metadata: dict[str, Value] = {
        "general.architecture": row.name,
        "general.type": "model",
        "general.name": folder.resolve().name,
        "general.file_type": scheme.file_type,
        "general.quantization_version": 2,
        **keys,
        **_tokenizer(folder, config),
    }
    layers, tied = config.num_layers, bool(config.tie_embeddings)
    tensors = [
        NewTensor(name, kind, array.shape, partial(_whole, array))
        for name, array in factors.items()
        for kind in [scheme.type_of("", array.shape, None, layers, tied=tied)]
    ]
    for each in sources:
        kind = scheme.type_of(each.part, each.shape, each.layer, layers, tied=tied)
        tensors.append(NewTensor(each.name, kind, each.shape, partial(_parts, each, kind)))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, durable=True) as draft:
            write_gguf(draft, metadata, tensors)
            file = open_gguf(draft)
            errors = _compare(file, values, sources, factors=bool(factors))
            size = draft.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"cannot write {target}: {error.strerror or error}; make room or make it writable, "
            "then run the same command again"
        ) from error
    return GGUFReport(
        types=collections.Counter(tensor.type.name for tensor in tensors),
        errors=errors,
        bytes_before=sum(x.view().nbytes for each in sources for x in each.tensors),
        bytes_after=size,
    )


def _tokenizer(folder: Path, config: DecoderConfig) -> dict[str, Value]:
    return tokenizer_metadata(
        folder,
        vocab_size=config.vocab_size,
        ends=config.eos_token_ids,
        bos=config.bos_token_id,
        pad=config.pad_token_id,
    )


def _whole(array: np.ndarray) -> Iterator[np.ndarray]:
    yield array.view(np.uint8)


def _parts(source: Source, kind: BlockType) -> Iterator[np.ndarray]:
    for tensor in source.tensors:
        for start, stop in _spans(tensor):
            rows = source.read(tensor, start, stop)
            try:
                yield to_blocks(
                    rows.reshape(-1, source.shape[-1]) if rows.ndim > 1 else rows[None], kind
                )
            except ValueError as error:
                raise CheckpointError(
                    f"{tensor.name} holds {error}; nothing was written"
                ) from error


def _spans(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Parts of the first axis of about as many numbers; a vector is one."""
    rows = tensor.shape[0]
    step = rows if len(tensor.shape) == 1 else max(1, _CHUNK // tensor.shape[1])
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _compare(
    file: GGUFFile, values: Mapping[str, object], sources: Sequence[Source], *, factors: bool
) -> dict[str, float]:
    """Squared errors by type, as shares.

    Raises:
      CheckpointError: another config, or a tensor that is another.
    """
    read = config_to_hf(config_from_hf(gguf_config(file)))
    # Divisors of rotation frequencies are a tensor, and may have come from several scalings.
    skipped = {*_NOT_KEPT, *(["rope_scaling"] if factors else [])}
    differing = [
        f"{key}={value!r} reads {read.get(key)!r}"
        for key, value in values.items()
        if key not in skipped and read.get(key) != value
    ]
    if differing:
        raise ConfigError(f"a GGUF file does not say all of this model: {'; '.join(differing)}")
    tensors = gguf_tensors(file)
    missed: dict[str, float] = {}
    squares: dict[str, float] = {}
    for source in sources:
        kind = file.tensors[source.name].type.name
        for tensor in source.tensors:
            off = total = 0.0
            for start, stop in _spans(tensor):
                want = tensor.view()[start:stop].astype(np.float64)
                off += float(((tensors[tensor.name].rows(start, stop) - want) ** 2).sum())
                total += float((want**2).sum())
            if not off <= _MOST * total:
                raise CheckpointError(
                    f"{tensor.name} reads back as another from {kind} (squared error {off:.3g} of "
                    f"{total:.3g}); nothing was written: check the disk and run again"
                )
            missed[kind] = missed.get(kind, 0.0) + off
            squares[kind] = squares.get(kind, 0.0) + total
    return {kind: missed[kind] / (squares[kind] or 1.0) for kind in missed}
