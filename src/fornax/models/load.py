"""Loading a Hugging Face directory or a GGUF file by tensors, each straight into its place."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from fornax.checkpoint.safetensors_file import DTYPES, find_tensors
from fornax.config.errors import CheckpointError, ConfigError
from fornax.config.json_files import read_json_object
from fornax.config.suggest import first_few
from fornax.gguf import is_gguf, open_gguf
from fornax.mesh import DEFAULT_RULES, Rules, parse_dtype, tree_shardings
from fornax.models.config import DecoderConfig
from fornax.models.create import abstract_decoder
from fornax.models.decoder import Decoder
from fornax.models.families import (
    CodeFormat,
    Tensor,
    config_from_hf,
    family_by_name,
    num_modules,
    read_quantization,
    unwrap_tensors,
)
from fornax.models.families.family import Family, TensorName
from fornax.models.families.gguf import gguf_config, gguf_tensors
from fornax.models.layout import TensorLayout, by_expert, plan_copies, plan_layout
from fornax.models.placing import Source
from fornax.models.stored import StoredModel

__all__ = [
    "load_pretrained",
    "open_pretrained",
    "read_config",
    "stored_code_formats",
    "stored_dtypes",
    "stored_modules",
]


def read_config(path: str | Path) -> dict[str, Any]:
    """The parsed config.json of a Hugging Face directory, or what it would be of a GGUF file.

    Raises:
      CheckpointError: when there is none, or it is not JSON; a GGUF file that is damaged or of an
        architecture that is not read.
      ConfigError: a GGUF file that asks for what is not supported.
    """
    if is_gguf(path):
        return gguf_config(open_gguf(path))
    return read_json_object(
        Path(path) / "config.json",
        "give a directory with config.json and safetensors files, or a GGUF file",
    )


def stored_modules(path: str | Path) -> int:
    """How many modules that predict further tokens a Hugging Face directory holds.

    Raises:
      ConfigError, CheckpointError: for what cannot be read.
    """
    values = read_config(path)
    config = config_from_hf(values)
    mtp, count = family_by_name(str(config.family)).mtp, num_modules(values)
    if mtp is None or not count:
        return 0
    starts = mtp.starts(config.num_layers, count)
    names = _float_tensors(Path(path), values)
    return count if any(name.startswith(starts) for name in names) else 0


def stored_dtypes(path: str | Path) -> set[str]:
    """Names of the dtypes of a Hugging Face directory's weights; of quantized ones that of the
    model, by config.json, or of their scales.

    Raises:
      ConfigError, CheckpointError: for what cannot be read.
    """
    found = _float_tensors(Path(path), read_config(path))
    return {tensor.dtype.name for tensor in found.values()}


def stored_code_formats(path: str | Path, *, mtp: bool = False) -> dict[str, CodeFormat | str]:
    """How packed products would read the quantized parameters of a Hugging Face directory or a
    GGUF file.

    Args:
      path: of the directory or file.
      mtp: see `open_pretrained`.

    Returns:
      As `StoredModel.code_formats`; nothing for a directory of floats.

    Raises:
      ConfigError, CheckpointError: for what cannot be read.
    """
    if not is_gguf(path) and read_quantization(read_config(path)) is None:
        return {}
    return open_pretrained(path, "float32", mtp=mtp).code_formats()


def _float_tensors(folder: Path, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The decoder's tensors by the names that it gives them alone, dequantized when viewed."""
    if is_gguf(folder):
        return {**gguf_tensors(open_gguf(folder))}
    quantization = read_quantization(values)
    if quantization is None:
        return {**unwrap_tensors(values, find_tensors(folder))}
    return quantization.dequantize(unwrap_tensors(values, find_tensors(folder, DTYPES)))


def load_pretrained(
    path: str | Path,
    dtype: str | np.dtype | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    *,
    compute_dtype: str | np.dtype | None = None,
    mtp: bool = False,
) -> Decoder:
    """A decoder with the weights of a Hugging Face directory or a GGUF file.

    Names, shapes and sizes are checked before anything is allocated. Then one tensor at a time is
    cut, converted and written into its place, each device reading its own part only: peak memory is
    the model's plus one tensor.

    Args and errors are those of `open_pretrained`.
    """
    stored = open_pretrained(path, dtype, mesh, rules, compute_dtype=compute_dtype, mtp=mtp)
    stored.fill()
    return stored.model


def open_pretrained(
    path: str | Path,
    dtype: str | np.dtype | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    *,
    compute_dtype: str | np.dtype | None = None,
    mtp: bool = False,
) -> StoredModel:
    """The weights of a Hugging Face directory or a GGUF file, checked and not yet read.

    Args:
      path: directory with config.json and safetensors files (one, or sharded with an index), or a
        file called `.gguf`.
      dtype: parameter dtype, "float32" or "bfloat16"; None keeps the file's.
      mesh: where the parameters will live; None for the default device.
      rules: logical axes to mesh axes.
      compute_dtype: see `Decoder`.
      mtp: whether to read the modules that predict further tokens. They are not part of what most
        do with a model, take the memory of a layer each, and make nothing better where no loss
        trains them along: they are left out unless asked for.

    Raises:
      ConfigError: config.json asks for what is not supported, or the dtype must be chosen; modules
        are asked for and there are none.
      CheckpointError: missing, extra or misshapen tensors, by name; a damaged file; pickled
        weights.
      ShardingError: a parameter does not divide over the mesh.
    """
    folder = Path(path)
    values = read_config(folder)
    config = config_from_hf(values, mtp=mtp)
    if (quantization := read_quantization(values)) is not None:
        quantization.warn_of_unused()
    stored = _float_tensors(folder, values)
    family = family_by_name(str(config.family))
    names = family.names
    if not mtp and family.mtp is not None:
        starts = family.mtp.starts(config.num_layers, num_modules(values))
        stored = {name: tensor for name, tensor in stored.items() if not name.startswith(starts)}
    stored = _without_unread_keys(stored, config, names)
    bias = names.get(_BIAS)
    dtype = _choose_dtype(dtype, stored, bias if isinstance(bias, str) else None)
    compute = None if compute_dtype is None else _as_dtype(compute_dtype)
    model = abstract_decoder(config, dtype=dtype, compute_dtype=compute)
    layout = _plan_layout(model, family, stored)
    if family.mtp is not None:
        stored = _without_copies(stored, plan_copies(layout, config, family.mtp), folder)
    stored = _without_known_extras(stored, layout, config.tie_embeddings, folder)
    _check(stored, layout, folder)
    if mesh is not None:
        tree_shardings(nnx.state(model), mesh, rules)  # whether all of it divides
    blocks: dict[str, dict[int | None, list[Source]]] = {}
    for tensor in layout:
        for block in tensor.blocks:
            layers = blocks.setdefault(block.slot.path, {})
            layers.setdefault(block.slot.layer, []).append((stored[tensor.name], block))
    return StoredModel(model=model, dtype=dtype, mesh=mesh, rules=rules, blocks=blocks)


_BIAS = "layers/experts/selection_bias"
"""What is float32 whatever the dtype of parameters; so is its like in modules."""


def _as_dtype(dtype: str | np.dtype) -> np.dtype:
    return parse_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)


def _choose_dtype(
    asked: str | np.dtype | None, stored: Mapping[str, Tensor], bias: str | None
) -> np.dtype:
    """The dtype of parameters; `bias` is the name of a tensor that is none."""
    allowed = (np.dtype(np.float32), np.dtype(jnp.bfloat16))
    if asked is not None:
        dtype = _as_dtype(asked)
        if dtype not in allowed:
            raise ConfigError(f"dtype={dtype.name} is not supported; use float32 or bfloat16")
        return dtype
    suffix = bias.split("{layer}")[-1] if bias else "\0"
    weights = [tensor for name, tensor in stored.items() if not name.endswith(suffix)]
    found = {tensor.dtype for tensor in weights}
    if len(found) == 1 and (only := found.pop()) in allowed:
        return only
    names = ", ".join(sorted(dtype.name for dtype in {t.dtype for t in weights}))
    raise ConfigError(
        f"the weights are stored as {names or 'nothing'}; say which dtype to hold them in: "
        "dtype='float32' or dtype='bfloat16'"
    )


def _without_known_extras(
    stored: Mapping[str, Tensor],
    layout: list[TensorLayout],
    tied: bool,
    folder: Path,
) -> dict[str, Tensor]:
    """Leave out what older files hold beside the weights: computed frequencies, a tied table, and
    the biases of zeros that GPTQ's library gives to modules that have none."""
    expected = {tensor.name for tensor in layout}
    kept = {n: t for n, t in stored.items() if not n.endswith("rotary_emb.inv_freq")}
    for name in [name for name in kept if name.endswith(".bias") and name not in expected]:
        if not kept[name].view().any():
            del kept[name]
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    if tied and head in kept and head not in expected and table in kept:
        if not _equal(kept[head], kept[table]):
            raise CheckpointError(
                f"{folder}: config.json ties the embeddings, and {head} differs from {table}; set "
                "tie_word_embeddings to false to load both"
            )
        del kept[head]
    return kept


def _plan_layout(
    model: Decoder, family: Family, stored: Mapping[str, Tensor]
) -> list[TensorLayout]:
    """The tensors by the names that the file has: those of transformers, or of released files,
    where modules may have either."""

    def plan(names: Mapping[str, TensorName]) -> list[TensorLayout]:
        return _with_experts(plan_layout(model, names), stored)

    def fits(layout: list[TensorLayout]) -> bool:
        return all(tensor.name in stored for tensor in layout)

    layout, released = plan(family.names), family.released_names
    if released is None or fits(layout):
        return layout
    layout = plan(released)
    modules = {path: name for path, name in family.names.items() if path.startswith("mtp/")}
    mixed = plan({**released, **modules})
    return mixed if fits(mixed) else layout


def _with_experts(layout: list[TensorLayout], stored: Mapping[str, Tensor]) -> list[TensorLayout]:
    """The tensors, those of all experts replaced where the file has a matrix of each."""
    found = []
    for tensor in layout:
        own = [] if tensor.name in stored else by_expert(tensor)
        found += own if own and own[0].name in stored else [tensor]
    return found


def _without_copies(
    stored: Mapping[str, Tensor], copies: Mapping[str, str], folder: Path
) -> dict[str, Tensor]:
    """Leave out what modules hold copies of, once they are seen to be copies."""
    for name, of in copies.items():
        if name in stored and of in stored and not _equal(stored[name], stored[of]):
            raise CheckpointError(
                f"{folder}: {name} differs from {of}, which the module that predicts further "
                "tokens shares with the model; load it without its modules, or copy the tensor"
            )
    return {name: tensor for name, tensor in stored.items() if name not in copies}


def _without_unread_keys(
    stored: Mapping[str, Tensor], config: DecoderConfig, names: Mapping[str, TensorName]
) -> dict[str, Tensor]:
    """Leave out what would make keys and values in layers that take another's."""
    layers = range(config.num_layers - config.shared_kv_layers, config.num_layers)
    unread = {
        str(names.get(f"layers/attention/{path}")).format(layer=layer)
        for path in ("k/kernel", "k/bias", "v/kernel", "v/bias", "k_norm/scale")
        for layer in layers
    }
    return {name: tensor for name, tensor in stored.items() if name not in unread}


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    left, right = a.view(), b.view()
    rows = max(1, 2**24 // max(1, left[:1].nbytes))
    parts = range(0, left.shape[0], rows)
    return all(left[i : i + rows].tobytes() == right[i : i + rows].tobytes() for i in parts)


def _check(stored: Mapping[str, Tensor], layout: list[TensorLayout], folder: Path) -> None:
    expected = {tensor.name: tensor.shape for tensor in layout}
    problems = []
    missing = [name for name in expected if name not in stored]
    if missing:
        shapes = [f"{name} {list(expected[name])}" for name in missing]
        problems.append(f"missing {first_few(shapes)}")
    extra = [name for name in stored if name not in expected]
    if extra:
        problems.append(f"unexpected {first_few([f'{n} {list(stored[n].shape)}' for n in extra])}")
    misshapen = [
        f"{name} expected {list(shape)}, found {list(stored[name].shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    if misshapen:
        problems.append(f"misshapen {first_few(misshapen)}")
    if problems:
        raise CheckpointError(
            f"{folder}: the tensors are not those that config.json describes: {'; '.join(problems)}"
        )
